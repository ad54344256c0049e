"""The memory of a run on its page: what a real manager wrote, what is missing, and what is damaged."""

import copy
import json
import math
import random
import re

import numpy as np
import pytest
from managedrun import managed, put
from runmaker import make_run, rows
from test_report_page import Page, labels, page_of

from laneway.report import lives, load_runs, render
from laneway.report.memory import CHOICES, Memory, read_memory
from laneway.rundir import RunDirectory


@pytest.fixture(scope="module")
def tight():
    """A plan that keeps, moves, computes again and checkpoints; and the metrics of its passes."""
    return managed(90_000)


@pytest.fixture(scope="module")
def declined():
    """Plans of two shapes, for which everything fits."""
    return managed(1 << 29, depth=2, lengths=(32, 16, 32, 16))[0]


@pytest.fixture(scope="module")
def hopeless():
    """A plan that does not get within its budget."""
    return managed(30_000, depth=2)[0]


def with_memory(path, memory, metrics=None):
    run = make_run(path, rows(30) if metrics is None else metrics)
    put(run, memory)
    return run


def section(text: str, name: str) -> Page:
    found = re.search(rf'<section id="{name}".*?</section>', text, re.DOTALL)
    return Page(found[0])


def cells(page_text: str, name: str) -> dict[str, list[str]]:
    """Rows of the tables of a section by their heads."""
    part = re.search(rf'<section id="{name}".*?</section>', page_text, re.DOTALL)[0]
    found = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', part, re.DOTALL)
    return {head: re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for head, row in found}


def test_a_managed_run_has_its_pictures_and_tables(tmp_path, tight):
    memory, metrics = tight
    counts = memory["plans"][-1]["counts"]
    assert all(counts[choice]["entries"] for choice in CHOICES), "or the rest shows too little"
    assert memory["plans"][-1]["checkpointed_blocks"]
    run = with_memory(tmp_path / "run", memory, [row | metrics[at % len(metrics)] for at, row in enumerate(rows(30))])
    text = render(load_runs([run.path]))
    page = Page(text)
    for caption in (
        "Occupancy over a pass", "The plan, tensor by tensor", "Peak of each pass", "Stalls and recomputation", "Bytes moved",
        "Managed peak", "Peak against prediction", "Stalls", "Recomputation", "Moved out", "Moved back", "Misses",
    ):  # fmt: skip
        assert f'<span class="caption">{caption}</span>' in text, caption
    assert {"everything kept", "as planned", "budget", "observed", "predicted", "waiting for transfers"} <= labels(page)
    table = cells(text, "memory")
    assert table["Budget"] == ["87.9\u202fKiB"]
    assert table["Tier"] == ["simulated"]
    assert table["Bandwidth to the tier"] == ["9.54\u202fMiB/s"]
    assert table["Passes"] == ["1 recorded, 2 planned"]
    plan = memory["plans"][-1]
    row = table[plan["shape"]]
    assert row[0] == "yes"
    assert row[-1] == plan["reason"]
    assert row[-2] == ", ".join(plan["checkpointed_blocks"])
    assert [text.split(" · ")[0] for text in row[6:9]] == [str(counts[choice]["entries"]) for choice in CHOICES]


def test_the_page_stays_accessible_and_self_contained(tmp_path, tight):
    text = render(load_runs([with_memory(tmp_path / name, tight[0]).path for name in ("a", "b")]))
    page = Page(text)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids)), "two runs with a plan each"
    for attrs in page.all("svg"):
        if attrs.get("aria-hidden") != "true":
            assert attrs["role"] == "img"
            assert all(name in ids for name in attrs["aria-labelledby"].split())
    assert {attrs["href"] for attrs in page.all("a")} >= {"#memory", "#memory-passes"}
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", text)


