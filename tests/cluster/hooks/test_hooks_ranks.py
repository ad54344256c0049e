"""The hooks on eight real gloo ranks, started once for the whole file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
NAMES = ["ddp", "accumulation", "unused", "exceptions", "dropping", "fsdp", "sharded_dropping", "refusals", "lost"]


@pytest.fixture(scope="module")
def found(eight_ranks: Callable[[Path], list[dict[str, list[str]]]]) -> list[dict[str, list[str]]]:
    """What each rank found wrong, by case."""
    return eight_ranks(Path(__file__).with_name("hook_cases.py"))


@pytest.mark.parametrize("name", NAMES)
def test_case(found: list[dict[str, list[str]]], name: str) -> None:
    assert [rank[name] for rank in found] == [[]] * 8


def test_every_case_ran(found: list[dict[str, list[str]]]) -> None:
    assert [list(rank) for rank in found] == [NAMES] * 8
