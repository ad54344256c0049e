"""Compile the CPU kernels once and keep the library.

The library is plain C++ behind a C interface: no torch headers, so a build takes seconds and does not depend on torch's ABI; it
is called through ctypes, which lets go of the GIL. It is made for the CPU it is built on (``-march=native``) and kept under a
name that hashes everything it depends on: sources, compiler, flags, torch's version (whose OpenMP runtime it shares) and the
CPU's capabilities. A shared cache folder thus serves different machines. Two processes that build at once wait for each other,
and a library appears under its name only when it is whole.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from laneway.core import LanewayError

SOURCES = Path(__file__).parent
MAIN = "site.cpp"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-Wno-psabi", "-Wno-unknown-pragmas",
)  # fmt: skip


class BuildError(LanewayError):
    """The kernels could not be compiled here; the message says why."""


@dataclass(frozen=True)
class Built:
    """Where the library is and whether this call made it. ``seconds`` 0 for one that was there."""

    path: Path
    fresh: bool
    seconds: float


def cache_folder() -> Path:
    """``LANEWAY_CACHE``, else laneway in the user's cache folder."""
    given = os.environ.get("LANEWAY_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laneway"


def compiler() -> str | None:
    """``CXX``, else the first C++ compiler on the path."""
    given = os.environ.get("CXX")
    for name in (given,) if given else COMPILERS:
        if found := shutil.which(name):
            return found
    return None


def native_flags() -> tuple[str, ...]:
    """What makes the compiler use all of this CPU."""
    return ("-march=native",) if platform.machine() in ("x86_64", "AMD64", "i686") else ("-mcpu=native",)


@functools.cache
def library(flags: tuple[str, ...] | None = None) -> Path:
    """The path that the library of this machine has, built or not."""
    return cache_folder() / f"cpu-{_key(native_flags() if flags is None else flags)}.so"


def build(flags: tuple[str, ...] | None = None, *, force: bool = False) -> Built:
    """Compile the library unless it is there.

    Args:
        flags: target flags in place of ``-march=native`` (tests build for lesser CPUs).
        force: compile even if it is there.

    Raises:
        BuildError: no compiler, the compiler refused the sources, or the result cannot be loaded.
    """
    flags = native_flags() if flags is None else flags
    target = library(flags)
    if target.exists() and not force:
        return Built(target, False, 0.0)
    program = compiler()
    if program is None:
        raise BuildError(f"no C++ compiler: none of {', '.join(COMPILERS)} is on the path (or set CXX)")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.with_suffix(".lock")):
            if target.exists() and not force:
                return Built(target, False, 0.0)
            start = time.perf_counter()
            _compile(program, flags, target)
            return Built(target, True, time.perf_counter() - start)
    except OSError as error:
        raise BuildError(f"the kernels' folder {target.parent} cannot be written: {error}") from error


def _compile(program: str, flags: tuple[str, ...], target: Path) -> None:
    """Compile beside ``target``, try to load the result, then give it its name."""
    handle, beside = tempfile.mkstemp(suffix=".so", prefix=target.stem, dir=target.parent)
    os.close(handle)
    try:
        command = [program, *FLAGS, *flags, str(SOURCES / MAIN), "-o", beside]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
            raise BuildError(f"{Path(program).name} failed: {lines[0].strip()}")
        try:
            ctypes.CDLL(beside)
        except OSError as error:
            raise BuildError(f"the compiled kernels cannot be loaded: {error}") from error
        os.chmod(beside, 0o755)
        os.replace(beside, target)
    finally:
        Path(beside).unlink(missing_ok=True)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time; the system frees the lock of a process that dies."""
    with lock.open("w") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(flags: tuple[str, ...]) -> str:
    import torch

    parts = [torch.__version__, platform.machine(), _capabilities(), _compiler_version(), *FLAGS, *flags]
    digest = hashlib.sha256("\n".join(parts).encode())
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _compiler_version() -> str:
    program = compiler()
    if program is None:
        return "no compiler"
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.partition("\n")[0]


def _capabilities() -> str:
    """The CPU's instruction sets; machines that differ in them do not share a library."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (" ".join(sorted(line.partition(":")[2].split())) for line in lines if line.startswith(("flags", "Features"))), ""
    )
