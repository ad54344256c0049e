"""Real text, small enough to be quick: packages of the standard library, copied so that a test may change them."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def library() -> Path:
    """The standard library's own folder."""
    return Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture
def texts(tmp_path: Path, library: Path) -> Path:
    """A folder with the sources of `json` and `email` (about 300 kB), without caches."""
    for package in ("json", "email"):
        shutil.copytree(library / package, tmp_path / "texts" / package, ignore=shutil.ignore_patterns("__pycache__", "test"))
    return tmp_path / "texts"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A folder for shards that does not exist yet."""
    return tmp_path / "cache"
