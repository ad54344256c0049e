"""``laneway train [RECIPE] [--config FILE] [--plan FILE] [--out DIR] [--resume] [--resume-or-start] [any field as a flag]``."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from laneway.cli._parse import parse
from laneway.cluster.recover import LostContactError, leave
from laneway.core import InputError, LanewayError, choice
from laneway.memory.config import from_environment
from laneway.memory.oom import out_of_memory
from laneway.recipes import DEFAULT, RECIPES
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.loop import TrainResult, train
from laneway.train.metrics import plain
from laneway.train.place import newest_run
from laneway.train.plan import apply_plan, check_world
from laneway.train.progress import duration
from laneway.train.resume import saved_config
from laneway.train.settings import differences, merge, read_toml

if TYPE_CHECKING:
    from laneway.strategy.strategy import Strategy

_MEMORY_FLAG = re.compile("^--memory-")  # --memory-budget is short for --memory.budget


@dataclass(frozen=True)
class Request:
    """What the command line asks for: where to start from, where to write, and the merged configuration."""

    recipe: str | None
    config_file: Path | None
    out: Path | None
    resume: bool
    json: bool
    settings: TrainConfig
    plan_file: Path | None = None
    resume_or_start: bool = False

    @property
    def folder(self) -> Path:
        """The run directory to write, or to look beside where it was left open."""
        return self.out or Path("runs") / (self.recipe or DEFAULT)


def run(args: Sequence[str]) -> int:
    """Train, then say where the run lies and what to look at next."""
    first_rank = int(os.environ.get("RANK", "0")) == 0
    try:
        request = read_request(args)
        result = _train(request)
    except LostContactError as error:
        if error.speaks:
            print(f"laneway train: {error}", file=sys.stderr)
        leave(error.exit_code)
    except LanewayError as error:
        if first_rank:
            raise
        return error.exit_code  # every rank has the same error: one of them says it
    if first_rank:
        print(json.dumps(as_json(result)) if request.json else last_lines(result))
    return 0


def _train(request: Request) -> TrainResult:
    """Train as asked. Raises LanewayError where memory ran out, which says where doctor is to look."""
    try:
        return train(
            request.settings,
            out=request.folder,
            resume=None if request.resume_or_start else request.resume,
            spare=request.out is None,
            console="stderr" if request.json else "stdout",
            plan=planned(request),
        )
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        text = f"out of memory: {reason}; what to turn: laneway doctor {request.out or newest_run(request.folder)}"
        if (rank := os.environ.get("RANK", "0")) != "0":
            print(f"laneway train: rank {rank}: {text}", file=sys.stderr)  # the others do not have this error
        raise LanewayError(text) from error


def read_request(args: Sequence[str]) -> Request:
    """Parse the flags over the configuration they start from: recipe < file < flags (with --resume, the run's own < …).

    Which configuration that is stands in the flags themselves, so they are read twice where the first guess was wrong.
    """
    args = [_MEMORY_FLAG.sub("--memory.", arg) for arg in args]
    guess = Request(args[0] if args and not args[0].startswith("-") else None, None, None, False, False, TrainConfig())
    for _ in range(2):
        start = starting_config(guess)
        found = parse(_command(start), args, prog="laneway train")
        if _source(found) == _source(guess):
            break
        guess = found
    if found.resume_or_start and (found.resume or found.out is None):
        wanted = "without --resume" if found.resume else "with --out DIR, so that each start finds the same run"
        raise InputError("resume_or_start", True, wanted)
    if found.resume and found.out is None:
        found = dataclasses.replace(found, out=newest_run(found.folder))
    return found


def starting_config(request: Request) -> TrainConfig:
    """The configuration that flags change: recipe and file, or the one in the run directory that is to be resumed."""
    if request.resume and request.recipe is None:
        config = saved_config(RunDirectory.open(newest_run(request.folder) if request.out is None else request.out, "resume"))
    else:
        config = RECIPES[choice("recipe", request.recipe or DEFAULT, RECIPES)]()
        config = dataclasses.replace(config, memory=dataclasses.replace(config.memory, **from_environment()))
    if request.config_file is not None:
        config, problems = merge(config, read_toml(request.config_file))
        for problem in problems:
            raise problem
    return config if request.plan_file is None else apply_plan(read_plan(request.plan_file), config)


def read_plan(path: Path) -> Strategy:
    """The plan in a file. The planner is imported here, since most runs have none."""
    from laneway.strategy.strategy import Strategy

    return Strategy.load(path)


def planned(request: Request) -> Strategy | None:
    """The plan that the run was given, if any.

    Raises:
        InputError: it was made for another number of processes, or a flag sets what the plan sets, to another value.
    """
    if request.plan_file is None:
        return None
    plan = read_plan(request.plan_file)
    check_world(plan, int(os.environ.get("WORLD_SIZE", "1")))
    for name, (wanted, given) in differences(apply_plan(plan, request.settings), request.settings).items():
        raise InputError(name, given, f"{wanted}, as the plan has it", "leave the flag out, or plan again")
    return plan


def _source(request: Request) -> tuple[object, ...]:
    return request.recipe, request.config_file, request.plan_file, request.resume, request.out if request.resume else None


def _command(start: TrainConfig) -> Callable[..., Request]:
    """The verb as a function whose defaults are ``start``'s fields."""

    def command(
        recipe: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")] = None,
        /,
        config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
        plan: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
        out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None,
        resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
        resume_or_start: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
        settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = start,
    ) -> Request:
        """Train a language model on text. Flags win over the file, the file over the recipe.

        Args:
            recipe: tiny (the default) | small | gpt2-124m
            config: TOML file with the fields below; config.toml of any run is one.
            plan: what `laneway plan --recipe RECIPE --write FILE` wrote: sets batch, layout, precision and recompute.
            out: run directory; by default runs/RECIPE, or runs/RECIPE-2, … where that is taken.
            resume: go on from the newest checkpoint in --out (by default the latest run of the recipe).
            resume_or_start: go on with the run in --out if there is one, else start it: one command for torchrun to repeat.
            json: one JSON object on stdout at the end; everything else goes to stderr.
            settings: the run
        """
        return Request(recipe, config, out, resume, json, settings, plan, resume_or_start)

    return command


def as_json(result: TrainResult) -> dict[str, object]:
    """The result in plain JSON types."""
    return {name: plain(value) for name, value in dataclasses.asdict(result).items()} | {"run": str(result.run)}


def last_lines(result: TrainResult) -> str:
    """What the run came to, where it lies and the next command."""
    if result.stopped:
        return f"stopped by {result.stopped} after step {result.steps}; go on: laneway train --resume --out {result.run}"
    figures = f"val loss {result.val_loss:.4f} nats/token, {result.val_bits_per_byte:.3f} bits/byte"
    where = f"run in {result.run}; next: laneway report {result.run}"
    return f"{figures} after {result.steps} steps in {duration(result.seconds)}; {where}"