def test_every_bar_is_named_and_lies_where_its_tensor_lived(tight):
    plan = Memory.of(tight[0]).plans[-1]
    axis = lives.Axis.of(plan)
    assert axis.unit == "ms"
    found = lives.bars(plan, axis)
    assert len(found) == len(plan.lives)
    for bar, life in zip(found, sorted(plan.lives, key=lambda life: life.save), strict=True):
        assert (bar.nbytes, bar.choice, bar.tensors) == (life.nbytes, life.choice, 1)
        after = [1e3 * plan.times[min(event + 1, len(plan.times) - 1)] for event in (life.save, life.use, life.free)]
        assert (bar.begin, bar.end) == (after[0], after[2])
        assert (bar.away is None) == (life.choice == "keep" or after[1] <= after[0])
        assert bar.away is None or bar.away == (after[0], after[1])
        assert life.name in bar.label or not life.name
    assert {bar.choice for bar in found if bar.away} == {"move", "recompute"}


def test_the_picture_gives_bytes_their_room_and_each_choice_its_form(tight):
    plan = Memory.of(tight[0]).plans[-1]
    page = Page(str(lives.draw("The plan", plan, "x")))
    bars = [attrs["class"] for attrs in page.all("g") if "bar" in attrs.get("class", "").split()]
    assert len(bars) == len(plan.lives)
    for choice in CHOICES:
        assert f"bar {choice} c{lives.COLOURS[choice]}" in bars
    boxes = [attrs for attrs in page.all("rect") if attrs["class"] == "held"]
    largest = max(plan.lives, key=lambda life: life.nbytes).nbytes
    smallest = min(plan.lives, key=lambda life: life.nbytes).nbytes
    assert largest > 10 * smallest
    heights = [float(attrs["height"]) for attrs in boxes]
    assert max(heights) > 3 * min(heights)
    assert min(heights) >= lives.THINNEST
    assert page.all("line")[-1]["class"] in ("gone", "axis")
    assert any(attrs.get("class") == "away" for attrs in page.all("rect"))
    assert any(attrs.get("class") == "gone" for attrs in page.all("line"))
    assert re.search(r"keep: \d+ tensors.*move: \d+ tensors.*recompute: \d+ tensors", page.words)


@pytest.mark.parametrize("number", [1, 79, 80, 81, 300, 5000])
def test_many_tensors_are_merged_and_none_is_lost(tight, number):
    draw = random.Random(number)
    data = copy.deepcopy(tight[0])
    plan, points = data["plans"][-1], 2 * number
    plan["trace"] = [[0.001 * at, at] for at in range(points)]
    plan["entries"] = [
        {"name": f"b{at}", "nbytes": draw.randrange(1, 1 << 20), "choice": draw.choice(CHOICES),
         "save": at, "use": points - 1 - at, "free": points - 1 - at} for at in range(number)
    ]  # fmt: skip
    plan = Memory.of(data).plans[-1]
    found = lives.bars(plan, lives.Axis.of(plan))
    assert len(found) == number if number <= lives.BAR_LIMIT else lives.SINGLE < len(found) <= lives.BAR_LIMIT
    for choice in CHOICES:
        mine = [life for life in plan.lives if life.choice == choice]
        bars = [bar for bar in found if bar.choice == choice]
        assert sum(bar.tensors for bar in bars) == len(mine)
        assert sum(bar.nbytes for bar in bars) == sum(life.nbytes for life in mine)
    single = {bar.nbytes for bar in found if bar.tensors == 1}
    assert set(sorted((life.nbytes for life in plan.lives), reverse=True)[: lives.SINGLE]) <= single
    for bar in found:
        assert bar.begin <= bar.end
        assert bar.away is None or bar.begin <= bar.away[0] < bar.away[1] <= bar.end
    text = str(lives.draw("x", plan, "x"))
    height = float(re.search(r'viewBox="0 0 560 (\d+)"', text)[1])
    assert height <= 315
    assert len(text) < 60_000


