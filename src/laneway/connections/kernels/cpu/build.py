"""Compile the CPU kernels once and keep the library.

The library is plain C++ behind a C interface: no torch headers, so a build takes seconds and does not depend on torch's ABI; it
is called through ctypes, which lets go of the GIL. It is made for the CPU it is built on (``-march=native``); how it is built
and kept says ``laneway.native``.
"""

from __future__ import annotations

import functools
from pathlib import Path

from laneway.native import BuildError, Built, Library, cache_folder, compiler, native_flags

__all__ = ["BuildError", "Built", "build", "cache_folder", "compiler", "library", "native_flags"]

SOURCES = Path(__file__).parent
MAIN = "kernels.cpp"
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-Wno-psabi", "-Wno-unknown-pragmas",
)  # fmt: skip


@functools.cache
def library(flags: tuple[str, ...] | None = None) -> Path:
    """The path that the library of this machine has, built or not."""
    return _kernels(flags).path()


def build(flags: tuple[str, ...] | None = None, *, force: bool = False) -> Built:
    """Compile the library unless it is there.

    Args:
        flags: target flags in place of ``-march=native`` (tests build for lesser CPUs).
        force: compile even if it is there.

    Raises:
        BuildError: no compiler, the compiler refused the sources, or the result cannot be loaded.
    """
    return _kernels(flags).build(library(flags), force=force)


def _kernels(flags: tuple[str, ...] | None) -> Library:
    target = native_flags() if flags is None else flags
    return Library("cpu", "the CPU kernels", SOURCES / MAIN, (*FLAGS, *target))


def _key(flags: tuple[str, ...]) -> str:
    return _kernels(flags).key()
