"""A person's number of parameters."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.core import InputError
from laneway.strategy.model_size import MOST, parse_model_size


@pytest.mark.parametrize(
    "given_",
    ["175B", "175b", " 175 B ", "175e9", "175E9", "175_000_000_000", "175000M", "0.175T", 175e9, 175_000_000_000, "175G"],
)
def test_spellings_of_one_size(given_: object) -> None:
    assert parse_model_size(given_) == pytest.approx(175e9, rel=1e-12)


@pytest.mark.parametrize("given_", [175, "175", 7, "7", "1.3"])
def test_a_small_number_asks_for_its_unit(given_: object) -> None:
    with pytest.raises(InputError, match=rf'write "{given_}B" for billions or "{given_}M" for millions'):
        parse_model_size(given_)


@pytest.mark.parametrize(
    "given_",
    [
        "",
        "B",
        "175BB",
        "175 Q",
        "-175B",
        -1e9,
        0,
        "0",
        math.nan,
        math.inf,
        "1e99",
        "٣B",
        True,
        None,
        [1],
        "1__0B",
        10**400,
        "1e16",
    ],
)
def test_what_is_no_size_is_refused_by_name(given_: object) -> None:
    with pytest.raises(InputError, match=r"^model_size: got "):
        parse_model_size(given_)


@given(st.floats(1e6, MOST), st.sampled_from(["", "K", "M", "B", "T"]))
def test_units_scale(size: float, unit: str) -> None:
    factor = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[unit]
    assert parse_model_size(f"{size / factor:.12f}{unit}") == pytest.approx(size, rel=1e-6)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_an_input_error(text: str) -> None:
    with contextlib.suppress(InputError):
        assert parse_model_size(text) > 0
