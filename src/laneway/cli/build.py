"""``laneway build``: compile the CPU kernels for this machine, once."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from laneway.cli._parse import parse

Flag = tyro.conf.FlagCreatePairsOff


@dataclass(frozen=True)
class Build:
    """Compile the CPU kernels unless they are there, and check them against the reference.

    They are kept in LANEWAY_CACHE, else in the user's cache folder. Without this step the first use compiles them.
    """

    force: Annotated[bool, Flag] = False
    """Compile them even if they are there."""
    optional: Annotated[bool, Flag] = False
    """Exit with 0 where they can't be compiled: plain PyTorch serves then."""
    json: Annotated[bool, Flag] = False
    """One JSON object on stdout."""


def run(args: Sequence[str]) -> int:
    """Build, check, and say where the library is."""
    asked = parse(Build, args, prog="laneway build")
    import torch

    from laneway.connections.backends import self_check
    from laneway.connections.kernels.cpu import backend
    from laneway.connections.kernels.cpu.build import BuildError, build

    try:
        built = build(force=asked.force)
        backend.load()
        if wrong := self_check(backend, torch.device("cpu")):
            raise BuildError(f"the kernels do not agree with the reference: {wrong}")
    except BuildError as error:
        if not asked.optional:
            raise
        print(f"laneway build: {error}; plain PyTorch will serve", file=sys.stderr)
        if asked.json:
            print(json.dumps({"built": False, "reason": str(error)}))
        return 0
    found = {"path": str(built.path), "built": True, "fresh": built.fresh, "seconds": round(built.seconds, 1)}
    found["vector_bits"] = 32 * backend.vector_width()
    if asked.json:
        print(json.dumps(found))
    else:
        how = f"compiled in {built.seconds:.0f} s" if built.fresh else "were there"
        print(f"CPU kernels {how}, {found['vector_bits']}-bit vectors, equal to the reference: {built.path}")
    return 0
