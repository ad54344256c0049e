"""``laneway bench convert``: a pretrained transformer goes on training, plain and converted.

A small Llama of transformers is trained from nothing on the text of the tiny recipe. Copies of it then go on for equal steps, on
the same batches in the same order:

    plain      as it is, all weights
    mhc_maps   converted, the trunk frozen: sites and read-out alone train
    mhc_all    converted, all weights

All variants of a seed advance together, one step each in turns, so step times are paired; the order moves on every step.
Validation loss is the mean over fixed batches, before and after; differences to ``plain`` are paired by seed.
"""

from __future__ import annotations

import copy
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from laneway.bench.rows import Report, Row
from laneway.bench.stats import mean_interval, spread
from laneway.bench.threads import using_threads
from laneway.bench.timer import Samples, ratio
from laneway.connections import StreamProbe, param_groups
from laneway.connections.convert import convert
from laneway.connections.parameters import connections
from laneway.core import InputError, LanewayError, positive_int
from laneway.data.loader import BatchLoader, evaluation_batches
from laneway.data.text import Corpus, TextDataConfig, prepare
from laneway.train.config import OptimizerConfig
from laneway.train.schedule import learning_rate
from laneway.train.step import token_loss
from laneway.train.workbench import seed_all

VARIANTS = ("plain", "mhc_maps", "mhc_all")
BASELINE = VARIANTS[0]
CLIP_NORM = 1.0
LATER = 1000  # added to the seed for the order of the text after pretraining


