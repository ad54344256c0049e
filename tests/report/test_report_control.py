"""Curvature, gates, priorities and purified paths in the report, from the rows and events that the loop writes."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from runmaker import add_event, make_run, rows

from laneway.report import load_runs, render
from laneway.report.control import figures, purified, stream_heats

SITES, STREAMS = 6, 4


def controlled(seed: int = 0) -> list[dict]:
    random = np.random.default_rng(seed)
    found = rows(60, seed)
    for row in found:
        row |= {"lambda": 0.3 + row["step"] / 600, "purified_paths": int(row["step"] % 7 == 0)}
        row["curvature"] = random.gamma(2, 0.05, (SITES, STREAMS)).tolist()
        row["gate"] = random.uniform(0.5, 1, (SITES, STREAMS)).tolist()
        row["priority"] = random.dirichlet(np.ones(STREAMS), SITES).tolist()
    found[0]["curvature"] = [[None] * STREAMS] * SITES
    return found


def test_every_number_lies_at_its_stream_site_and_step():
    made = controlled()
    for key in ("curvature", "gate", "priority"):
        heats = stream_heats(made, key)
        assert len(heats) == STREAMS
        for stream, heat in enumerate(heats):
            assert heat.steps.tolist() == [row["step"] for row in made]
            expected = [[np.nan if site[stream] is None else site[stream] for site in row[key]] for row in made]
            assert np.array_equal(heat.values, np.array(expected, dtype=float), equal_nan=True)


def test_ragged_and_damaged_rows():
    made = [
        {"step": 1, "gate": [[1.0, 0.5], [0.25]]},
        {"step": 2, "gate": "none"},
        {"step": 3, "gate": [[1.0]]},
        {"step": 4, "gate": [[1.0, "x"], [None]]},
        {"step": 5},
        {"step": 6, "gate": [1.0, 2.0]},
    ]
    first, second = stream_heats(made, "gate")
    assert first.steps.tolist() == [1, 4]
    assert np.array_equal(first.values, [[1.0, 0.25], [1.0, np.nan]], equal_nan=True)
    assert np.array_equal(second.values, [[0.5, np.nan], [np.nan, np.nan]], equal_nan=True)
    assert stream_heats([], "gate") == []


def test_purifications_by_block_and_time():
    events = [
        {"kind": "purify", "step": step, "path": f"blocks.{block}.ffn.out.weight", "score": 3.0}
        for step, block in [(10, 2), (10, 2), (11, 2), (40, 0)]
    ]
    events += [{"kind": "purify", "step": 12, "path": "head.weight"}, {"kind": "nonfinite", "step": 3}]
    heat, note = purified(events)
    assert heat is not None
    assert heat.values.shape[1] == 3
    assert heat.values.sum() == 4
    assert heat.values[heat.steps == 10, 2] == 2
    assert heat.values[-1, 0] == 1
    assert note.startswith("blocks.2.ffn.out.weight 3 ×")
    assert "head.weight" in note
    assert purified([{"kind": "purify", "step": "?", "path": None}]) == (None, "")
    heat, _ = purified([{"kind": "purify", "step": 5, "path": "blocks.1.attention.qkv.weight"}])
    assert heat is not None
    assert heat.values.tolist() == [[0.0, 1.0]]
    heat, _ = purified([{"kind": "purify", "step": 5, "path": "blocks.1.ffn.out"}], [float("nan"), *range(1, 41)])
    assert heat is not None
    assert (heat.steps[0], heat.steps[-1]) == (1, 40)
    assert heat.values[heat.steps == 5, 1] == heat.values.sum() == 1


@pytest.mark.parametrize(
    ("keys", "titles"),
    [
        (("lambda", "curvature", "gate"), ["Strength λ of the curvature constraint", "Curvature κ", "Gate on the writes"]),
        (("priority",), ["Priority"]),
        (("purified_paths",), ["Purified paths"]),
    ],
)
def test_a_run_with_one_control_has_its_pictures_alone(tmp_path, keys, titles):
    made = [{k: v for k, v in row.items() if k in ("step", "time", "loss", *keys)} for row in controlled()]
    drawn = list(figures(load_runs([make_run(tmp_path / "run", made).path])))
    assert list(dict.fromkeys(figure.title.partition(", stream")[0] for figure in drawn)) == titles
    for figure in drawn:
        words = [text.text for text in ET.fromstring(figure.drawings[0]).iter() if text.tag.endswith("text")]
        assert "step" in words
        assert ("site ↑" in words) == ("stream" in figure.title)


@pytest.mark.parametrize("several", [False, True])
def test_the_page_draws_them(tmp_path, several):
    paths = []
    for index in range(1 + several):
        path = make_run(tmp_path / f"run{index}", controlled(index))
        add_event(path, "purify", step=14, path="blocks.1.ffn.out.weight", score=4.2, correction=1e-3)
        paths.append(path.path)
    runs = load_runs(paths)
    drawn = list(figures(runs))
    titles = [figure.title for figure in drawn]
    for title in ("Curvature κ", "Gate on the writes", "Priority"):
        assert titles.count(f"{title}, stream 3") == len(paths)
    assert titles.count("Purified paths by block") == len(paths)
    assert titles.count("Purified paths") == titles.count("Strength λ of the curvature constraint") == 1
    for figure in drawn:
        for drawing in figure.drawings:
            ET.fromstring(drawing)
    page = render(runs)
    assert "Control of the streams" in page
    assert "block ↑" in page


def test_a_run_without_control_has_no_such_section(tmp_path):
    assert "Control of the streams" not in render(load_runs([make_run(tmp_path / "run", rows(40)).path]))
