"""``laneway build``: compile the C++ libraries for this machine, once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from laneway.cli._parse import parse
from laneway.native import BuildError

Flag = tyro.conf.FlagCreatePairsOff


@dataclass(frozen=True)
class Build:
    """Compile the CPU kernels and the counting allocator unless they are there, and check the kernels against the reference.

    They are kept in LANEWAY_CACHE, else in the user's cache folder. Without this step the first use compiles them.
    """

    force: Annotated[bool, Flag] = False
    """Compile them even if they are there."""
    optional: Annotated[bool, Flag] = False
    """Exit with 0 where they can't be compiled: plain PyTorch serves then."""
    json: Annotated[bool, Flag] = False
    """One JSON object on stdout: the kernels' facts, those of the allocator below ``allocator``."""


def run(args: Sequence[str]) -> int:
    """Build, check, and say where each library is."""
    asked = parse(Build, args, prog="laneway build")
    kernels = _attempt(asked, _kernels, "plain PyTorch will serve")
    allocator = _attempt(asked, _allocator, "the CPU's memory is then measured by the process's resident bytes")
    if asked.json:
        print(json.dumps(kernels | {"allocator": allocator}))
    return 0


def _attempt(asked: Build, make: Callable[[Build], dict[str, Any]], instead: str) -> dict[str, Any]:
    """The facts of one library; where it may be missing and can't be built, the reason."""
    try:
        return make(asked)
    except BuildError as error:
        if not asked.optional:
            raise
        print(f"laneway build: {error}; {instead}", file=sys.stderr)
        return {"built": False, "reason": str(error)}


def _kernels(asked: Build) -> dict[str, Any]:
    import torch

    from laneway.connections.backends import self_check
    from laneway.connections.kernels.cpu import backend
    from laneway.connections.kernels.cpu.build import build

    built = build(force=asked.force)
    backend.load()
    if wrong := self_check(backend, torch.device("cpu")):
        raise BuildError(f"the kernels do not agree with the reference: {wrong}")
    bits = 32 * backend.vector_width()
    if not asked.json:
        how = f"compiled in {built.seconds:.0f} s" if built.fresh else "were there"
        print(f"CPU kernels {how}, {bits}-bit vectors, equal to the reference: {built.path}")
    facts = {"path": str(built.path), "built": True, "fresh": built.fresh, "seconds": round(built.seconds, 1)}
    return facts | {"vector_bits": bits}


def _allocator(asked: Build) -> dict[str, Any]:
    from laneway.memory.counting import build

    built = build(force=asked.force)
    if not asked.json:
        how = f"compiled in {built.seconds:.0f} s" if built.fresh else "was there"
        print(f"counting allocator {how}: {built.path}")
    return {"path": str(built.path), "built": True, "fresh": built.fresh, "seconds": round(built.seconds, 1)}
