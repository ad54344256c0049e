"""Dataclasses as plain values and back."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from typing import Literal

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from laneway.core import InputError
from laneway.strategy.files import from_plain, to_plain

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6)


@dataclass(frozen=True)
class Inner:
    size: int
    speed: float = 1.0
    kind: Literal["ring", "tree"] = "ring"


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    many: tuple[Inner, ...] = ()
    counts: tuple[int, ...] | None = None
    table: dict[str, float] | None = None
    on: bool = True


INNERS = st.builds(
    Inner, st.integers(-(2**40), 2**40), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["ring", "tree"])
)
OUTERS = st.builds(
    Outer,
    NAMES,
    INNERS,
    st.lists(INNERS, max_size=3).map(tuple),
    st.none() | st.lists(st.integers(0, 99), max_size=4).map(tuple),
    st.none() | st.dictionaries(NAMES, st.floats(-1e9, 1e9), max_size=3),
    st.booleans(),
)


@given(OUTERS)
def test_round_trips_through_json_and_toml(value: Outer) -> None:
    plain = to_plain(value)
    assert from_plain(Outer, json.loads(json.dumps(plain)), "plan") == value
    assert from_plain(Outer, tomllib.loads(tomli_w.dumps(plain)), "plan") == value


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"name": "a"}, "plan.inner"),
        ({"name": "a", "inner": {}}, "plan.inner.size"),
        ({"name": "a", "inner": {"size": 1.5}}, "plan.inner.size"),
        ({"name": "a", "inner": {"size": True}}, "plan.inner.size"),
        ({"name": "a", "inner": {"size": 1, "kind": "star"}}, "plan.inner.kind"),
        ({"name": "a", "inner": {"size": 1}, "many": [{"size": 1}, {"size": "x"}]}, r"plan.many\[1\].size"),
        ({"name": "a", "inner": {"size": 1}, "table": {"x": "fast"}}, "plan.table.x"),
        ({"name": "a", "inner": {"size": 1}, "on": 1}, "plan.on"),
        ({"name": "a", "inner": 3}, "plan.inner"),
        ({"name": 3, "inner": {"size": 1}}, "plan.name"),
        ([], "plan"),
    ],
)
def test_a_wrong_field_is_named(data: object, field: str) -> None:
    with pytest.raises(InputError, match=f"^{field}: got"):
        from_plain(Outer, data, "plan")


def test_an_unknown_field_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"plan\.inner\.sizze.*did you mean 'size'"):
        from_plain(Outer, {"name": "a", "inner": {"sizze": 1}}, "plan")
