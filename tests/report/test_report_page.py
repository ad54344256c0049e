"""The page: self-contained, escaped, complete for any run; written at once or not at all."""

import json
import math
import os
import re
import stat
from html.parser import HTMLParser

import pytest
from runmaker import add_event, config, make_run, rows

from laneway.core import InputError, LanewayError
from laneway.report import load_runs, render, write_report
from laneway.rundir import append_row

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"
VOID = {"meta", "link", "br", "img", "input", "hr"}
SELF_CLOSING = {"path", "line", "rect", "circle"}


class Page(HTMLParser):
    """Tags with their attributes; fails on a tag that is closed in the wrong order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


def page_of(*paths) -> Page:
    return Page(render(load_runs(paths)))


def labels(page: Page) -> set[str]:
    return {attrs["data-label"] for attrs in page.all("path") if "data-label" in attrs}


def test_a_run_has_all_its_pictures(tmp_path):
    run = make_run(tmp_path / "run", rows(200))
    page = page_of(run.path)
    for caption in (
        "Loss", "Bits per byte", "Learning rate", "Gradient norm", "Throughput", "Step time", "Peak memory",
        "Composite gain, forward", "Composite gain, backward", "Stream collapse", "Sinkhorn error", "Entropy of H_res",
        "Forward gain by site", "Backward gain by site", "Collapse by site",
        "Forward gain, depth × time", "Backward gain, depth × time", "Collapse, depth × time",
    ):  # fmt: skip
        assert caption in page.words, caption
    assert len([a for a in page.all("svg") if a.get("class") == "heat"]) == 3
    assert {"training, every row", "training", "validation", "run", "run, step 200"} <= labels(page)
    assert "self._buffer.read(size)" in page.words
    assert "optimizer.lr" in page.words


def test_the_page_is_self_contained(tmp_path):
    make_run(tmp_path / "run", rows(100))
    text = render(load_runs([tmp_path / "run"]))
    page = Page(text)
    for tag, attrs in page.tags:
        for name in ("src", "href", "xlink:href", "srcset", "action", "poster", "data"):
            value = attrs.get(name)
            assert value is None or value.startswith("#") or (tag, value) == ("link", "data:,"), (tag, name, value)
        assert not any(name.startswith("on") for name in attrs), "no inline handlers"
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", text)
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_page_is_accessible_in_its_structure(tmp_path):
    make_run(tmp_path / "run", rows(100))
    page = page_of(tmp_path / "run")
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for attrs in page.all("svg"):
        if attrs.get("aria-hidden") == "true":
            continue
        assert attrs["role"] == "img"
        assert all(name in ids for name in attrs["aria-labelledby"].split())
    for attrs in page.all("a"):
        assert attrs["href"].removeprefix("#") in ids
    assert page.all("html")[0]["lang"] == "en"
    assert len(page.all("h1")) == 1
    assert [a["content"] for a in page.all("meta") if a.get("name") == "viewport"] == ["width=device-width, initial-scale=1"]


def test_untrusted_text_is_escaped_everywhere(tmp_path):
    toml = config() + f"[extra]\nvalue = {json.dumps(EVIL)}\n{json.dumps(EVIL)} = 1\n"
    path = tmp_path / "<b>run<script>"
    run = make_run(path, rows(120), toml, sample=EVIL + "</pre></style></svg>")
    add_event(run, EVIL, 50, message=EVIL, **{EVIL: EVIL})
    run.env.write_text(json.dumps({EVIL: EVIL}), "utf-8")
    other = make_run(tmp_path / "other", rows(60), toml.replace("= 1", "= 2"))
    for paths in ([path], [path, other.path]):
        text = render(load_runs(paths))
        page = Page(text)
        assert len(page.all("script")) == 1
        assert page.all("img") == []
        assert page.all("b") == [{"class": "prompt"}] * len(page.all("pre"))
        assert text.count("<script>") == 1
        assert "alert(1)" in page.words, "it is shown as text, not dropped"


def test_several_runs_share_axes_legend_and_tables(tmp_path):
    make_run(tmp_path / "mhc", rows(200, 0), config())
    make_run(tmp_path / "hc", rows(200, 1, growth=0.6), config(residual="hc"))
    make_run(tmp_path / "plain", rows(120, 2, streams=False), config(residual="residual", lr=1e-3), finished=False)
    page = page_of(tmp_path / "mhc", tmp_path / "hc", tmp_path / "plain")
    assert "3 runs compared" in page.words
    assert "plain has no stream figures: a plain residual, or never probed." in page.words
    assert "mhc has no stream" not in page.words
    lines = [a for a in page.all("path") if a.get("data-label") in ("mhc: training", "hc: training", "plain: training")]
    assert {(a["class"], a.get("stroke-dasharray")) for a in lines} == {
        ("curve line c0", None),
        ("curve line c1", "7 3"),
        ("curve line c2", "2 3"),
    }
    assert "What differs" in page.words
    assert len([a for a in page.all("tr") if a.get("class") == "differs"]) == 2
    assert len([a for a in page.all("svg") if a.get("class") == "heat"]) == 6
    assert len(page.all("pre")) == 3, "one sample a run"


def test_equal_configurations_say_so(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / name, rows(30))
    page = page_of(tmp_path / "a", tmp_path / "b")
    assert "All runs have the same configuration." in page.words
    assert "What differs" not in page.words


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [{"step": 1}],
        [{"step": 1, "loss": math.nan}],
        [{"step": 1, "loss": None, "grad_norm": None}, {"step": 2, "loss": None}],
        [{"step": 1, "loss": 3.0}],
        [{"step": s, "loss": math.inf if s % 2 else 1e300} for s in range(1, 30)],
        [{"step": s, "loss": -1.0, "tokens_per_s": 0.0, "peak_bytes": 0, "lr": 0.0} for s in range(1, 9)],
        [{"step": s, "site_collapse": [None, None], "collapse": None} for s in range(1, 9)],
        [{"step": s, "site_collapse": [], "site_gain_forward": "x"} for s in range(1, 9)],
        [{"step": 10**15 + s, "loss": 2.0} for s in range(3)],
    ],
)
def test_runs_that_lack_or_break_things_still_have_a_page(tmp_path, metrics):
    make_run(tmp_path / "odd", metrics)
    make_run(tmp_path / "good", rows(60))
    alone, beside = page_of(tmp_path / "odd"), page_of(tmp_path / "odd", tmp_path / "good")
    assert ("odd has no metrics rows yet." in alone.words) == (not metrics)
    assert "good: training" in labels(beside)
    for page in (alone, beside):
        drawn = [a["d"] for a in page.all("path") if "d" in a]
        assert not any(re.search("nan|inf", d, re.IGNORECASE) for d in drawn)


def test_a_gap_breaks_the_curve(tmp_path):
    metrics = rows(60, streams=False)
    for row in metrics[20:25]:
        row["loss"] = None
    make_run(tmp_path / "run", metrics)
    drawn = next(a["d"] for a in page_of(tmp_path / "run").all("path") if a.get("data-label") == "training, every row")
    assert drawn.count("M") == 2


def test_events_are_marked_on_the_loss(tmp_path):
    run = make_run(tmp_path / "run", rows(200))
    add_event(run, "nonfinite", 33)
    add_event(run, "resume", 100)
    add_event(run, "notice", 120, message="is another")
    append_row(run.events, {"kind": "notice", "step": "nowhere"})
    page = page_of(run.path)
    assert "nonfinite at step 33" in page.words
    assert "resume at step 100" in page.words
    assert "notice at step 120" in page.words
    assert "× skipped step; ▼ other event" in page.words
    assert "nowhere" not in page.words


def test_thousands_of_events_and_rows_stay_small(tmp_path):
    run = make_run(tmp_path / "run", rows(6000, sites=48), finished=False)
    lines = [json.dumps({"kind": "nonfinite", "step": step, "time": 0.0}) for step in range(5000)]
    with run.events.open("a") as file:
        file.write("\n".join(lines) + "\n")
    text = render(load_runs([run.path]))
    assert len(text) < 1_500_000
    assert "events in the middle are left out here" in text
    points = [len(re.findall(r"[ML]", drawn)) for drawn in re.findall(r'<path d="([^"]*)" class="curve', text)]
    assert 1400 < max(points) <= 1500


def test_more_runs_than_colours(tmp_path):
    for index in range(11):
        make_run(tmp_path / f"run{index}", rows(40, index))
    page = page_of(*(tmp_path / f"run{index}" for index in range(11)))
    styles = {
        (a["class"], a.get("stroke-dasharray")) for a in page.all("path") if str(a.get("data-label")).endswith(": training")
    }
    assert len(styles) == 11
    assert not any("every row" in label for label in labels(page)), "raw values of many runs would hide the curves"


def test_default_places(tmp_path, monkeypatch):
    for name in ("a", "b"):
        make_run(tmp_path / name, rows(20))
    monkeypatch.chdir(tmp_path)
    assert write_report(["a"])[0].resolve() == tmp_path / "a" / "report.html"
    assert write_report(["a", "b"])[0].resolve() == tmp_path / "report.html"
    assert write_report(["a"], "x.html")[0].read_text("utf-8").startswith("<!DOCTYPE html>")
    assert stat.S_IMODE(os.stat("x.html").st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_bad_targets(tmp_path):
    make_run(tmp_path / "a", rows(5))
    with pytest.raises(InputError, match="it is a folder"):
        write_report([tmp_path / "a"], tmp_path)
    with pytest.raises(InputError, match="there is no folder"):
        write_report([tmp_path / "a"], tmp_path / "none" / "x.html")


def test_a_failed_write_leaves_the_old_page_and_nothing_else(tmp_path, monkeypatch):
    make_run(tmp_path / "a", rows(5))
    target = tmp_path / "out" / "x.html"
    target.parent.mkdir()
    target.write_text("old", "utf-8")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LanewayError, match="No space left on device"):
        write_report([tmp_path / "a"], target)
    assert target.read_text("utf-8") == "old"
    assert list(target.parent.iterdir()) == [target]


def test_lone_surrogates_do_not_stop_the_page(tmp_path):
    run = make_run(tmp_path / "a", rows(5))
    with run.events.open("a") as file:
        file.write('{"kind": "sample", "step": 5, "prompt": "\\ud800", "text": "\\udfff x"}\n')
    run.env.write_text('{"cpu": "\\ud800"}', "utf-8")
    assert "\ufffd x" in write_report([run.path])[0].read_text("utf-8")
