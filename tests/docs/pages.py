"""Pages of the documentation and what stands in them."""

from __future__ import annotations

import re
from pathlib import Path

import measured

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(?P<language>[^\n`]*)\n(?P<code>.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    """A page as test ids show it."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[str]:
    """Fenced code of the given languages, in order."""
    return [m["code"] for m in _FENCE.finditer(page.read_text("utf-8")) if m["language"].strip() in languages]


def prose(page: Path) -> str:
    """The text without code and directives."""
    return re.sub(r"\{\{.*?\}\}|`[^`\n]*`", "", _FENCE.sub("", page.read_text("utf-8")))


def rendered(page: Path) -> str:
    """The page as a reader gets it, without code."""
    text = measured.render(page.read_text("utf-8"), name(page))
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))


def handwritten(page: Path) -> str:
    """The prose without README's generated block."""
    return re.sub(r"<!-- figures -->.*?<!-- end of figures -->", "", prose(page), flags=re.DOTALL)


def inline(page: Path) -> list[str]:
    """What stands in inline code."""
    return re.findall(r"`([^`\n]+)`", _FENCE.sub("", page.read_text("utf-8")))


def commands(page: Path) -> list[str]:
    """Shell commands of ``sh`` blocks, one a line, comments dropped."""
    lines = [line.split("  #")[0].split(" # ")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]
