"""Drawings: well-formed SVG with finite coordinates, escaped text, every value where it belongs."""

import json
import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.report import heatmap
from laneway.report.chart import Chart, Line, Mark, describe, draw
from laneway.report.heatmap import Heat, HeatChart, colour_scale
from laneway.report.palette import DARK, DASHES, LIGHT, RAMP_LEVELS, contrast, ramp, run_style
from laneway.report.series import Curve
from laneway.report.svg import element, number, path

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def curve(values, steps=None) -> Curve:
    return Curve.of((list(steps if steps is not None else range(len(values))), list(values)))


def parse(svg) -> ET.Element:
    text = str(svg)
    assert not re.search(r"\b(nan|inf|NaN|Infinity)\b", re.sub(r"<(title|desc)[^>]*>.*?</\1>", "", text)), "no such coordinate"
    return ET.fromstring(text)


def test_elements_escape_text_and_attributes():
    made = element("text", "<script>&", class_='a"b', stroke_width=1.5, data_label="x<y")
    assert str(made) == '<text class="a&#34;b" stroke-width="1.5" data-label="x&lt;y">&lt;script&gt;&amp;</text>'
    assert element("line", x1=1, hidden=None) == '<line x1="1"/>'


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_coordinate_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="coordinate"):
        number(value)
    with pytest.raises(ValueError, match="coordinate"):
        path([([0.0, value], [0.0, 1.0])])


