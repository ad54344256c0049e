"""``laneway generate RUN --prompt TEXT``: text from a trained model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from laneway.cli._parse import parse
from laneway.train.ranks import pick_device
from laneway.train.trained import load_trained


@dataclass(frozen=True)
class Generate:
    """Write text with a trained model."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run directory (its export is used, else its newest checkpoint), or the folder of an export."""
    prompt: str = ""
    """The text to go on from; empty: a new line."""
    max_tokens: int = 200
    """Tokens to write."""
    temperature: float = 0.8
    """Below 1 is more certain, above 1 more varied; 0 takes the likeliest token each time."""
    top_k: int = 50
    """Draw from the likeliest tokens only; 0: from all."""
    seed: int = 0
    """The same seed gives the same text."""
    device: str = "auto"
    """auto (the accelerator, else the CPU) or a device type."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """One JSON object on stdout."""


def run(args: Sequence[str]) -> int:
    """Parse the flags and write the text."""
    asked = parse(Generate, args, prog="laneway generate")
    trained = load_trained(asked.run, pick_device(asked.device, 0))
    start = time.perf_counter()
    text = trained.write(asked.prompt, asked.max_tokens, asked.temperature, asked.top_k, asked.seed)
    if asked.json:
        described = {"run": str(asked.run), "source": trained.source, "prompt": asked.prompt, "text": text, "seed": asked.seed}
        print(json.dumps(described | {"tokens": asked.max_tokens, "seconds": time.perf_counter() - start}))
    else:
        print(f"from the {trained.source}", file=sys.stderr)
        print(asked.prompt + text)
    return 0
