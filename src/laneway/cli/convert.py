"""``laneway convert MODEL OUT``: a saved transformers model as one with hyper-connections."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from laneway.cli._parse import parse


@dataclass(frozen=True)
class Convert:
    """Turn a saved transformers model into one with hyper-connections: the same function at first, with n residual streams."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The folder of a plain Llama, Mistral, Qwen2, Qwen3, GPT-2, GPT-NeoX or ViT, as save_pretrained writes it."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The folder to write; there must be none yet. laneway.load_converted(OUT) loads it."""
    streams: int = 4
    """Residual streams n."""
    manifold: str = "sinkhorn"
    """Where the mixing matrices live: sinkhorn | birkhoff | kronecker | orthogonal | identity | none"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """One JSON object on stdout."""


def run(args: Sequence[str]) -> int:
    """Parse the flags, convert, and say what came of it."""
    asked = parse(Convert, args, prog="laneway convert")
    from laneway.checkpoint.convert import convert_folder

    done = convert_folder(asked.model, asked.out, asked.streams, asked.manifold)
    if asked.json:
        print(json.dumps(done))
        return 0
    if done["left_out"]:
        print(f"left out {len(done['left_out'])} weights that belong to nothing, first {done['left_out'][0]}", file=sys.stderr)
    print(f"{done['class']} in {done['dtype']}: {done['sites']} sites, {done['streams']} streams, {done['manifold']}")
    print(f"parameters {done['parameters']:,} + {done['parameters_added']:,}")
    print(f"largest difference of the outputs {done['largest_difference']:.2g} (largest output {done['largest_output']:.3g})")
    print(f"written to {done['out']}")
    return 0