def test_path_has_segments_and_dots():
    assert path([([0, 1], [2, 3.25]), ([5], [6])]) == "M0 2L1 3.25M5 6h0"
    assert number(-0.001) == "0"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.just(1e300), min_size=1, max_size=60),
    st.sampled_from([None, True, False]),
)
def test_any_values_make_a_well_formed_chart(values, log):
    chart = Chart("t", "u", [Line(curve(values), "a"), Line(curve(values), "b", kind="points")], log=log)
    root = parse(draw(chart, "x"))
    _, _, width, height = (float(v) for v in root.get("viewBox").split())
    for node in root.iter("path"):
        points = [tuple(map(float, m)) for m in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", node.get("d"))]
        assert all(0 <= x <= width and 0 <= y <= height for x, y in points)


def test_values_land_where_the_axis_says():
    root = parse(draw(Chart("Loss", "nats", [Line(curve([4.0, 3.0, 2.0], [0, 50, 100]), "a")]), "x"))
    plot = json.loads(root.get("data-plot"))
    points = [
        tuple(map(float, m)) for m in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", root.find(".//path[@data-label='a']").get("d"))
    ]

    def back(axis, pixel):
        low, high, start, stop = axis
        return low + (pixel - start) / (stop - start) * (high - low)

    assert [round(back(plot["x"], x)) for x, _ in points] == [0, 50, 100]
    assert [back(plot["y"], y) for _, y in points] == pytest.approx([4, 3, 2], abs=0.02)
    assert points[0][1] < points[2][1], "larger values are higher up"


def test_chart_has_title_description_and_role():
    root = parse(draw(Chart("Loss", "nats", [Line(curve([2.0, 1.0]), "run")]), "pic"))
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == "pic-t pic-d"
    assert root.find("title").text == "Loss (nats)"
    assert root.find("desc").text == "run: from 2 at step 0 to 1 at 1, between 1 and 2."


def test_long_curves_are_thinned_and_spikes_stay():
    values = np.ones(20_000)
    values[7777] = 5.0
    root = parse(draw(Chart("t", "", [Line(curve(values), "a")]), "x"))
    points = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", root.find(".//path[@data-label='a']").get("d"))
    assert len(points) <= 1500
    heights = [float(y) for _, y in points]
    assert heights.count(min(heights)) == 1
    assert max(heights) - min(heights) > 100


def test_marks_are_named_and_stay_inside():
    marks = [Mark(5, "nonfinite <b>", "nonfinite"), Mark(900, "late", "notice"), Mark(2, "saved", "checkpoint", 1)]
    root = parse(draw(Chart("t", "", [Line(curve([3.0, 2.0, 1.0], [0, 5, 10]), "a")], marks=marks), "x"))
    names = [title.text for title in root.findall(".//g[@class='marks']//title")]
    assert names == ["nonfinite <b>", "late", "saved"]
    assert len(root.findall(".//g[@class='marks']//line")) == 2, "checkpoints have a sign, but no line through the picture"
    assert all(float(line.get("x1")) <= 360 for line in root.findall(".//g[@class='marks']//line"))


def test_logarithmic_axes_say_so():
    texts = [node.text for node in parse(draw(Chart("g", "", [Line(curve([1.0, 1e4]), "a")]), "x")).iter("text")]
    assert "log scale" in texts
    assert {"1", "10", "100", "1k", "10k"} <= set(texts)


def test_nothing_to_draw():
    empty = Chart("t", "", [Line(curve([math.nan]), "a")])
    assert not empty.drawable
    assert describe(empty) == "Nothing to draw."
    parse(draw(empty, "x"))


def heat(values, steps=None) -> Heat:
    return Heat.of((list(steps or range(0, 10 * len(values), 10)), values))


def cells(root) -> dict[str, float]:
    """Painted area by colour."""
    area = {}
    for node in root.findall(".//g[@class='cells']/path"):
        boxes = re.findall(r"M[\d.]+ [\d.]+h([\d.]+)v([\d.]+)h-[\d.]+z", node.get("d"))
        area[node.get("fill")] = sum(float(w) * float(h) for w, h in boxes)
    return area


def test_heat_map_paints_every_cell_once_in_its_colour():
    made = heat([[1.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
    root = parse(heatmap.draw(HeatChart("g", made, colour_scale([made], None, 1.0, None, 0.1)), "h"))
    area = cells(root)
    frame = root.find(".//rect[@class='frame']")
    whole = float(frame.get("width")) * float(frame.get("height"))
    assert sum(area.values()) == pytest.approx(whole, rel=0.01)
    assert area[ramp(0)] == pytest.approx(whole / 2, rel=0.01)
    assert area[ramp(1)] == pytest.approx(whole / 6, rel=0.01)
    assert json.loads(root.get("data-heat"))["values"] == [[1, 1, 2], [1, 2, 3]]


def test_heat_map_leaves_missing_cells_blank():
    made = heat([[1.0, math.nan], [2.0, 1.0]])
    root = parse(heatmap.draw(HeatChart("g", made, colour_scale([made], None, None, None, 0.1)), "h"))
    frame = root.find(".//rect[@class='frame']")
    whole = float(frame.get("width")) * float(frame.get("height"))
    assert sum(cells(root).values()) == pytest.approx(0.75 * whole, rel=0.01)
    assert json.loads(root.get("data-heat"))["values"][0] == [1, None]


def test_heat_map_thins_probes_and_keeps_both_ends():
    made = heat([[float(i)] for i in range(1000)], range(1000))
    assert len(made.steps) == heatmap.COLUMN_LIMIT
    assert (made.steps[0], made.steps[-1]) == (0, 999)


@pytest.mark.parametrize(
    "values", [[[1.0]], [[math.nan, 1.0]], [[1.0, 1.0], [1.0, 1.0]], [[1e-8, 1e8]], [[-1.0], [0.5]], [[-1e308, 1e308]]]
)
def test_small_and_flat_heat_maps(values):
    made = heat(values)
    root = parse(heatmap.draw(HeatChart("g", made, colour_scale([made], None, None, None, 0.05)), "h"))
    assert cells(root)


def test_flat_data_do_not_fill_the_ramp_with_rounding_noise():
    made = heat([[1.0, 1.0 + 1e-9], [1.0, 1.0 - 1e-9]])
    scale = colour_scale([made], None, 1.0, None, 0.1)
    assert (scale.low, scale.high) == pytest.approx((1.0, 1.1))
    assert len({round(scale(v) * (RAMP_LEVELS - 1)) for v in made.values.ravel()}) == 1


def test_runs_share_one_colour_scale():
    small, large = heat([[1.0, 1.1]]), heat([[1.0, 900.0]])
    scale = colour_scale([small, large], None, 1.0, None, 0.1)
    assert scale.log
    assert (scale.low, scale.high) == (1.0, 900.0)


def test_the_ramp_rises_in_lightness():
    greys = [contrast(ramp(i / 20), "#000000") for i in range(21)]
    assert all(b > a for a, b in pairwise(greys))


@pytest.mark.parametrize(("colours", "papers"), [(LIGHT, ("#ffffff", "#f6f7f8")), (DARK, ("#181d23", "#101418"))])
def test_run_colours_can_be_seen_on_their_paper(colours, papers):
    assert all(contrast(colour, paper) >= 3 for colour in colours for paper in papers)
    assert len(set(colours)) == 8


def test_forty_runs_differ_in_colour_or_dash():
    assert len({run_style(i) for i in range(40)}) == 40
    assert run_style(0) == (0, DASHES[0]) == (0, "none")
