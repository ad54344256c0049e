"""``laneway bench modalities``: images, and images with text, with and without hyper-connections.

Three small networks on the digits of scikit-learn: a vision transformer, a convolutional network (streams with the channels
first), and one trunk for an image with a question about it. Within a modality all variants of a seed have the same weights at
the start, the same batches in the same order and the same schedule, and advance together, one step each in turns, so that their
step times are paired. Accuracy is that on the held-out digits; for questions, every question about every one of them, and
``best_alone`` is what the best function of the image alone or of the question alone could reach there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneway.bench.quality import BASELINE
from laneway.bench.rows import Report, Row
from laneway.bench.stats import mean_interval, spread
from laneway.bench.threads import using_threads
from laneway.bench.timer import Samples, ratio
from laneway.connections import param_groups
from laneway.core import InputError, choices, positive_int
from laneway.data import digits
from laneway.data.digits import Digits
from laneway.models.convnet import ConvNet, ConvNetConfig
from laneway.models.gpt import RESIDUALS
from laneway.models.multimodal import ImageTextConfig, ImageTextModel
from laneway.models.vit import ViT, ViTConfig
from laneway.train.config import OptimizerConfig
from laneway.train.schedule import learning_rate

Batch = tuple[tuple[Tensor, ...], Tensor]
"""Inputs and targets."""


@dataclass(frozen=True)
class Modality:
    """A network, how it is trained, and what it is trained on; learning rate and batch were chosen with the plain residual."""

    build: Callable[[str], nn.Module]
    draw: Callable[[Digits, int, torch.Generator], Batch]
    whole: Callable[[Digits], Batch]
    batch_size: int
    lr: float
    best_alone: Callable[[Digits], float | None] = lambda held_out: None


def _vit(residual: str) -> nn.Module:
    return ViT(ViTConfig(residual=residual, dim=32, layers=2, heads=2))


def _convnet(residual: str) -> nn.Module:
    return ConvNet(ConvNetConfig(residual=residual, widths=(8, 16)))


def _image_text(residual: str) -> nn.Module:
    text = {"vocab_size": len(digits.WORDS), "context": digits.CONTEXT}
    return ImageTextModel(ImageTextConfig(residual=residual, dim=32, layers=2, heads=2, patch=4, **text))


def _draw_images(held: Digits, size: int, generator: torch.Generator) -> Batch:
    return _all_images(held.take(torch.randint(len(held), (size,), generator=generator)))


def _all_images(held: Digits) -> Batch:
    return (held.images,), held.labels


def _draw_questions(held: Digits, size: int, generator: torch.Generator) -> Batch:
    picks, which = (torch.randint(high, (size,), generator=generator) for high in (len(held), len(digits.QUESTIONS)))
    asked = digits.ask(held, picks, which)
    return (asked.images, asked.words), asked.answers


def _all_questions(held: Digits) -> Batch:
    asked = digits.ask_all(held)
    return (asked.images, asked.words), asked.answers


MODALITIES = {
    "vit": Modality(_vit, _draw_images, _all_images, batch_size=32, lr=4e-3),
    "convnet": Modality(_convnet, _draw_images, _all_images, batch_size=32, lr=8e-3),
    "image_text": Modality(
        _image_text, _draw_questions, _all_questions, 64, 3e-3, lambda held_out: max(digits.best_alone(held_out).values())
    ),
}


@dataclass(frozen=True)
class ModalityOptions:
    """What is trained."""

    modalities: tuple[str, ...] = tuple(MODALITIES)
    variants: tuple[str, ...] = (BASELINE, "mhc")
    seeds: int = 3
    steps: int = 300
    threads: int = 0
    """0 for all."""
    quick: bool = False

    def check(self) -> None:
        """Raise InputError for the first field that is out of range."""
        choices("modalities", self.modalities, MODALITIES)
        choices("variants", self.variants, RESIDUALS)
        if BASELINE not in self.variants:
            raise InputError("variants", ",".join(self.variants), f"a list with {BASELINE}, which the others are compared with")
        for name in ("seeds", "steps"):
            positive_int(name, getattr(self, name))
        positive_int("threads", self.threads, 0)


def quick(options: ModalityOptions) -> ModalityOptions:
    """At most a minute on two cores: one seed, few steps, one thread."""
    return replace(options, seeds=1, steps=min(options.steps, 40), threads=1, quick=True)


def run(options: ModalityOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Train every variant of every modality with every seed.

    Raises:
        InputError: an option is out of range, or scikit-learn, whose digits these are, is not installed.
    """
    options.check()
    halves = digits.load_digits()
    rows: list[Row] = []
    times = {(modality, variant): Samples() for modality in options.modalities for variant in options.variants}
    with using_threads(options.threads):
        for modality in options.modalities:
            for seed in range(options.seeds):
                progress(f"{modality}, seed {seed + 1} of {options.seeds}: {', '.join(options.variants)}, {options.steps} steps")
                rows += _one_seed(options, modality, seed, halves, times)
    notes = []
    if options.quick:
        notes.append("quick: ≤ 60 s on 2 cores; one seed, few steps: read its accuracy as a smoke test")
    return Report("modalities", {"modalities": rows}, summarise(rows, times), notes)


