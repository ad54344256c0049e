"""Makes the documentation's own scripts importable, and lists its pages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs" / "hooks"), str(ROOT / "benchmarks"), str(Path(__file__).parent)]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's folder."""
    return ROOT
