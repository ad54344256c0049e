"""``laneway bench NAME [--quick] [--json] [--save [DIR]] …``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from laneway.bench import BENCHES
from laneway.cli._parse import parse
from laneway.core import InputError, choice

Flag = tyro.conf.FlagCreatePairsOff


def run(args: Sequence[str]) -> int:
    """Run one benchmark and show, print or save its rows."""
    if not args or args[0] in ("-h", "--help"):
        print("usage: laneway bench NAME [--quick] [--json] [--save [DIR]]\n")
        print("\n".join(f"  {name:<8} {what}" for name, what in BENCHES.items()))
        print("\n`laneway bench NAME --help` shows the rest.")
        return 0
    name = choice("bench", args[0], BENCHES)
    command = {"layer": _layer, "quality": _quality, "lora": _lora}[name]
    job = parse(command, _bare_save(args[1:]), prog=f"laneway bench {name}")
    from laneway.bench.rows import results_folder
    from laneway.bench.table import show

    folder = None if job.save is None else results_folder(job.save)
    report = job.work(lambda line: print(line, file=sys.stderr, flush=True))
    if job.json:
        print(json.dumps(report.as_json(), allow_nan=False))
    else:
        show(report)
    for path in [] if folder is None else report.save(folder):
        print(f"saved to {path}", file=sys.stderr)
    return 0


@dataclass(frozen=True)
class _Job:
    work: Callable[[Callable[[str], None]], Any]
    json: bool
    save: str | None


def _bare_save(args: Sequence[str]) -> list[str]:
    """``--save`` alone means the checkout's benchmarks/results; tyro wants a value."""
    found = list(args)
    for index, word in enumerate(args):
        if word == "--save" and (index + 1 == len(args) or args[index + 1].startswith("-")):
            found[index] = "--save="
    return found


def _layer(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    dtype: tuple[str, ...] = ("fp32", "bf16"),
    shape: tuple[str, ...] = (),
    threads: tuple[int, ...] = (1, 0),
    compile: bool = True,
) -> _Job:
    """One hyper-connection site, forward and backward, against other libraries and the copy-bandwidth floor.

    Args:
        quick: at most 60 s on 2 cores: the first shape, eager variants, few rounds.
        json: one JSON object on stdout.
        save: append the rows to DIR/layer.csv; without DIR to benchmarks/results of the source checkout.
        dtype: fp32 and / or bf16.
        shape: TOKENSxDIM, one or more; by default 2048x512 2048x2048 8192x1024.
        threads: numbers of threads; 0 is all.
        compile: also the variants under torch.compile.
    """
    from laneway.bench import layer

    shapes = tuple(map(_shape, shape)) or layer.SHAPES
    options = layer.LayerOptions(shapes=shapes, dtypes=dtype, threads=threads, compiled=compile)
    options.check()
    options = layer.quick(options) if quick else options
    return _Job(lambda progress: layer.run(options, progress), json, save)


def _shape(text: str) -> tuple[int, int]:
    tokens, _, dim = text.partition("x")
    if not (tokens.isdigit() and dim.isdigit()):
        raise InputError("shape", text, "TOKENSxDIM, such as 2048x512")
    return int(tokens), int(dim)


def _quality(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    variants: str = "residual,hc,mhc",
    seeds: int = 3,
    steps: int = 300,
    lr: float = 3e-3,
    threads: int = 0,
) -> _Job:
    """The same training run with different residuals: validation loss, step time, memory, gain.

    Args:
        quick: at most 60 s on 2 cores: a very small network, at most 40 steps, one thread.
        json: one JSON object on stdout.
        save: append the rows to DIR/quality.csv; without DIR to benchmarks/results of the source checkout.
        variants: comma-separated; residual must be among them. Any residual of the model, and mhc-uncapped.
        seeds: seeds 0 … N−1.
        steps: optimizer steps of each run.
        lr: highest learning rate, the same for all.
        threads: number of threads; 0 is all.
    """
    from laneway.bench import quality

    names = tuple(name.strip() for name in variants.split(","))
    options = quality.QualityOptions(variants=names, seeds=seeds, steps=steps, lr=lr, threads=threads)
    options.check()
    options = quality.quick(options) if quick else options
    return _Job(lambda progress: quality.run(options, progress), json, save)


def _lora(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    cases: str = "",
    held_out: bool = True,
    seeds: int = 5,
    steps: int = 30,
    threads: int = 1,
) -> _Job:
    """Fine-tunes with a mistake: whether the consistency check says so before the loss does, and its false alarms.

    Args:
        quick: at most 60 s on 2 cores: a handful of mistakes, a very small network, few steps.
        json: one JSON object on stdout.
        save: append the rows to DIR/lora.csv; without DIR to benchmarks/results of the source checkout.
        cases: comma-separated names of mistakes; empty for all.
        held_out: also the mistakes that were kept out of the check's development.
        seeds: healthy runs of the usual setting; other settings have two fewer.
        steps: optimizer steps of each fine-tune.
        threads: number of threads; 0 is all.
    """
    from laneway.bench import lora

    names = tuple(name.strip() for name in cases.split(",") if name.strip())
    options = lora.LoRAOptions(cases=names, held_out=held_out, seeds=seeds, steps=steps, threads=threads)
    options.check()
    options = lora.quick(options) if quick else options
    return _Job(lambda progress: lora.run(options, progress), json, save)
