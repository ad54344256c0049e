"""``laneway validate --config FILE``: everything that is wrong with a configuration, or what it would come to."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from laneway.cli._parse import parse
from laneway.core import InputError, choice, positive_int
from laneway.models.gpt import GPT
from laneway.recipes import DEFAULT, RECIPES
from laneway.train.config import TrainConfig
from laneway.train.controls import with_control
from laneway.train.settings import merge, read_toml

BYTES_PER_PARAMETER = 16  # fp32 parameter, gradient and AdamW's two moments


@dataclass(frozen=True)
class Validate:
    """Check a configuration file, field by field: every problem, not only the first."""

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")] = DEFAULT
    """The recipe that the file changes: tiny | small | gpt2-124m"""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """TOML file; without one the recipe itself is checked."""
    ranks: int = 1
    """Processes of the run: the batch must divide among them."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """One JSON object on stdout."""


def run(args: Sequence[str]) -> int:
    """Parse the flags, check, and say what is wrong or what the run would come to."""
    asked = parse(Validate, args, prog="laneway validate")
    settings = RECIPES[choice("recipe", asked.recipe, RECIPES)]()
    problems: list[InputError] = []
    if asked.config is not None:
        settings, problems = merge(settings, read_toml(asked.config))
    problems += settings.problems(positive_int("ranks", asked.ranks))
    summary = {} if problems else summarise(settings)
    if asked.json:
        rows = [{"field": p.field, "given": p.given, "accepted": p.accepted, "hint": p.hint} for p in problems]
        print(json.dumps({"ok": not problems, "problems": rows, "summary": summary}, default=str))
    elif problems:
        for problem in problems:
            print(f"laneway validate: {problem}", file=sys.stderr)
    else:
        print("\n".join(f"{name:<18}{value:>20,}" for name, value in summary.items()))
    return 2 if problems else 0


def summarise(config: TrainConfig) -> dict[str, int]:
    """Size of a run: parameters, tokens it trains on, bytes of its states (activations come on top)."""
    with torch.device("meta"):
        model = with_control(GPT(config.model), config.control)
    parameters = sum(p.numel() for p in model.parameters())
    tokens_per_step = config.batch_size * config.model.context
    return {
        "parameters": parameters,
        "tokens_per_step": tokens_per_step,
        "tokens": tokens_per_step * config.steps,
        "state_bytes": BYTES_PER_PARAMETER * parameters,
    }
