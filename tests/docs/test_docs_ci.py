"""``.ci/run``: order, exit code and closing line, with a Makefile that only speaks; and what the real Makefile offers it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from pages import ROOT

CLOSING = "======= 12 passed, 1 skipped in 3.21s ======="
MAKEFILE = """
dev:
\t@echo ready
test:
\t@echo '=== 3 failed of old ==='; echo '{closing}'; {then}
lint types imports docs:
\t@echo ran $@
"""


def run(tmp_path: Path, then: str = "true", closing: str = CLOSING) -> subprocess.CompletedProcess[str]:
    (tmp_path / ".ci").mkdir()
    shutil.copy2(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "Makefile").write_text(MAKEFILE.format(then=then, closing=closing), "utf-8")
    # From another folder: the script finds its own. PATH without apt-get, so that nothing is installed.
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "make", "mktemp", "grep", "tail", "rm", "tee", "id", "dirname", "sh", "echo", "true", "python3"):
        if found := shutil.which(tool):
            (tools / tool).symlink_to(found)
    return subprocess.run(
        [str(tmp_path / ".ci" / "run")], cwd="/", env={"PATH": str(tools)}, capture_output=True, text=True, check=False
    )


def test_tests_come_first_and_their_closing_line_last(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2:] == [CLOSING, "ci: all checks passed"]
    ran = [line for line in lines if line.startswith("ran ")]
    assert ran == ["ran lint", "ran types", "ran imports", "ran docs"]
    assert lines.index("ready") < lines.index(CLOSING) < lines.index("ran lint")
    assert "ci: no chromium here (browser tests skip without it)" in lines


def test_a_failing_test_fails_it_and_stops(tmp_path):
    done = run(tmp_path, then="exit 1", closing="=== 1 failed, 11 passed in 3.21s ===")
    assert done.returncode != 0
    lines = done.stdout.splitlines()
    assert not [line for line in lines if line.startswith("ran ")]
    assert lines[-2:] == ["=== 1 failed, 11 passed in 3.21s ===", f"ci: failed with exit code {done.returncode}"]


def test_the_script_is_executable_and_calls_targets_that_exist():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    called = [
        target for line in script.read_text("utf-8").splitlines() if line.startswith("make ") for target in line.split()[1:]
    ]
    wanted = [target for target in called if re.fullmatch(r"[\w-]+", target) and target != "tee"]
    assert wanted[:6] == ["dev", "test", "lint", "types", "imports", "docs"]
    assert set(wanted) <= targets


@pytest.mark.parametrize("target", ["dev", "test", "lint", "types", "imports", "docs", "figures", "bench", "test-slow", "train"])
def test_targets_are_phony(target):
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert phony
    assert target in phony[1].split()
