"""What a scheme accepts, and that it survives a file."""

from __future__ import annotations

import json
import random

import pytest

from laneway.cluster.reduce.scheme import ALGORITHMS, FLAT, WIRES, LevelScheme, ReductionScheme, SchemeTable
from laneway.core import InputError


def _random(outermost: bool) -> LevelScheme:
    algorithm = random.choice(ALGORITHMS)
    dims = tuple(random.choices(range(1, 5), k=random.randint(1, 3))) if algorithm == "torus" else ()
    return LevelScheme(algorithm, random.choice(WIRES), dims, random.random() if outermost else 0.0)


def test_dictionaries_round_trip() -> None:
    for _ in range(50):
        count = random.randint(0, 4)
        scheme = ReductionScheme(tuple(_random(i == count - 1) for i in range(count)), random.choice((0, 4096)))
        assert ReductionScheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme
        assert scheme.flat == (count == 0)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: LevelScheme("rings"), "algorithm"),
        (lambda: LevelScheme(wire="fp8"), "wire"),
        (lambda: LevelScheme("torus"), "dims"),
        (lambda: LevelScheme("ring", dims=(2, 2)), "dims"),
        (lambda: LevelScheme("torus", dims=(2, 0)), "dims"),
        (lambda: LevelScheme(drop=1.0), "drop"),
        (lambda: LevelScheme(drop=float("nan")), "drop"),
        (lambda: ReductionScheme((LevelScheme(drop=0.5), LevelScheme())), "drop"),
        (lambda: ReductionScheme(chunk_bytes=-1), "chunk_bytes"),
        (lambda: ReductionScheme.from_dict({"level": []}), "scheme"),
        (lambda: ReductionScheme.from_dict({"levels": 3}), "scheme.levels"),
        (lambda: ReductionScheme.from_dict({"levels": [3]}), "scheme.levels"),
        (lambda: ReductionScheme.from_dict({"levels": [{"wires": "fp32"}]}), "scheme.levels"),
    ],
)
def test_bad_input_names_the_field(make, field) -> None:
    with pytest.raises(InputError) as error:
        make()
    assert error.value.field == field


def test_schemes_are_told_in_short() -> None:
    levels = LevelScheme(), LevelScheme("ring", "bf16", drop=0.25)
    assert str(FLAT) == "flat"
    assert str(ReductionScheme(levels, 2**20)) == "all_to_all:fp32 > ring:bf16-0.25 / 1048576"


def test_a_table_gives_each_size_its_scheme() -> None:
    large = ReductionScheme((LevelScheme(), LevelScheme(wire="bf16")), 4096)
    table = SchemeTable(((0, FLAT), (65536, large)))
    assert [table.at(size) for size in (0, 65535, 65536, 10**9)] == [FLAT, FLAT, large, large]
    assert SchemeTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table
    for rows in ((), ((1, FLAT),), ((0, FLAT), (0, large)), ((0, "flat"),)):
        with pytest.raises(InputError, match="rows"):
            SchemeTable(rows)
    for given in ({"rows": 3}, {"rows": [[0]]}, {"rows": [[-1, {}]]}, {"row": []}):
        with pytest.raises(InputError):
            SchemeTable.from_dict(given)
