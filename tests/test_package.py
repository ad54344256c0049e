"""The package as a whole: import time, public names, verbs, import contracts."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import laneway
from laneway import cli

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "laneway"
IMPORT_SECONDS = 0.3
HEAVY = ("torch", "numpy", "tyro", "rich", "jinja2", "transformers")


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_is_fast_and_loads_nothing_heavy():
    # CPU time of the import alone: wall time would measure what else the machine does.
    code = f"""
import sys, time
start = time.process_time()
import laneway
print(time.process_time() - start, *[name for name in {HEAVY} if name in sys.modules])"""
    seconds, *loaded = min((python(code).split() for _ in range(3)), key=lambda words: float(words[0]))
    assert loaded == []
    assert float(seconds) < IMPORT_SECONDS


def test_overview_and_version_load_no_torch():
    for flag in ("--help", "--version"):
        out = python(f"import sys; from laneway.cli import main; main([{flag!r}]); assert 'torch' not in sys.modules")
        assert "laneway" in out


def test_public_names_resolve_and_are_documented():
    assert len(laneway.__all__) <= 20
    assert set(laneway.__all__) == {"__version__", *laneway._HOME}
    for name in laneway._HOME:
        value = getattr(laneway, name)
        assert value.__name__ == name
        assert inspect.getdoc(value), name
        assert name in dir(laneway)


def test_type_checkers_see_the_same_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text("utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == laneway._HOME


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'HyperConection'"):
        laneway.HyperConection  # noqa: B018


def test_package_is_typed_and_its_version_is_in_the_changelog():
    assert (PACKAGE / "py.typed").is_file()
    assert f"## [{laneway.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_every_verb_has_a_module_and_every_module_is_a_verb():
    modules = {path.stem for path in (PACKAGE / "cli").glob("*.py") if not path.stem.startswith("_")}
    assert modules == set(cli.VERBS)
    for verb in cli.VERBS:
        assert callable(importlib.import_module(f"laneway.cli.{verb}").run)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_of_every_verb(verb, capsys):
    try:
        code = cli.main([verb, "--help"])
    except SystemExit as done:
        code = done.code
    assert code in (0, None)
    out, error = capsys.readouterr()
    assert out.startswith(f"usage: laneway {verb}")
    assert "--json" in out
    assert error == ""


@pytest.mark.parametrize("verb", cli.VERBS)
def test_bad_flags_are_one_line_and_exit_2(verb, capsys):
    assert cli.main([verb, "--no-such-flag"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(f"laneway {verb}: ")
    assert error.count("\n") == 1


def test_overview_lists_every_verb(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    for verb, what in cli.VERBS.items():
        assert re.search(rf"^  {verb} +{re.escape(what)}$", out, re.MULTILINE)


def test_an_unknown_verb_suggests_the_nearest(capsys):
    assert cli.main(["trainn"]) == 2
    assert capsys.readouterr().err == f"laneway: verb: got 'trainn'; accepted: {', '.join(cli.VERBS)}; did you mean 'train'?\n"


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "laneway", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"laneway {laneway.__version__}\n"
    bad = subprocess.run([sys.executable, "-m", "laneway", "tran"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2


def test_a_reader_that_leaves_early_is_no_crash():
    """`laneway … | head`: no traceback, and no exit code that claims the work was done."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "laneway", "bench", "--help"], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_import_contracts_hold():
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports"))], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


def test_files_stay_readable():
    """Most files under 200 lines, none over 400: a person reads one in one sitting."""
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text("utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name: n for name, n in lengths.items() if n > 400} == {}
    assert sum(n > 200 for n in lengths.values()) <= len(lengths) // 4


def test_the_project_speaks_of_itself_alone():
    """No path of a developer's machine in what is shipped."""
    start = time.perf_counter()
    pattern = re.compile(r"(?<![\w.])/(?:home|root|Users|work|tmp)/\w")
    folders = [PACKAGE, ROOT / "docs", ROOT / "benchmarks"]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".csv", ".toml", ".j2")]
    found = [path.name for path in [*files, ROOT / "README.md", ROOT / "Makefile"] if pattern.search(path.read_text("utf-8"))]
    assert found == []
    assert time.perf_counter() - start < 30
