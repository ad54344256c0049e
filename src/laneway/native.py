"""Compile a C++ library once for this machine and keep it.

A library is made for the CPU it is built on and kept under a name that hashes everything it depends on: sources, compiler, flags,
torch's version (whose OpenMP runtime or headers it shares) and the CPU's capabilities. A shared cache folder thus serves
different machines. Two processes that build at once wait for each other, and a library appears under its name only when it is
whole. Libraries are loaded through ctypes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from laneway.core import LanewayError

COMPILERS = ("c++", "g++", "clang++")


class BuildError(LanewayError):
    """A library could not be compiled here; the message says why."""


@dataclass(frozen=True)
class Built:
    """Where the library is and whether this call made it. ``seconds`` 0 for one that was there."""

    path: Path
    fresh: bool
    seconds: float


@dataclass(frozen=True)
class Library:
    """What a library is made of.

    Args:
        name: start of its file name.
        what: what messages call it ("the kernels").
        source: the file to compile; every other ``.cpp`` and ``.h`` of its folder counts as a source too.
        flags: the compiler's flags, those for the target CPU included.
        uses_torch: compile against torch's headers and link with libc10, which a process has loaded once it imported torch.
    """

    name: str
    what: str
    source: Path
    flags: tuple[str, ...]
    uses_torch: bool = False

    def key(self) -> str:
        """A hash of everything that the library depends on."""
        import torch

        parts = [torch.__version__, platform.machine(), capabilities(), _compiler_version(), *self.flags]
        digest = hashlib.sha256("\n".join(parts).encode())
        folder = self.source.parent
        for path in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:20]

    def path(self) -> Path:
        """The path that the library of this machine has, built or not."""
        return cache_folder() / f"{self.name}-{self.key()}.so"

    def build(self, target: Path | None = None, *, force: bool = False) -> Built:
        """Compile the library unless it is there.

        Args:
            target: ``path()`` where the caller knows it already.
            force: compile even if it is there.

        Raises:
            BuildError: no compiler, the compiler refused the sources, the result cannot be loaded, or no place for it.
        """
        target = self.path() if target is None else target
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
                self._compile(program, target)
                return Built(target, True, time.perf_counter() - start)
        except OSError as error:
            raise BuildError(f"the folder of {self.what}, {target.parent}, cannot be written: {error}") from error

    def _compile(self, program: str, target: Path) -> None:
        """Compile beside ``target``, try to load the result, then give it its name."""
        handle, beside = tempfile.mkstemp(suffix=".so", prefix=target.stem, dir=target.parent)
        os.close(handle)
        headers, libraries = torch_flags() if self.uses_torch else ((), ())
        try:
            command = [program, *self.flags, *headers, str(self.source), *libraries, "-o", beside]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = done.stderr.splitlines()
                lines = [line for line in lines if "error" in line] or lines or ["no message"]
                raise BuildError(f"{Path(program).name} failed: {lines[0].strip()}")
            try:
                ctypes.CDLL(beside)
            except OSError as error:
                raise BuildError(f"{self.what}: compiled, but cannot be loaded: {error}") from error
            os.chmod(beside, 0o755)
            os.replace(beside, target)
        finally:
            Path(beside).unlink(missing_ok=True)


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


def torch_flags() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Flags before the source (torch's headers and its ABI) and after it (libc10) of a library that extends torch."""
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    headers = [flag for folder in include_paths() for flag in ("-isystem", folder)]
    libraries = [flag for folder in library_paths() for flag in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    return (*headers, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"), (*libraries, "-lc10")


@contextmanager
def _alone(lock: Path) -> Generator[None]:
    """One process at a time; the system frees the lock of a process that dies."""
    with lock.open("w") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compiler_version() -> str:
    program = compiler()
    if program is None:
        return "no compiler"
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.partition("\n")[0]


def capabilities() -> str:
    """The CPU's instruction sets; machines that differ in them do not share a library."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (" ".join(sorted(line.partition(":")[2].split())) for line in lines if line.startswith(("flags", "Features"))), ""
    )
