"""What the rows of `laneway bench collectives` should show, on the network they were set for; a line each."""

from __future__ import annotations

from collections.abc import Sequence

from laneway.bench.rows import Row

__all__ = ["judge"]

NETWORK = {"racks": 2, "hosts": 2, "ranks": 2, "host_mbit": 600.0, "rack_mbit": 150.0}
LARGE = 16 << 20
SMALL = 64 << 10
FASTER = (
    ("levels_pipelined", "flat_spread_over", 3.2),
    ("levels_bf16_hosts", "flat_spread_over", 6.0),
    ("levels_drop", "flat_spread_over", 9.0),
    ("levels_pipelined", "flat_over", 1.6),
    ("levels_bf16_hosts", "flat_over", 3.0),
    ("levels_drop", "flat_over", 4.5),
)
FEWER = (("levels_pipelined", 1.05), ("levels_bf16_hosts", 0.55))
SLOWER_BY = 1.05


def judge(rows: Sequence[Row]) -> list[str]:
    """A line for each target whose rows are there."""
    mine = [row for row in rows if all(row[name] == value for name, value in NETWORK.items()) and row["op"] == "all_reduce"]
    large = {row["variant"]: row for row in mine if row["message_bytes"] == LARGE}
    lines = []
    for variant, column, least in FASTER:
        if variant in large and large[variant][column] is not None:
            row = large[variant]
            value = row[column]
            span = f"{row[column + '_low']:.2f} … {row[column + '_high']:.2f}"
            lines.append(f"{_mark(value >= least)}: {variant} {column}, 16 MB: {value:.2f} ({span}; ≥ {least:g})")
    for variant, most in FEWER:
        if variant in large:
            value = large[variant]["rack_over_vector"]
            lines.append(f"{_mark(value <= most)}: {variant}, bytes on the uplink over the vector: {value:.3f} (≤ {most:g})")
    for row in mine:
        if row["message_bytes"] <= SMALL and row["variant"] == "reducer_flat":
            value = 1 / row["flat_over"]
            size = row["message_bytes"] >> 10
            lines.append(
                f"{_mark(value <= SLOWER_BY)}: the reducer's flat scheme, {size} kB: {value:.3f} of flat's time (≤ {SLOWER_BY:g})"
            )
    return lines


def _mark(good: bool) -> str:
    return "pass" if good else "miss"
