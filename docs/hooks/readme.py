"""Puts the figures into README.md: python docs/hooks/readme.py [--check]

What stands between ``<!-- figures -->`` and ``<!-- end of figures -->`` is docs/includes/readme-figures.md with its directives
resolved; all else in README.md is written by hand. ``--check`` changes nothing and exits with 1 where it is not up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import measured

README = measured.ROOT / "README.md"
TEMPLATE = measured.ROOT / "docs" / "includes" / "readme-figures.md"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def updated(text: str, template: str, results: Path = measured.RESULTS) -> str:
    """README's text with the block between the markers made anew; raises MeasuredError where there are no such markers."""
    block = re.sub(r"\n{3,}", "\n\n", measured.render(template, TEMPLATE.name, results).strip())
    new, count = re.subn(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{block}\n{END}", text, flags=re.DOTALL)
    if count != 1:
        raise measured.MeasuredError(f"README.md: accepted: one block from {BEGIN} to {END}; found {count}")
    return new


def main(args: list[str]) -> int:
    """Write or check; prints one line."""
    text = README.read_text("utf-8")
    new = updated(text, TEMPLATE.read_text("utf-8"))
    if new == text:
        print("README.md is up to date")
        return 0
    if "--check" in args:
        print("README.md is not up to date: run `make figures`", file=sys.stderr)
        return 1
    README.write_text(new, "utf-8")
    print("README.md updated")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