def test_occupancy_is_the_trace_of_both_and_the_budget(tmp_path, tight):
    run = with_memory(tmp_path / "run", tight[0])
    text = render(load_runs([run.path]))
    plot = json.loads(next(a["data-plot"] for a in section(text, "memory").all("svg") if "for-wide" in a["class"]))
    plan = tight[0]["plans"][-1]
    scale = {"B": 1, "KiB": 1024}[plot["unit"]]
    (low, high, bottom, top), (first, last, left, right) = plot["y"], plot["x"]
    drawn = {a["data-label"]: a["d"] for a in reversed(section(text, "memory").all("path")) if "data-label" in a}

    def values(label):
        points = [[float(v) for v in point.split()] for point in re.findall(r"[ML]([^ML]+)", drawn[label])]
        x, y = np.array(points).T
        return first + (x - left) / (right - left) * (last - first), low + (y - bottom) / (top - bottom) * (high - low)

    for label, key in (("as planned", "trace"), ("everything kept", "unmanaged_trace")):
        x, y = values(label)
        assert y.max() * scale == pytest.approx(max(nbytes for _, nbytes in plan[key]), rel=0.01)
        assert x.max() == pytest.approx(1e3 * plan[key][-1][0], rel=0.01)
        at = int(len(plan[key]) / 2)
        assert y[2 * at] * scale == pytest.approx(plan[key][at][1], rel=0.02), "stairs: two points for each of the trace"
    assert values("budget")[1] * scale == pytest.approx(90_000, rel=0.01)
    assert low == 0


def test_a_plan_that_declined(tmp_path, declined, hopeless):
    text = render(load_runs([with_memory(tmp_path / "roomy", declined).path]))
    table = cells(text, "memory")
    assert [row[-1] for head, row in table.items() if "×" in head] == ["everything fits"] * 2
    assert "beyond the picture" in section(text, "memory").words, "a budget far above would flatten the curves"
    assert "budget" not in labels(section(text, "memory"))
    assert not any(a.get("class") == "away" for a in Page(text).all("rect"))
    text = render(load_runs([with_memory(tmp_path / "hopeless", hopeless).path]))
    row = next(row for head, row in cells(text, "memory").items() if "×" in head)
    assert row[0] == "no"
    assert row[-1].startswith("no plan gets below")


def test_without_a_file_there_is_no_section(tmp_path):
    run = make_run(tmp_path / "run", rows(30))
    assert run.read_memory() is None
    assert read_memory(run) == (None, "")
    assert 'id="memory' not in render(load_runs([run.path]))


@pytest.mark.parametrize("content", [b"", b"{", b'{"plans": [', b"[]", b"null", b"\xff\xfe", b"1" * 6000, b"[" * 100_000])
def test_a_file_that_is_no_object_is_said_to_be(tmp_path, content):
    run = make_run(tmp_path / "run", rows(30))
    run.memory.write_bytes(content)
    assert run.read_memory() is None
    page = page_of(run.path)
    assert "run: no memory shown; memory.json is no JSON object." in page.words
    assert "Occupancy" not in page.words
    assert "Loss" in page.words


def test_damage_inside_is_named(tmp_path, tight):
    def damaged(change):
        data = copy.deepcopy(tight[0])
        change(data)
        return data

    faults = {
        "plans is missing": lambda d: d.pop("plans"),
        "passes is damaged": lambda d: d.update(passes={}),
        "tier is damaged": lambda d: d.update(tier="disk"),
        "passes[1].pass is no number of a pass": lambda d: d["passes"][1].pop("pass"),
        "plans[0].entries[3].nbytes is no number of bytes": lambda d: d["plans"][0]["entries"][3].update(nbytes=-1),
        "plans[0].entries[2].choice is none of keep, move, recompute": lambda d: d["plans"][0]["entries"][2].pop("choice"),
        "plans[0].entries[1]: save, use and free are not all events": lambda d: d["plans"][0]["entries"][1].update(use=0.5),
        "plans[0].trace[4] is no pair of seconds and bytes": lambda d: d["plans"][0]["trace"].insert(4, [math.nan, 1]),
        "plans[0].trace: time goes back": lambda d: d["plans"][0]["trace"].reverse(),
        "plans[0].counts.move is missing": lambda d: d["plans"][0]["counts"].pop("move"),
        "plans[0].checkpointed_blocks is damaged": lambda d: d["plans"][0].update(checkpointed_blocks="all"),
    }
    for at, (words, change) in enumerate(faults.items()):
        run = with_memory(tmp_path / str(at), damaged(change))
        page = page_of(run.path)
        assert f"{at}: no memory shown; memory.json: {words}." in page.words
        assert "Occupancy" not in page.words


