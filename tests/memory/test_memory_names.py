"""What ``laneway.memory`` offers: each name is there, says what it is, and stands in the documentation."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import laneway.memory

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"


@pytest.mark.parametrize("name", laneway.memory.__all__)
def test_a_name_is_there_and_described(name: str) -> None:
    found = getattr(laneway.memory, name)
    assert found.__name__ == name
    assert found.__module__ == laneway.memory._HOME[name]
    text = inspect.getdoc(found)
    assert text
    assert len(text) > 20
    assert not text.startswith(f"{name}("), "dataclasses write themselves such a text"
    assert f"`{name}`" in PAGE.read_text()


def test_the_names_are_listed_once_and_nothing_hides_a_module() -> None:
    assert sorted(laneway.memory.__all__) == sorted(set(laneway.memory._HOME))
    assert set(laneway.memory.__all__) <= set(dir(laneway.memory))
    modules = {path.stem for path in Path(laneway.memory.__file__).parent.iterdir()}
    assert not modules.intersection(laneway.memory.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Heap'"):
        _ = laneway.memory.Heap


def test_the_configuration_is_read_without_torch() -> None:
    code = "import sys, laneway.memory; laneway.memory.MemoryConfig(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
