"""Compiling the CPU kernels: once, by one process at a time, never half, and a clear word where it can't be done."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from laneway import native
from laneway.cli import main
from laneway.connections.kernels.cpu import build

pytestmark = pytest.mark.compiler
needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LANEWAY_CACHE", str(tmp_path / "cache"))
    build.library.cache_clear()
    yield tmp_path / "cache"
    build.library.cache_clear()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A compiler that counts its calls, waits, and writes a library out of one line; ``fake("exit 1")`` fails instead."""

    def make(then: str = "") -> None:
        calls = tmp_path / "calls"
        script = tmp_path / "fake-c++"
        script.write_text(
            f"#!/bin/sh\n"
            f'case "$1" in --version) echo fake 1.0; exit 0;; esac\n'
            f"echo call >> {calls}\nsleep 0.3\n{then or ':'}\n"
            'for a in "$@"; do last=$a; done\n'
            f'echo "int laneway_vector_width() {{ return 1; }}" | {build.compiler()} -x c++ -shared -fPIC - -o "$last"\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))

    make.calls = lambda: len((tmp_path / "calls").read_text().splitlines()) if (tmp_path / "calls").exists() else 0
    return make


@needs_compiler
def test_the_second_build_finds_the_first(cache, fake):
    fake()
    first, second = build.build(), build.build()
    assert (first.fresh, second.fresh) == (True, False)
    assert first.path == second.path == build.library()
    assert fake.calls() == 1
    assert build.build(force=True).fresh
    assert fake.calls() == 2


@needs_compiler
def test_two_processes_at_once_compile_once(cache, fake):
    fake()
    code = "from laneway.connections.kernels.cpu.build import build; print(build().fresh)"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(p.communicate()[0].strip() for p in running) == ["False", "True"]
    assert fake.calls() == 1
    assert [p.name for p in cache.iterdir() if p.suffix == ".so"] == [build.library().name]


@needs_compiler
@pytest.mark.parametrize("then", ["echo 'site.cpp:1: error: no such thing' >&2; exit 1", "echo 'not a library' > $last; exit 0"])
def test_a_failed_build_leaves_nothing(cache, fake, then):
    fake('for a in "$@"; do last=$a; done\n' + then)
    with pytest.raises(build.BuildError, match=r"no such thing|cannot be loaded"):
        build.build()
    assert not [p for p in cache.iterdir() if p.suffix == ".so"]


def test_without_a_compiler_it_says_so(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler"):
        build.build()


def test_a_folder_that_cannot_be_made_is_said(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LANEWAY_CACHE", str(tmp_path / "file" / "below"))
    build.library.cache_clear()
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    with pytest.raises(build.BuildError, match="cannot be written"):
        build.build()
    build.library.cache_clear()


@needs_compiler
def test_the_name_depends_on_sources_flags_and_compiler(cache, fake, monkeypatch, tmp_path):
    own = build._key(())
    assert build._key(("-mavx2",)) != own
    monkeypatch.setattr(native, "capabilities", lambda: "another cpu")
    assert build._key(()) != own
    monkeypatch.undo()
    for path in [*build.SOURCES.glob("*.cpp"), *build.SOURCES.glob("*.h")]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build._key(()) == own
    with open(tmp_path / "vec.h", "a") as file:
        file.write("// another\n")
    assert build._key(()) != own


def run(code, **environment):
    return subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=False)


STEP = """
import torch, laneway
site = laneway.HyperConnection(8, 4)
for _ in range(2):
    h, merge = site(torch.randn(3, 4, 8, requires_grad=True))
    merge(h).sum().backward()
print("ok")
"""


def test_plain_pytorch_serves_without_a_compiler_with_one_notice(tmp_path):
    done = run(STEP, CXX="no-such-compiler", LANEWAY_CACHE=str(tmp_path))
    assert done.stdout == "ok\n"
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert "plain PyTorch serves in place of the cpu kernels: no C++ compiler" in lines[0]


def test_a_backend_asked_for_by_name_raises(tmp_path):
    done = run(STEP, CXX="no-such-compiler", LANEWAY_CACHE=str(tmp_path), LANEWAY_BACKEND="cpu")
    assert done.returncode == 1
    assert "BackendError: backend cpu: no C++ compiler" in done.stderr


def test_laneway_build_on_the_command_line(cache, monkeypatch, capfd):
    call = 'import sys; from laneway.cli import main; sys.exit(main(["build"]))'
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = run(call)
    assert done.returncode == 1
    assert done.stderr.startswith("laneway build: no C++ compiler")
    assert main(["build", "--optional", "--json"]) == 0
    assert '"built": false' in capfd.readouterr().out


@needs_compiler
def test_laneway_build_says_what_it_built(capfd):
    assert main(["build", "--json"]) == 0
    assert '"built": true' in capfd.readouterr().out
