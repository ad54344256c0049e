"""Curves, predictions and tables on networks whose times are known."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from laneway.cluster.costs.curves import KNEE, Curve
from laneway.cluster.costs.measured import MeasuredNetwork, phases, predict
from laneway.cluster.costs.sized import SIZES, candidates, choose_scheme, scheme_table
from laneway.cluster.reduce.scheme import FLAT, LevelScheme, ReductionScheme
from laneway.core import InputError

MB = 1 << 20


def network(**changes: object) -> MeasuredNetwork:
    """Three levels of two, each ten times slower than the one inside it; flat crosses the slowest with all it has."""
    start, rate = 1e-4, 1e-9
    levels = tuple(Curve(start, rate * 10**level) for level in range(3))
    given = {"names": ("L1", "L2", "L3"), "sizes": (2, 2, 2), "levels": levels, "flat": Curve(14 * start, 1.75 * rate * 400)}
    return MeasuredNetwork(**{**given, "work": {"add": 1e-10}, **changes})  # type: ignore[arg-type]


def test_a_fit_gives_back_the_line_and_the_points() -> None:
    for _ in range(20):
        start, per_byte = random.uniform(1e-6, 1e-2), random.uniform(1e-11, 1e-7)
        samples = [(float(size), start + per_byte * size) for size in (KNEE, 2 * KNEE, 16 * KNEE)]
        small = [(4096.0, 2 * start), (65536.0, 2 * start + per_byte * 65536)]
        curve = Curve.fit(samples + small)
        assert curve.seconds(1e9) == pytest.approx(start + per_byte * 1e9, rel=1e-6)
        assert curve.seconds(4096) == pytest.approx(2 * start)
        assert curve.seconds((4096 + 65536) / 2) == pytest.approx((small[0][1] + small[1][1]) / 2)
        assert curve.seconds(0) == 0
        assert Curve.from_dict(json.loads(json.dumps(curve.to_dict()))) == curve


def test_a_fit_never_falls_with_size_nor_below_zero() -> None:
    assert Curve.fit([(MB, 2.0), (4 * MB, 1.0)]).per_byte == 0
    assert Curve.fit([(MB, 1.0), (4 * MB, 8.0)]).start == 0
    assert Curve.fit([(MB, 1.0)]).seconds(2 * MB) == pytest.approx(2.0)
    assert Curve.fit([(4096, 1.0)]).seconds(8192) == pytest.approx(2.0)


@pytest.mark.parametrize("samples", [[], [(1024, 0.0)], [(-1, 1.0)], [(1024, float("nan"))]])
def test_what_is_no_time_is_refused(samples: list[tuple[float, float]]) -> None:
    with pytest.raises(InputError, match="samples"):
        Curve.fit(samples)


def test_phases_carry_the_bytes_of_the_hierarchy() -> None:
    """N, N/2 and N/4 in fp32 on three levels of two; half of that on the outer ones in bf16."""
    for wire, share in (("fp32", 1.0), ("bf16", 0.5)):
        outer = LevelScheme(wire=wire)
        found = phases(network(), ReductionScheme((LevelScheme(), outer, outer)), 8 * MB)
        sent = [sum(phase.nbytes for phase in found if phase.level == level) for level in range(3)]
        assert sent == pytest.approx([8 * MB, 4 * MB * share, 2 * MB * share])
    tree = phases(network(), ReductionScheme((LevelScheme("tree"),) * 3), MB)
    assert [phase.nbytes for phase in tree] == pytest.approx([MB, MB / 2, MB / 4, MB / 4, MB / 2, MB])


def test_times_add_up() -> None:
    """Four phases of starts, bytes and one addition for each number that came in, and one exchange of both ways."""
    one, scheme = network(), ReductionScheme((LevelScheme(),) * 3)
    wanted = 5e-4 + MB * (1e-9 + 0.5e-8 + 0.25e-7) + 1e-10 * MB * (0.5 + 0.25 + 0.25)
    assert predict(one, scheme, MB) == pytest.approx(wanted)
    pieces = ReductionScheme(scheme.levels, MB)
    busiest = 1e-7 * MB / 4  # the slowest link
    assert predict(one, pieces, 16 * MB) == pytest.approx(wanted + 15 * max(busiest, 1e-4 + busiest + 1e-10 * MB / 4))
    assert predict(one, FLAT, MB) == pytest.approx(14e-4 + 1.75 * 4e-7 * MB)


def test_a_table_goes_flat_where_messages_are_small() -> None:
    slow_start = network(levels=tuple(Curve(1e-2, 1e-9 * 10**level) for level in range(3)))
    table = scheme_table(slow_start)
    assert table.at(0) == FLAT
    assert not table.at(1 << 28).flat
    for nbytes in SIZES:
        _, seconds = choose_scheme(slow_start, nbytes)
        assert predict(slow_start, table.at(nbytes), nbytes) <= min(seconds.values()) * 1.06


def test_a_network_without_a_gap_stays_flat() -> None:
    even = network(levels=(Curve(1e-4, 1e-9),) * 3, flat=Curve(1e-4, 1e-9))
    assert scheme_table(even).rows == ((0, FLAT),)


def test_candidates_keep_to_the_wires_that_are_allowed() -> None:
    assert all(level.wire == "fp32" for scheme in candidates((2, 2)) for level in scheme.levels)
    low = [scheme for scheme in candidates((2, 2, 2), ("bf16",), drop=0.5) if not scheme.flat]
    assert {(scheme.levels[0].wire, scheme.levels[1].wire, scheme.levels[2].wire) for scheme in low} == {("fp32", "bf16", "bf16")}
    assert {scheme.levels[2].drop for scheme in low} == {0.5}


def test_networks_survive_a_file(tmp_path: Path) -> None:
    one = network(dropping={"0.9/bf16": Curve(1e-3, 1e-9, ((4096, 2e-3),))})
    one.save(tmp_path / "network.json")
    assert MeasuredNetwork.load(tmp_path / "network.json") == one
    (tmp_path / "other.json").write_text("{}")
    for name in ("other.json", "missing.json"):
        with pytest.raises(InputError, match="measured"):
            MeasuredNetwork.load(tmp_path / name)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="levels"):
        predict(network(), ReductionScheme((LevelScheme(),)), MB)
    with pytest.raises(InputError, match="drop"):
        predict(network(), ReductionScheme((LevelScheme(), LevelScheme(), LevelScheme(drop=0.5))), MB)
    with pytest.raises(InputError, match="levels"):
        network(levels=())
    with pytest.raises(InputError, match="sizes"):
        candidates(())
