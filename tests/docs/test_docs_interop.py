"""The page on interoperation: its transformers example runs, and its table names the differences that the code knows."""

from __future__ import annotations

import pytest
from pages import ROOT, blocks

from laneway.connections import layouts
from laneway.connections.layout_kinds import LAYOUTS

PAGE = ROOT / "docs" / "interop.md"


@pytest.mark.peers
def test_the_transformers_example_runs():
    pytest.importorskip("transformers.models.deepseek_v4", reason="needs the `hf` extra: transformers ≥ 5.24")
    (block,) = blocks(PAGE, "py")
    exec(compile(block, "interop.md", "exec"), {})


def test_every_layout_and_difference_is_explained():
    text = PAGE.read_text("utf-8")
    for name in (*LAYOUTS, *layouts.DIFFERENCES):
        assert f"| `{name}`" in text or f"`{name}`" in text.split("## Conventions")[1], name
    rows = [
        line.split(" | ") for line in text.splitlines() if line.startswith("| `") and line.split("`")[1] in layouts.DIFFERENCES
    ]
    for name, where, _ in rows:
        for layout, kind in LAYOUTS.items():
            always = name.strip("| `") in kind.differences
            assert always <= (f"`{layout}`" in where), f"{layout} {name}"