def test_whatever_is_broken_there_is_a_page(tmp_path, tight):
    """One random part of a real file replaced at a time: never an error, never a coordinate that is none."""
    draw = random.Random()
    seed = draw.randrange(1 << 30)
    draw.seed(seed)
    odd = [
        None,
        True,
        -1,
        0,
        10**400,
        1e308,
        5e-324,
        "x",
        "<script>alert(1)</script>",
        [],
        {},
        [[]],
        math.nan,
        math.inf,
        "\ud800",
    ]
    run = RunDirectory(make_run(tmp_path / "run", rows(10)).path)
    for _ in range(30):
        data = copy.deepcopy(tight[0])
        place, part = data, data
        while isinstance(part, dict | list) and part:
            place, at = part, draw.choice(list(part) if isinstance(part, dict) else range(len(part)))
            part = place[at]
            if draw.random() < 0.15:
                break
        place[at] = draw.choice(odd)
        put(run, data)
        text = render(load_runs([run.path]))
        page = Page(text)
        assert len(page.all("script")) == 1
        drawn = [a.get(key, "") for tag, a in page.tags if tag != "svg" for key in ("d", "x", "y", "width", "height")]
        assert not any(re.search("nan|inf", str(value), re.IGNORECASE) for value in drawn), f"seed {seed}: {at} {place[at]!r}"


def test_names_are_escaped(tmp_path, tight):
    data = copy.deepcopy(tight[0])
    evil = "<script>alert(1)</script>\"'\x00\ud800"
    plan = data["plans"][-1]
    plan["entries"][0]["name"] = plan["reason"] = plan["shape"] = plan["checkpointed_blocks"][0] = evil
    data["tier"]["name"] = data["policy"] = evil
    text = render(load_runs([with_memory(tmp_path / "run", data).path]))
    assert text.count("<script>") == 1
    assert section(text, "memory").words.count("alert(1)") >= 6
    assert "\x00" not in text
    text.encode("utf-8")


def test_a_pass_that_strayed_is_marked(tmp_path, tight):
    data = copy.deepcopy(tight[0])
    data["passes"][2]["way"] = "strayed"
    page = section(render(load_runs([with_memory(tmp_path / "run", data).path])), "memory-passes")
    assert "pass 2 strayed from its plan" in page.words
    assert "▼ strayed from its plan" in page.words


def test_time_that_stands_still_gives_events_their_place(tight):
    data = copy.deepcopy(tight[0])
    plan = data["plans"][-1]
    plan["trace"] = [[0.0, nbytes] for _, nbytes in plan["trace"]]
    plan = Memory.of(data).plans[-1]
    axis = lives.Axis.of(plan)
    assert axis.unit == ""
    assert axis.after(7) == 8.0
    assert "at event" in lives.bars(plan, axis)[0].label
    assert "event" in str(lives.draw("x", plan, "x"))


def test_nothing_saved_draws_nothing(tmp_path, tight):
    data = copy.deepcopy(tight[0])
    data["plans"][-1] |= {"entries": [], "trace": [], "unmanaged_trace": []}
    run = with_memory(tmp_path / "run", data)
    page = section(render(load_runs([run.path])), "memory")
    assert "tensor by tensor" not in page.words
    assert "Budget" in page.words
    put(run, data | {"plans": [], "passes": []})
    text = render(load_runs([run.path]))
    assert "memory-passes" not in text
    assert cells(text, "memory")["Passes"] == ["none"]


def test_runs_with_and_without_a_manager_beside_each_other(tmp_path, tight, hopeless):
    paths = [with_memory(tmp_path / "tight", tight[0]).path, make_run(tmp_path / "plain", rows(30)).path]
    paths.append(with_memory(tmp_path / "hopeless", hopeless).path)
    text = render(load_runs(paths))
    table = cells(text, "memory")
    assert table["Budget"] == ["87.9\u202fKiB", "29.3\u202fKiB"]
    assert table["tight"][1] == "yes"
    assert table["hopeless"][1] == "no"
    assert "hopeless, pass of 2 × 32" in section(text, "memory").words
    assert len([a for a in section(text, "memory").all("svg") if a.get("class", "").startswith("lives")]) == 4, "wide and narrow"
