"""README's and the pages' commands and code are run: shell lines through the real command line, smaller where they may be."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks, commands, name

from laneway.cli import main

# Runnable pages: what is in their ``sh`` blocks runs in order in one folder.
SHELL_PAGES = [page for page in PAGES if any(command.startswith("laneway ") for command in commands(page))]
CODE_PAGES = [page for page in PAGES if blocks(page, "python")]
SMALLER = {
    "steps": "2",
    "model.dim": "32",
    "model.layers": "1",
    "model.context": "32",
    "validation-batches": "1",
    "sample-tokens": "4",
    "batch-size": "4",
}


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Path:
    """An empty folder to run in, with a small text as the standard library and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LANEWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("def stream(x):\n    return x\n" * 500, "utf-8")
    return tmp_path


def smaller(args: list[str], text: Path) -> list[str]:
    """A training command with few steps of a small model; what the command sets itself stays. Resumes stay as they are."""
    if args[0] != "train" or "--resume" in args:
        return args
    planned = "--plan" in args  # what a plan was made for is not to be changed
    extra = {
        name: value
        for name, value in SMALLER.items()
        if f"--{name}" not in args and not (planned and (name.startswith("model.") or name == "batch-size"))
    }
    return [*args, *(word for name, value in extra.items() for word in (f"--{name}", value)), "--data.path", str(text)]


def check_flags(args: list[str]) -> None:
    """A benchmark takes a minute and has tests of its own: here its name and flags are looked up in its help."""
    told = io.StringIO()
    with pytest.raises(SystemExit) as caught, contextlib.redirect_stdout(told):
        main([*args[:2], "--help"])
    assert caught.value.code in (0, None)
    for flag in (word for word in args if word.startswith("--")):
        assert flag in told.getvalue(), flag


def run(command: str, desk: Path) -> None:
    words = shlex.split(command)
    if words[0] in ("laneway", ".venv/bin/laneway"):
        args = smaller(words[1:], desk / "text.txt")
        if args[:1] == ["bench"]:
            check_flags(args)
        else:
            assert main(args) == 0, command
    elif words[0] == "make":
        assert subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, check=False).returncode == 0, command
    elif words[0] == "printf":
        subprocess.run(command, shell=True, check=True, cwd=desk)
    elif words[0] == ".venv/bin/python":
        assert (ROOT / words[1]).is_file(), command
    else:
        assert words[:3] == ["python3", "-m", "venv"] or words[:2] == [".venv/bin/pip", "install"], (
            f"nothing here runs {command!r}"
        )


@pytest.mark.parametrize("page", SHELL_PAGES, ids=name)
def test_commands_of_a_page_run_in_order(page, desk, capfd):
    # A page may build on the two commands of the quick start.
    needs_run = any(" runs/tiny" in command for command in commands(page))
    if needs_run:
        run("laneway train", desk)
    for command in commands(page):
        run(command, desk)
    assert not needs_run or (desk / "runs" / "tiny" / "report.html").is_file()


@pytest.mark.parametrize("page", [p for p in PAGES if p not in SHELL_PAGES and commands(p)], ids=name)
def test_other_commands_exist(page, desk):
    for command in commands(page):
        run(command, desk)


@pytest.mark.parametrize("page", CODE_PAGES, ids=name)
def test_python_of_a_page_runs(page, desk):
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks(page, "python"), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


def test_commands_are_found():
    assert "laneway train --config two.toml --out runs/two" in commands(ROOT / "docs" / "quickstart.md")
    assert commands(ROOT / "README.md")[:2] == ["make train", "make test"]
    assert len(SHELL_PAGES) >= 2
    assert len(CODE_PAGES) >= 4


@pytest.mark.parametrize("target", ["train", "test"])
def test_make_does_all_set_up(target, tmp_path):
    """On a machine without the environment, the target makes it: venv, torch by its pin, the package."""
    done = subprocess.run(
        ["make", "-n", target, f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env={
            name: value for name, value in os.environ.items() if not name.startswith("MAKE")
        },  # as from a shell, also under make
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    order = [next(i for i, line in enumerate(lines) if part in line) for part in ("-m venv", "torch==", "-e .")]
    assert order == sorted(order)
    assert ("laneway train" if target == "train" else "-m pytest") in lines[-1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_make_train_for_real(tmp_path):
    """The real thing, in a copy of the tree: a fresh environment and the whole default run."""
    copy = tmp_path / "laneway"
    subprocess.run(["cp", "-r", "--parents", *_tracked(), str(copy.mkdir() or copy)], cwd=ROOT, check=True)
    done = subprocess.run(["make", "train"], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "bits/byte" in done.stdout.splitlines()[-1]
    assert (copy / "runs" / "tiny" / "export" / "model.safetensors").is_file()


def _tracked() -> list[str]:
    return ["src", "Makefile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"]
