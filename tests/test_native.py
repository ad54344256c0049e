"""Libraries that are compiled once: what their names depend on, torch's headers, what happens where it fails."""

from __future__ import annotations

import ctypes

import pytest
import torch

from laneway import native

pytestmark = [pytest.mark.compiler, pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")]
FLAGS = ("-std=c++20", "-fPIC", "-shared")


@pytest.fixture
def sources(tmp_path, monkeypatch):
    monkeypatch.setenv("LANEWAY_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    (folder / "main.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    return folder


def test_a_library_is_compiled_once_and_again_when_a_source_changes(sources):
    library = native.Library("answers", "the answers", sources / "main.cpp", FLAGS)
    first, second = library.build(), library.build()
    assert (first.fresh, second.fresh) == (True, False)
    assert first.path == second.path == library.path()
    assert first.path.name.startswith("answers-")
    assert ctypes.CDLL(str(first.path)).answer() == 42
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    changed = library.build()
    assert changed.fresh
    assert changed.path != first.path
    assert ctypes.CDLL(str(changed.path)).answer() == 43


def test_libraries_of_the_same_sources_with_other_flags_lie_beside_each_other(sources):
    plain = native.Library("answers", "the answers", sources / "main.cpp", FLAGS)
    other = native.Library("answers", "the answers", sources / "main.cpp", (*FLAGS, "-O1"))
    assert plain.build().path != other.build().path
    assert plain.path().parent == other.path().parent == native.cache_folder()


def test_a_library_may_use_torchs_headers_and_its_core(sources):
    (sources / "main.cpp").write_text(
        "#include <c10/core/CPUAllocator.h>\n"
        'extern "C" int same(void* p) { return c10::GetCPUAllocator()->raw_deleter() != nullptr && p != nullptr; }\n'
    )
    with pytest.raises(native.BuildError, match=r"CPUAllocator\.h"):
        native.Library("core", "the core", sources / "main.cpp", FLAGS).build()
    built = native.Library("core", "the core", sources / "main.cpp", FLAGS, uses_torch=True).build()
    function = ctypes.CDLL(str(built.path)).same
    function.argtypes = [ctypes.c_void_p]
    assert function(torch.ones(3).data_ptr()) == 1


def test_the_compilers_first_error_is_the_message(sources):
    (sources / "main.cpp").write_text("int first = unheard_of;\nint second = also_unheard_of;\n")
    with pytest.raises(native.BuildError, match=r"failed: .*unheard_of") as caught:
        native.Library("wrong", "the wrong ones", sources / "main.cpp", FLAGS).build()
    assert "also_unheard_of" not in str(caught.value)
    assert [path.suffix for path in native.cache_folder().iterdir()] == [".lock"]


def test_what_cannot_be_loaded_is_not_kept(sources):
    (sources / "main.cpp").write_text('extern "C" int nowhere(); extern "C" int call() { return nowhere(); }\n')
    with pytest.raises(native.BuildError, match=r"the callers: compiled, but cannot be loaded: .*nowhere"):
        native.Library("callers", "the callers", sources / "main.cpp", (*FLAGS, "-Wl,-z,now")).build()
    assert [path.suffix for path in native.cache_folder().iterdir()] == [".lock"]


def test_without_a_compiler_it_says_so(sources, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(native.BuildError, match=r"no C\+\+ compiler"):
        native.Library("answers", "the answers", sources / "main.cpp", FLAGS).build()


def test_a_folder_that_cannot_be_made_is_said(sources, monkeypatch):
    (sources / "file").write_text("")
    monkeypatch.setenv("LANEWAY_CACHE", str(sources / "file" / "below"))
    with pytest.raises(native.BuildError, match=r"the folder of the answers, .*below, cannot be written"):
        native.Library("answers", "the answers", sources / "main.cpp", FLAGS).build()