class _Run:
    """One network in training."""

    def __init__(self, modality: Modality, residual: str, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.device = accelerator or torch.device("cpu")
        self.model = modality.build(residual).to(self.device)
        self.config, self.steps, self.done = OptimizerConfig(lr=modality.lr, warmup=0.1), steps, 0
        groups = param_groups(self.model, weight_decay=self.config.weight_decay)
        betas = (self.config.beta1, self.config.beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=self.config.lr, betas=betas, eps=self.config.eps, fused=True)
        self.modality, self.generator = modality, torch.Generator().manual_seed(seed)

    def step(self, held: Digits) -> float:
        """One optimizer step on the next batch; returns its loss, for which the device is waited for."""
        inputs, targets = self._here(self.modality.draw(held, self.modality.batch_size, self.generator))
        self.done += 1
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.done, self.steps)
        loss = F.cross_entropy(self.model(*inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def held_out(self, held: Digits) -> tuple[float, float]:
        """Loss in nats and accuracy over everything that is held out."""
        inputs, targets = self._here(self.modality.whole(held))
        logits = self.model(*inputs)
        return F.cross_entropy(logits, targets).item(), (logits.argmax(1) == targets).float().mean().item()

    def _here(self, batch: Batch) -> Batch:
        inputs, targets = batch
        return tuple(part.to(self.device) for part in inputs), targets.to(self.device)


def _one_seed(
    options: ModalityOptions,
    name: str,
    seed: int,
    halves: tuple[Digits, Digits],
    times: dict[tuple[str, str], Samples],
) -> list[Row]:
    """Train all variants side by side; appends the seconds of every step to ``times``."""
    modality, variants = MODALITIES[name], list(options.variants)
    runs = {variant: _Run(modality, variant, seed, options.steps) for variant in variants}
    for step in range(options.steps):
        first = step % len(variants)
        for variant in variants[first:] + variants[:first]:
            wall, cpu = time.perf_counter(), time.process_time()
            runs[variant].step(halves[0])
            times[name, variant].cpu_s.append(time.process_time() - cpu)
            times[name, variant].wall_s.append(time.perf_counter() - wall)
    return [_row(options, name, variant, seed, runs[variant], halves[1], times) for variant in variants]


def _row(
    options: ModalityOptions,
    name: str,
    variant: str,
    seed: int,
    done: _Run,
    held_out: Digits,
    times: dict[tuple[str, str], Samples],
) -> Row:
    own, base = (times[name, key].last(options.steps) for key in (variant, BASELINE))
    loss, accuracy = done.held_out(held_out)
    return {
        "modality": name,
        "variant": variant,
        "seed": seed,
        "steps": options.steps,
        "lr": done.modality.lr,
        "batch_size": done.modality.batch_size,
        "threads": torch.get_num_threads(),
        "quick": int(options.quick),
        "parameters": sum(p.numel() for p in done.model.parameters()),
        "test_loss": loss,
        "accuracy": accuracy,
        "best_alone": done.modality.best_alone(held_out),
        "step_ms": 1000 * statistics.median(own.wall_s),
        "step_cpu_ms": 1000 * statistics.median(own.cpu_s),
        "step_time_over_residual": ratio(own, base).value,
    }


def summarise(rows: Sequence[Row], times: dict[tuple[str, str], Samples]) -> dict[str, Any]:
    """Per modality and variant: accuracy (mean, its interval, standard deviation over seeds), paired difference, step time."""
    summary: dict[str, Any] = {}
    for (modality, variant), samples in times.items():
        own, base = (
            [row["accuracy"] for row in rows if (row["modality"], row["variant"]) == (modality, key)]
            for key in (variant, BASELINE)
        )
        summary[f"{modality} {variant}"] = {
            "accuracy": mean_interval(own).as_json() | {"sd": spread(own) if len(own) > 1 else None},
            "accuracy_minus_residual": mean_interval([a - b for a, b in zip(own, base, strict=True)]).as_json(),
            "step_time_over_residual": ratio(samples, times[modality, BASELINE]).as_json(),
        }
    return summary
