"""The page in a real browser: it renders, silently, without a network, from a phone's width to a desktop's."""

import re

import pytest
from browser import Browser, find_browser, png_colours
from managedrun import managed, put
from runmaker import add_event, config, make_run, rows

from laneway.report import write_report

pytestmark = [pytest.mark.browser, pytest.mark.skipif(find_browser() is None, reason="no chromium or google-chrome on PATH")]


@pytest.fixture(scope="module")
def browser():
    made = Browser(find_browser())
    yield made
    made.close()


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    base = tmp_path_factory.mktemp("single")
    metrics = rows(300)
    metrics[100]["loss"] = metrics[100]["grad_norm"] = None
    run = make_run(base / "a-run-with-<script>alert(1)</script>-in-its-name-that-is-also-very-long".replace("/", "|"), metrics)
    add_event(run, "nonfinite", 101, in_a_row=1)
    return write_report([run.path])[0]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    base = tmp_path_factory.mktemp("compared")
    make_run(base / "mhc", rows(300, 0))
    make_run(base / "hc", rows(300, 1, growth=0.8), config(residual="hc"))
    make_run(base / "plain", rows(200, 2, streams=False), config(residual="residual"), finished=False)
    make_run(base / "empty", [])
    return write_report([base / name for name in ("mhc", "hc", "plain", "empty")], base / "page.html")[0]


@pytest.fixture(scope="module")
def tended(tmp_path_factory):
    """A run under the memory manager."""
    memory, passes = managed(90_000, lengths=(32, 32, 16, 32, 48, 32))
    metrics = rows(200)
    run = make_run(tmp_path_factory.mktemp("tended") / "run", [row | passes[at % len(passes)] for at, row in enumerate(metrics)])
    put(run, memory)
    return write_report([run.path])[0]


@pytest.fixture(params=["single", "compared", "tended"])
def page(request):
    return request.getfixturevalue(request.param)


def silent(browser: Browser, page) -> None:
    """Nothing on the console, nothing thrown, and the file itself the only thing that was asked for."""
    browser.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
    assert browser.said("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown") == []
    requests = {entry["request"]["url"] for entry in browser.said("Network.requestWillBeSent")}
    assert {url for url in requests if not url.startswith("data:")} == {page.resolve().as_uri()}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_page_renders_silently_and_fits(browser, page, width, dark):
    browser.open(page, width, 800, dark)
    silent(browser, page)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 150) == dark


def test_curves_are_there_with_finite_coordinates(browser, page):
    browser.open(page)
    boxes = browser.evaluate(
        "[...document.querySelectorAll('svg.chart:not(.for-narrow) path.curve')].map(p => "
        "{const b = p.getBBox(); return [p.dataset.label, p.getTotalLength(), b.x, b.y, b.width, b.height]})"
    )
    assert len(boxes) >= 15
    for label, length, *box in boxes:
        assert length > 0, label
        assert all(-1 <= value <= 600 for value in box), label
    visible = browser.evaluate(
        "[...document.querySelectorAll('svg.chart, svg.heat, svg.lives')].filter(s => s.clientWidth > 0).length"
    )
    assert visible >= 16
    sizes = browser.evaluate(
        "[...document.querySelectorAll('svg.chart:not(.for-narrow) text')].map(t => t.getBoundingClientRect().height)"
    )
    assert min(sizes) > 9


def test_text_in_charts_is_readable_on_a_phone(browser, page):
    browser.open(page, 360)
    small = browser.evaluate(
        "[...document.querySelectorAll('svg.chart, svg.heat, svg.lives')].filter(s => s.clientWidth > 0).map(s => "
        "parseFloat(getComputedStyle(s.querySelector('text')).fontSize) * s.clientWidth / s.viewBox.baseVal.width)"
    )
    assert min(small) >= 10, "pixels"


def test_labels_do_not_leave_their_drawings_or_overlap(browser, page):
    for width in (360, 1280):
        browser.open(page, width)
        faults = browser.evaluate("""(() => {
          const bad = [];
          for (const svg of document.querySelectorAll('svg.chart, svg.heat, svg.lives')) {
            if (!svg.clientWidth) continue;
            const frame = svg.getBoundingClientRect();
            const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
            for (const [name, b] of boxes)
              if (b.left < frame.left - 1 || b.right > frame.right + 1 || b.bottom > frame.bottom + 1) bad.push(['out', name]);
            boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([two, b]) => {
              const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
              const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
              if (wide > 1 && high > 4) bad.push(['over', one, two, svg.getAttribute('aria-labelledby')]);
            }));
          }
          return bad;
        })()""")
        assert faults == [], width


def test_screenshot_shows_colours(browser, page):
    browser.open(page)
    colours = png_colours(browser.screenshot("#loss"))
    assert len(colours) > 50
    assert bytes.fromhex("0067a8") in {colour[:3] for colour in colours}, "the first run's colour"


