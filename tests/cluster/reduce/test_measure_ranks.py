"""A measurement on eight real gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed


def test_ranks_measure_one_network_and_a_table_comes_of_it(eight_ranks: Callable[[Path], list[dict[str, list[str]]]]) -> None:
    assert eight_ranks(Path(__file__).with_name("measure_cases.py")) == [{"measured": []}] * 8
