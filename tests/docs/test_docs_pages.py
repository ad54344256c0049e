"""What the pages say exists: links, files, verbs, flags; the site builds; no figure is typed by hand."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from pages import PAGES, ROOT, blocks, commands, handwritten, inline, name, rendered

from laneway.cli import VERBS

# A number with a unit that something could have been measured in.
UNITS = ("×", "x faster", "times faster", "%", "µs", "ms", "s", "seconds", "minutes", "[GMK]i?B(?:/s)?", "tokens/s", "nats")
UNITS += ("bits per byte", "bits/byte")
FIGURE = re.compile(rf"(?<![\w.])\d[\d.,]*[ \u00a0\u202f-]?(?:{'|'.join(UNITS)})(?![\w×])")
FOLDERS = ("src", "tests", "docs", "benchmarks", ".ci")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_figure_is_typed_by_hand(page):
    assert FIGURE.findall(handwritten(page)) == []


def test_the_scan_for_figures_finds_them():
    for text in (
        "2.5× faster",
        "takes 13 ms",
        "9.1 GB/s",
        "a gain of 12 %",
        "after 1,200 tokens/s",
        "2.31 bits per byte",
        "in 41 s",
    ):
        assert FIGURE.search(text), text
    for text in ("n = 4 streams", "2×2 products", "20 iterations", "version 3.11", "arXiv 2512.24880", "2 σ"):
        assert not FIGURE.search(text), text


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for text, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", rendered(page)):
        path, _, anchor = target.partition("#")
        if path.startswith(("http:", "https:")):
            assert page.name == "CHANGELOG.md", f"{target}: pages link to what is in the repository"
            continue
        aim = (page.parent / path).resolve() if path else page
        assert aim.is_file(), f"[{text}]({target})"
        if anchor:
            assert anchor in _anchors(aim.read_text("utf-8")), f"[{text}]({target})"


def _anchors(text: str) -> set[str]:
    from markdown.extensions.toc import slugify

    return {slugify(re.sub(r"[`*\\]", "", heading), "-") for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_exist(page):
    homes = [ROOT, ROOT / "src" / "laneway", ROOT / "src" / "laneway" / "connections", ROOT / "benchmarks"]
    for words in inline(page):
        if re.fullmatch(r"[\w./-]+/[\w./-]*\.(?:py|md|toml|svg|txt)|[\w.-]+\.(?:py)", words):
            assert any((home / words).exists() for home in homes), words
        elif words.split("/")[0] in FOLDERS and "/" in words and not set(words) & set("*<{"):
            assert (ROOT / words).exists(), words


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_verbs_and_make_targets_that_are_named_exist(page):
    code = inline(page) + [line.strip() for block in blocks(page, "sh", "") for line in block.splitlines()]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for text in code:
        for verb in re.findall(r"(?:^|-m |bin/)laneway ([a-z][\w-]*)", text):
            assert verb in VERBS, text
        for target in re.findall(r"^(?:PYTHON=\S+ )?make ([a-z][\w-]*)", text):
            assert target in targets, text


def test_every_verb_is_documented():
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    for verb in VERBS:
        assert f"laneway {verb}" in text, verb


def test_folder_map_is_complete():
    block = next(b for b in blocks(ROOT / "docs" / "architecture.md", "") if b.startswith("src/laneway/"))
    named = set(re.findall(r"^  (\w+(?:/|\.py))", block, re.MULTILINE))
    package = ROOT / "src" / "laneway"
    folders = {f"{p.name}/" for p in package.iterdir() if (p / "__init__.py").is_file()}
    files = {p.name for p in package.glob("*.py") if not p.name.startswith("__")}
    assert named == folders | files


def test_pages_are_all_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in text, page.name


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(target)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def test_the_site_builds_strictly_and_needs_no_network(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) >= 9
    for page in pages:
        loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="(https?:[^"]+)"', page.read_text("utf-8"))
        assert loaded == [], page.name


def test_directives_are_resolved_and_scripts_stay_out(site):
    text = (site / "report.html").read_text("utf-8")
    assert "streams-collapsed" in text
    assert "fresh-memory" in text
    assert "{{" not in text
    assert not (site / "hooks").exists()
    assert not (site / "includes").exists()


def test_quick_start_begins_with_the_two_commands():
    for page in (ROOT / "README.md", ROOT / "docs" / "quickstart.md"):
        assert [command for command in commands(page) if command.startswith("make")][:2] == ["make train", "make test"]