def test_pointer_and_keys_read_values(browser, single):
    browser.open(single)
    readout = browser.evaluate("""(() => {
      const svg = document.querySelector('#optimisation svg.chart'), box = svg.getBoundingClientRect();
      const middle = {clientX: box.left + box.width / 2, clientY: box.top + 50, bubbles: true};
      svg.dispatchEvent(new PointerEvent('pointermove', middle));
      return svg.closest('figure').querySelector('.readout').textContent;
    })()""")
    found = re.fullmatch(r"step (\d+): .* ([\d.e−-]+)", readout)
    assert found
    step, lr = int(found[1]), float(found[2].replace("−", "-"))
    truth = next(row["lr"] for row in rows(300) if row["step"] == step)
    assert lr == pytest.approx(truth, rel=0.02, abs=3e-5)
    after = browser.evaluate("""(() => {
      const svg = document.querySelector('svg.heat');
      svg.focus();
      const key = name => svg.dispatchEvent(new KeyboardEvent('keydown', {key: name, bubbles: true}));
      key('ArrowRight'); key('ArrowUp'); key('ArrowUp');
      const shown = svg.closest('figure').querySelector('.readout').textContent;
      key('Escape');
      return [shown, svg.closest('figure').querySelector('.readout').textContent, document.activeElement === svg];
    })()""")
    assert after[0].startswith("step 20, site 2: 1.0")
    assert after[1:] == ["", True]


def test_pointer_and_keys_name_tensors_and_times(browser, tended):
    browser.open(tended)
    labels = browser.evaluate("[...document.querySelectorAll('svg.lives.for-wide g.bar > title')].map(t => t.textContent)")
    assert len(labels) > 10
    seen = browser.evaluate("""(() => {
      const svg = document.querySelector('svg.lives.for-wide'), out = svg.closest('figure').querySelector('.readout');
      const said = [];
      for (const bar of svg.querySelectorAll('g.bar')) {
        const box = bar.getBoundingClientRect();
        const at = {clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, bubbles: true};
        svg.dispatchEvent(new PointerEvent('pointermove', at));
        said.push(out.textContent);
      }
      svg.dispatchEvent(new PointerEvent('pointerleave'));
      said.push(out.textContent);
      const key = name => svg.dispatchEvent(new KeyboardEvent('keydown', {key: name, bubbles: true}));
      key('ArrowDown'); key('ArrowDown'); key('ArrowUp'); key('ArrowDown');
      said.push(out.textContent);
      key('Escape');
      said.push(out.textContent);
      return said;
    })()""")
    assert seen[:-3] == labels
    assert seen[-3] == seen[-1] == ""
    assert seen[-2] in labels[1:]
    readout = browser.evaluate("""(() => {
      const svg = document.querySelector('#memory svg.chart.for-wide'), box = svg.getBoundingClientRect();
      const middle = {clientX: box.left + box.width / 3, clientY: box.top + 50, bubbles: true};
      svg.dispatchEvent(new PointerEvent('pointermove', middle));
      return svg.closest('figure').querySelector('.readout').textContent;
    })()""")
    assert re.fullmatch(r"ms into the pass \d+\.\d+: .*as planned [\d.]+.*", readout)


def test_every_bar_can_be_seen(browser, tended):
    for dark in (False, True):
        browser.open(tended, dark=dark)
        boxes = browser.evaluate(
            "[...document.querySelectorAll('svg.lives.for-wide g.bar')].map(g => g.getBBox()).map(b => [b.width, b.height])"
        )
        assert all(width > 0 and height > 1 for width, height in boxes)
        shown = {colour[:3] for colour in png_colours(browser.screenshot("svg.lives.for-wide"))}
        assert bytes.fromhex("2fc79b" if dark else "00795c") in shown, "what is kept"


def test_page_is_complete_without_scripts(browser, single):
    browser.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(single)
        picture = browser.send("Page.captureScreenshot")["data"]
        document = browser.send("DOM.getDocument", depth=0)["root"]["nodeId"]
        curves = browser.send("DOM.querySelectorAll", nodeId=document, selector="path.curve")["nodeIds"]
    finally:
        browser.send("Emulation.setScriptExecutionDisabled", value=False)
    assert len(curves) > 15
    assert len(picture) > 20_000
    browser.open(single)


def test_prints_light_and_without_navigation(browser, single):
    browser.open(single, dark=True)
    browser.send("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    try:
        shown = browser.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('nav')).display, "
            "getComputedStyle(document.querySelector('h1')).color]"
        )
    finally:
        browser.send("Emulation.setEmulatedMedia", media="")
    assert shown[0] == "rgb(255, 255, 255)"
    assert shown[1] == "none"
    assert sum(map(int, re.findall(r"\d+", shown[2])[:3])) < 150, "dark ink"


def test_the_watch_itself_sees_errors_requests_and_overflow(browser, tmp_path):
    bad = tmp_path / "bad.html"
    body = '<img src="file:///nowhere.png"><div style="width:900px">x</div><script>console.error("x"); nothing()</script>'
    bad.write_text(f'<meta name="viewport" content="width=device-width">{body}', "utf-8")
    browser.open(bad, 360)
    with pytest.raises(AssertionError):
        silent(browser, bad)
    assert browser.said("Runtime.exceptionThrown")
    assert any("nowhere.png" in entry["request"]["url"] for entry in browser.said("Network.requestWillBeSent"))
    assert browser.evaluate("document.documentElement.scrollWidth") > 360