@dataclass(frozen=True)
class ConvertOptions:
    """What is trained."""

    seeds: int = 3
    pretrain_steps: int = 300
    steps: int = 100
    lr_pretrain: float = 3e-3
    lr: float = 3e-3
    lr_maps: float = 1e-2
    streams: int = 4
    layers: int = 4
    dim: int = 64
    context: int = 128
    batch_size: int = 8
    validation_batches: int = 32
    threads: int = 1
    """0 for all."""
    quick: bool = False

    def check(self) -> None:
        """Raise InputError for the first field that is out of range, LanewayError where transformers is absent."""
        for name in ("seeds", "pretrain_steps", "steps", "layers", "context", "batch_size", "validation_batches"):
            positive_int(name, getattr(self, name))
        positive_int("streams", self.streams, 2)
        positive_int("threads", self.threads, 0)
        if self.dim < 8 or self.dim % 8:
            raise InputError("dim", self.dim, "a multiple of 8: four heads of an even width")
        for name in ("lr_pretrain", "lr", "lr_maps"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(name, getattr(self, name), "a number > 0")
        if importlib.util.find_spec("transformers") is None:
            raise LanewayError("the benchmark needs the package transformers: pip install 'laneway[hf]'")

    def lr_of(self, variant: str) -> float:
        """Highest learning rate of a variant."""
        return self.lr_maps if variant == "mhc_maps" else self.lr


def quick(options: ConvertOptions) -> ConvertOptions:
    """At most a minute on two cores: two narrow layers and few steps."""
    steps = {"pretrain_steps": min(options.pretrain_steps, 40), "steps": min(options.steps, 20)}
    return replace(options, **steps, layers=2, dim=32, context=64, validation_batches=8, threads=1, quick=True)


def run(options: ConvertOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Pretrain and train on with every seed; raises InputError where an option is out of range."""
    options.check()
    rows: list[Row] = []
    times = {name: Samples() for name in VARIANTS}
    with using_threads(options.threads):
        corpus = prepare(TextDataConfig())
        for seed in range(options.seeds):
            progress(f"seed {seed + 1} of {options.seeds}: {options.pretrain_steps} steps, then {options.steps} of each variant")
            rows += _one_seed(options, corpus, seed, times)
    notes = ["quick: ≤ 60 s on 2 cores; a very small network, few steps: read its loss as a smoke test"] if options.quick else []
    return Report("convert", {"convert": rows}, summarise(rows, times), notes)


class Run:
    """A model that trains: its trainable parameters, its schedule and its optimizer."""

    def __init__(self, model: nn.Module, lr: float, steps: int) -> None:
        self.model, self.steps, self.step = model.train(), steps, 0
        self.config = OptimizerConfig(lr=lr, warmup=0.1, floor=0.1)
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        groups = param_groups(model, self.config.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(self.config.beta1, self.config.beta2), fused=True)

    def train(self, batch: tuple[Tensor, Tensor]) -> None:
        """One optimizer step."""
        self.step += 1
        inputs_bt, targets_bt = batch
        token_loss(self.model(input_ids=inputs_bt, use_cache=False).logits, targets_bt).backward()
        nn.utils.clip_grad_norm_(self.trainable, CLIP_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step, self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def loss(self, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Mean loss in nats a token over batches of one size."""
        self.model.eval()
        losses = [token_loss(self.model(input_ids=x, use_cache=False).logits, y).item() for x, y in batches]
        self.model.train()
        return statistics.fmean(losses)


def llama(options: ConvertOptions) -> Any:
    """A plain Llama over bytes, with fresh weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    sizes = {"hidden_size": options.dim, "intermediate_size": 32 * -(-8 * options.dim // 96), "num_hidden_layers": options.layers}
    positions = {"max_position_embeddings": options.context}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=256, tie_word_embeddings=True, initializer_range=0.05, **heads, **sizes, **positions)
    )


def variant_of(pretrained: nn.Module, name: str, options: ConvertOptions) -> Run:
    """A copy of the pretrained model as one of ``VARIANTS``, ready to go on."""
    model = copy.deepcopy(pretrained)
    if name != BASELINE:
        convert(model, options.streams)
    if name == "mhc_maps":
        maps = {id(p) for module in connections(model) for p in module.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in maps)
    return Run(model, options.lr_of(name), options.steps)


def _one_seed(options: ConvertOptions, corpus: Corpus, seed: int, times: dict[str, Samples]) -> list[Row]:
    """Pretrain once, then train all variants side by side; appends the seconds of every step to ``times``."""
    seed_all(seed)
    base = Run(llama(options), options.lr_pretrain, options.pretrain_steps)
    for batch in islice(BatchLoader(corpus.train, options.context, options.batch_size, seed), options.pretrain_steps):
        base.train(batch)
    fixed = list(evaluation_batches(corpus.validation, options.context, options.batch_size, options.validation_batches))
    runs = {name: variant_of(base.model, name, options) for name in VARIANTS}
    before = {name: each.loss(fixed) for name, each in runs.items()}
    batches = BatchLoader(corpus.train, options.context, options.batch_size, seed + LATER)
    for step, batch in enumerate(islice(batches, options.steps)):
        first = step % len(VARIANTS)
        for name in VARIANTS[first:] + VARIANTS[:first]:
            wall, cpu = time.perf_counter(), time.process_time()
            runs[name].train(batch)
            times[name].cpu_s.append(time.process_time() - cpu)
            times[name].wall_s.append(time.perf_counter() - wall)
    return [_row(options, corpus, name, seed, runs[name], before[name], fixed, times) for name in VARIANTS]


def _row(
    options: ConvertOptions, corpus: Corpus, name: str, seed: int, done: Run, before: float, fixed: Sequence[Any],
    times: dict[str, Samples],
) -> Row:  # fmt: skip
    own, base = (times[key].last(options.steps) for key in (name, BASELINE))
    loss = done.loss(fixed)
    with torch.no_grad(), StreamProbe(done.model) as probe:
        done.model(input_ids=fixed[0][0], use_cache=False)
    streams = probe.summary()
    shape = ("pretrain_steps", "steps", "lr_pretrain", "layers", "dim", "context", "batch_size")
    return {
        "variant": name,
        "seed": seed,
        "streams": 1 if name == BASELINE else options.streams,
        **{field: getattr(options, field) for field in shape},
        "lr": options.lr_of(name),
        "threads": torch.get_num_threads(),
        "quick": int(options.quick),
        "parameters": sum(p.numel() for p in done.model.parameters()),
        "trainable": sum(p.numel() for p in done.trainable),
        "val_loss_before": before,
        "val_loss": loss,
        "val_bits_per_byte": corpus.bits_per_byte(loss, "validation"),
        "step_ms": 1000 * statistics.median(own.wall_s),
        "step_cpu_ms": 1000 * statistics.median(own.cpu_s),
        "step_time_over_plain": ratio(own, base).value,
        "gain_forward": streams.get("gain_forward", 1.0),
        "gain_backward": streams.get("gain_backward", 1.0),
        "collapse": streams.get("collapse", 1.0),
    }


def summarise(rows: Sequence[Row], times: dict[str, Samples]) -> dict[str, Any]:
    """Per variant: loss after (mean, interval, sd over seeds), what training brought, difference to plain, time."""
    by_variant = {name: [row for row in rows if row["variant"] == name] for name in VARIANTS}
    summary: dict[str, Any] = {}
    for name, own in by_variant.items():
        losses = [row["val_loss"] for row in own]
        gained = [row["val_loss"] - row["val_loss_before"] for row in own]
        paired = [row["val_loss"] - other["val_loss"] for row, other in zip(own, by_variant[BASELINE], strict=True)]
        summary[name] = {
            "val_loss": mean_interval(losses).as_json() | {"sd": spread(losses) if len(losses) > 1 else None},
            "val_loss_minus_before": mean_interval(gained).as_json(),
            "val_loss_minus_plain": mean_interval(paired).as_json(),
            "step_time_over_plain": ratio(times[name], times[BASELINE]).as_json(),
        }
    return summary
