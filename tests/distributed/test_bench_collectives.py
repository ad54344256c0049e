"""The benchmark of reductions over levels, on a lab; no times are asserted."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
from netlab import Lab, assert_bytes

from laneway.bench import collectives, netlab
from laneway.bench.collectives_ddp import STEP_VARIANTS, judge_steps, steps
from laneway.bench.collectives_targets import judge
from laneway.bench.collectives_variants import VARIANTS, scheme_of
from laneway.bench.table import COLUMNS
from laneway.core import InputError

SMALL = collectives.CollectivesOptions(sizes_kb=(256,), rounds=(1, 1), host_mbit=600.0, rack_mbit=600.0, hosts=1)
ROUNDING = {"fp32": 1e-6, "bf16": 0.02, "int8": 0.05}


@pytest.fixture(scope="module")
def rows(lab: Lab) -> dict[tuple[str, str], dict]:
    report = collectives.run(replace(SMALL, ops=collectives.OPS))
    assert set(COLUMNS["collectives"]) <= set(report.tables["collectives"][0])
    return {(row["op"], row["variant"]): row for row in report.tables["collectives"]}


def test_every_variant_of_every_operation_is_there(rows):
    wanted = {(op, name) for op in collectives.OPS for name, variant in VARIANTS.items() if variant.fits(op, 256 << 10)}
    assert set(rows) == wanted


def test_results_are_right_and_the_same_on_all_ranks(rows):
    for (op, name), row in rows.items():
        variant = VARIANTS[name]
        assert row["identical"] == 1, (op, name)
        if op == "all_gather":
            assert row["error"] == 0, name
        elif variant.drop:
            assert 0 < row["error"] < 1, name
        else:
            assert row["error"] < max(ROUNDING[variant.host_wire], ROUNDING[variant.rack_wire]), (op, name)


def test_bytes_on_the_uplink_are_those_of_the_scheme(rows):
    size = 256 << 10
    for op, name, share in (
        ("all_reduce", "flat", 1.5),  # a ring of four
        ("all_reduce", "flat_spread", 1.5),  # one host a rack: the same ring
        ("all_reduce", "levels", 1.0),
        ("all_reduce", "levels_bf16_rack", 0.5),
        ("reduce_scatter", "levels", 0.5),
        ("all_gather", "levels", 0.5),
    ):
        assert_bytes(rows[op, name]["rack_bytes"], share * size)
    assert rows["all_reduce", "levels_int8"]["rack_over_vector"] < 0.3
    assert rows["all_reduce", "levels_drop"]["rack_over_vector"] < 0.2


def test_nothing_is_faster_than_its_floor(rows):
    for row in rows.values():
        assert row["wall_ms"] > 0.9 * row["floor_ms"]
        assert row["flat_over_low"] <= row["flat_over"] <= row["flat_over_high"]


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("ops", {"ops": ("all_reduc",)}),
        ("variants", {"variants": ("levels",)}),
        ("variants", {"variants": ("flat", "none")}),
        ("sizes_kb", {"sizes_kb": (0,)}),
        ("seconds", {"seconds": 0.0}),
        ("rack_mbit", {"rack_mbit": -1.0}),
        ("racks", {"racks": 0}),
    ],
)
def test_an_option_out_of_range(field, bad):
    with pytest.raises(InputError, match=rf"^{field}: "):
        replace(SMALL, **bad).check()


def test_schemes():
    assert scheme_of(VARIANTS["flat"]).flat
    assert str(scheme_of(VARIANTS["levels"])) == "all_to_all:fp32 > all_to_all:fp32 > all_to_all:fp32"
    assert str(scheme_of(VARIANTS["levels_drop"], 1024)) == "all_to_all:fp32 > all_to_all:bf16 > all_to_all:bf16-0.9 / 4096"


def test_targets_are_judged_on_their_own_network_only():
    base = {"racks": 2, "hosts": 2, "ranks": 2, "host_mbit": 600.0, "rack_mbit": 150.0, "op": "all_reduce"}
    row = base | {"message_bytes": 16 << 20, "variant": "levels_pipelined", "rack_over_vector": 1.06}
    row |= {f"{other}_over{end}": 1.7 for other in ("flat", "flat_spread") for end in ("", "_low", "_high")}
    assert [line.split(":")[0] for line in judge([row])] == ["miss", "pass", "miss"]
    assert judge([row | {"rack_mbit": 100.0}]) == []
    assert judge([row | {"op": "all_gather"}]) == []
    small = base | {"message_bytes": 64 << 10, "variant": "reducer_flat", "flat_over": 0.9}
    assert judge([small])[0].startswith("miss: ")


def test_rows_are_appended_to_a_file(lab: Lab, tmp_path):
    options = replace(SMALL, ops=("all_gather",), variants=("flat",), racks=1, hosts=2, ranks=1, sizes_kb=(64,))
    report = collectives.run(options)
    (path,) = report.save(tmp_path)
    with path.open() as file:
        (row,) = csv.DictReader(file)
    assert (row["op"], row["variant"], row["hosts"], row["flat_over"], row["flat_spread_over"]) == (
        "all_gather",
        "flat",
        "2",
        "1",
        "",
    )


@pytest.mark.slow
def test_steps_of_ddp_with_and_without_levels(lab: Lab):
    network = netlab.Network.grid(2, 1, 2, rack_mbit=600.0)
    rows = {row["variant"]: row for row in steps(network, 1.0, (1, 1), quick=True)}
    assert list(rows) == ["alone", "ddp", *STEP_VARIANTS]
    assert all(set(COLUMNS["collectives_ddp"]) <= set(row) for row in rows.values())
    assert rows["alone"]["rack_over_gradient"] == 0
    size = 4 * rows["ddp"]["parameters"]
    for name, share in (("ddp", 1.5), ("levels_pipelined", 1.0), ("levels_bf16_hosts", 0.5)):
        assert 0.999 * share <= rows[name]["rack_over_gradient"] <= 1.04 * share + 50_000 / size, name
    assert rows["levels_drop"]["rack_over_gradient"] < 0.2
    assert rows["levels_pipelined"]["gradient_error"] < 1e-5
    assert rows["levels_bf16_hosts"]["gradient_error"] < 0.02
    assert len(judge_steps(list(rows.values()))) == 1
