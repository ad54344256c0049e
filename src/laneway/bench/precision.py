"""``laneway bench precision``: a whole training step in fp32 and under bf16 autocast.

A step is what ``laneway train`` runs: forward, loss, backward, clipping, AdamW, of a small GPT on one batch of random tokens. All
residuals and both precisions take turns in one process. ``fp32_over`` is how many times longer the same residual takes in fp32,
within the rounds: above one, bf16 is faster. What comes out hangs on the processor: one without bf16 products (AVX-512-BF16 or
AMX; bf16 on Arm) makes them out of fp32 ones and pays for the conversions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from laneway.bench.rows import Report, Row
from laneway.bench.stats import parts
from laneway.bench.threads import using_threads
from laneway.bench.timer import Samples, interleave, ratio
from laneway.bench.training import TrainingStep
from laneway.core import InputError, choices, positive_int
from laneway.models.gpt import RESIDUALS, GPTConfig
from laneway.train.config import PRECISIONS, TrainConfig
from laneway.train.ranks import ranks_of_run

# Instructions that multiply bf16, as Linux names them: x86 (first two), Arm.
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True)
class PrecisionOptions:
    """What is measured."""

    variants: tuple[str, ...] = ("residual", "mhc")
    dim: int = 256
    layers: int = 4
    context: int = 128
    batch_size: int = 4
    threads: int = 0
    """0 for all."""
    seconds: float = 60.0
    """Time budget of the rounds."""
    quick: bool = False

    def check(self) -> None:
        """Raise InputError for the first field that is out of range."""
        choices("variants", self.variants, RESIDUALS)
        positive_int("threads", self.threads, 0)
        if not 0 < self.seconds < float("inf"):
            raise InputError("seconds", self.seconds, "a number > 0")
        for name in self.variants:
            self.config(name, "fp32").check()

    def config(self, variant: str, dtype: str) -> TrainConfig:
        """The run whose step is measured."""
        model = GPTConfig(residual=variant, dim=self.dim, layers=self.layers, context=self.context)
        return TrainConfig(model=model, batch_size=self.batch_size, precision=dtype, parallel="none")


def quick(options: PrecisionOptions) -> PrecisionOptions:
    """At most a minute on two cores: a narrow network of two layers, one thread, few rounds."""
    return replace(options, dim=min(options.dim, 64), layers=min(options.layers, 2), threads=1, seconds=10.0, quick=True)


def run(options: PrecisionOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Measure every variant in every precision; raises InputError where an option is out of range."""
    options.check()
    rows: list[Row] = []
    with using_threads(options.threads), ranks_of_run("auto") as ranks:
        steps = {
            (name, dtype): TrainingStep(options.config(name, dtype), ranks) for name in options.variants for dtype in PRECISIONS
        }
        progress(f"{', '.join(options.variants)} in {' and '.join(PRECISIONS)}, about {options.seconds:.0f} s")
        labels = {" ".join(key): step for key, step in steps.items()}
        samples = interleave(labels, seconds=options.seconds, min_rounds=3 if options.quick else 7, warmup=2)
        rows = [_row(options, *key, step, samples) for key, step in steps.items()]
    notes = [processor_line()] if ranks.device.type == "cpu" else []
    if options.quick:
        notes.append("quick: ≤ 60 s on 2 cores; a narrow network, few rounds. Leave --quick out for the rest")
    return Report("precision", {"precision": rows}, summarise(rows), notes)


def _row(options: PrecisionOptions, variant: str, dtype: str, step: TrainingStep, samples: dict[str, Samples]) -> Row:
    own, wide = samples[f"{variant} {dtype}"], samples[f"{variant} fp32"]
    faster = ratio(wide, own)
    return {
        "variant": variant,
        "dtype": dtype,
        "layers": options.layers,
        "dim": options.dim,
        "context": options.context,
        "batch_size": options.batch_size,
        "threads": torch.get_num_threads(),
        "quick": int(options.quick),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "bf16_instructions": " ".join(bf16_instructions()) or "none",
        "parameters": step.parameters,
        **own.columns(),
        **faster.columns("fp32_over"),
        "loss": step.loss,
    }


def bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Which of ``BF16_INSTRUCTIONS`` the processor has, from Linux' list of its features; else as torch sees it."""
    try:
        lines = cpuinfo.read_text("utf-8").splitlines()
    except OSError:
        looks = {"avx512_bf16": "_is_avx512_bf16_supported", "amx_bf16": "_is_amx_tile_supported"}
        return [name for name, look in looks.items() if getattr(torch.cpu, look, lambda: False)()]
    features = {
        word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split(":", 1)[1].split()
    }
    return [name for name in BF16_INSTRUCTIONS if name in features]


def processor_line() -> str:
    """What the ratio hangs on, in one line."""
    have = bf16_instructions()
    said = f"multiplies bf16 ({', '.join(have)})" if have else "has no instructions that multiply bf16"
    return f"the processor {said}; torch uses {torch.backends.cpu.get_cpu_capability()}"


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """How many times longer a step takes in fp32 than under bf16 autocast, by residual."""
    return {row["variant"]: {"fp32_over_bf16": parts(row, "fp32_over")} for row in rows if row["dtype"] == "bf16"}
