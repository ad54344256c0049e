"""A plan as a picture."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.report.plan import PlanView, read_plan
from laneway.report.plan_picture import plan_picture


def written(tp: int = 8, shard: int = 4, replicate: int = 2, pp: int = 4, nodes: int = 16, racks: int = 2) -> dict[str, Any]:
    """A written plan of tp·shard·replicate·pp devices, eight to a node."""
    level = {"link_bandwidth": 4e11, "links": 1, "oversubscription": 1.0, "network": "NVLink4"}
    net = {"link_bandwidth": 5e10, "links": 8, "oversubscription": 1.0, "network": "NDR400"}
    return {
        "model_size": 175e9,
        "layout": {"tp": tp, "cp": 1, "dp_shard": shard, "dp_replicate": replicate, "pp": pp},
        "topology": {
            "device": {"name": "H100"},
            "levels": [
                {"name": "L1", "size": 8, **level},
                {"name": "L2", "size": nodes, **net},
                {"name": "L3", "size": racks, **net, "oversubscription": 4.0},
            ],
        },
        "predicted": {
            "breakdown": {"compute": 2.0, "data": 0.5, "bubble": 0.0},
            "bytes_per_level": {"L1": 4e9, "L2": 1e9, "L3": 5e8},
        },
        "reasons": [{"choice": "tensor parallel", "value": "8", "number": "4 would cost +3 %", "source": "cost model"}],
    }


def test_axes_stand_on_the_levels_that_they_cross() -> None:
    view = PlanView.of(written())
    crossing = {level.name: [axis.name for axis in level.axes] for level in view.levels}
    # 256 devices, nodes of 8, racks of 128: tp fills a node, shards and replicas stay in a rack, pp (stride 64) leaves it
    assert crossing == {"L1": ["tp"], "L2": ["dp_shard", "dp_replicate", "pp"], "L3": ["pp"]}
    assert [level.groups for level in view.levels] == [1, 2, 32]


@given(*[st.sampled_from([1, 2, 4, 8])] * 4)
def test_every_axis_crosses_some_level_and_only_where_ranks_differ(tp: int, shard: int, replicate: int, pp: int) -> None:
    world = tp * shard * replicate * pp
    view = PlanView.of(written(tp, shard, replicate, pp, nodes=max(1, world // 8), racks=1))
    capacity = {"L1": 8, "L2": 8 * max(1, world // 8), "L3": 8 * max(1, world // 8)}
    inside = {"L1": 1, "L2": 8, "L3": capacity["L2"]}
    ranks = range(world)
    for level in view.levels:
        for axis in view.levels[0].axes + view.levels[1].axes + view.levels[2].axes:
            pairs = [(r, r + axis.stride) for r in ranks if (r // axis.stride) % axis.size < axis.size - 1]
            whole, part = capacity[level.name], inside[level.name]
            crosses = any(a // whole == b // whole and a // part != b // part for a, b in pairs)
            assert not crosses or axis.name in [each.name for each in level.axes]


def test_the_file_is_an_svg_that_names_levels_axes_and_bytes() -> None:
    text = plan_picture(written())
    root = ET.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    said = " ".join(root.itertext())
    for word in ("L3: 1 group of 2", "NDR400", "tp 8", "shard 4", "replicate 2", "pp 4", "4.00\u202fGB", "one step"):
        assert word in said, said


def test_text_is_escaped() -> None:
    plan = written()
    plan["topology"]["levels"][0]["network"] = "<script>alert(1)</script>"
    assert "<script>" not in plan_picture(plan)


@pytest.mark.parametrize("path", [("layout",), ("topology", "levels"), ("predicted", "breakdown"), ("topology", "device")])
def test_a_damaged_plan_is_told_not_drawn(path: tuple[str, ...], tmp_path: Path) -> None:
    plan = copy.deepcopy(written())
    inner = plan
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = None
    target = tmp_path / "plan.json"
    target.write_text(json.dumps(plan))
    found, fault = read_plan(target)
    assert found is None
    assert fault.startswith("plan.json: ")


def test_no_file_is_no_fault(tmp_path: Path) -> None:
    assert read_plan(tmp_path / "plan.json") == (None, "")
