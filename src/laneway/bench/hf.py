"""``laneway bench hf``: training steps of transformers' models, as they are and with ``accelerate_hf``.

Both variants are one set of weights and one batch; a third, ``plain_residual``, is the same model with one stream and x + f,
and says how much of a step the hyper-connections are. A step is forward, backward and AdamW. The variants take turns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from laneway.bench import hf_models
from laneway.bench.memory import peak_bytes
from laneway.bench.rows import Report, Row
from laneway.bench.stats import Interval, paired_ratio, parts
from laneway.bench.threads import using_threads
from laneway.bench.timer import Samples, interleave, ratio
from laneway.checkpoint.convert import quiet_transformers
from laneway.core import choices, positive_int

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ORIGINAL, OURS, PLAIN = "transformers", "accelerate_hf", "plain_residual"


@dataclass(frozen=True)
class HFOptions:
    """What is trained."""

    models: tuple[str, ...] = tuple(hf_models.BUILDERS)
    dtypes: tuple[str, ...] = ("fp32",)
    dim: int = 512
    layers: int = 2
    batch_size: int = 1
    time: int = 512
    """Tokens of a sequence."""
    threads: int = 0
    """0 for all."""
    seconds: float = 60.0
    """Time budget of the rounds of one model and dtype."""
    quick: bool = False

    def check(self) -> None:
        """Raise InputError for the first field that is out of range."""
        choices("models", self.models, hf_models.BUILDERS)
        choices("dtype", self.dtypes, DTYPES)
        for name in ("layers", "batch_size", "time"):
            positive_int(name, getattr(self, name))
        positive_int("dim", self.dim, 2 * hf_models.HEAD)
        positive_int("threads", self.threads, 0)


def quick(options: HFOptions) -> HFOptions:
    """At most a minute on two cores: two narrow layers, short sequences, few rounds, one thread."""
    return replace(
        options, dtypes=options.dtypes[:1], dim=128, layers=2, batch_size=1, time=128, threads=1, seconds=2.0, quick=True
    )


def run(options: HFOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Measure everything in ``options``.

    Raises:
        InputError: an option is out of range.
        LanewayError: transformers is not installed.
    """
    options.check()
    hf_models.require_transformers()
    rows: list[Row] = []
    with using_threads(options.threads), quiet_transformers():
        for name in options.models:
            for dtype in options.dtypes:
                progress(
                    f"{name}, {dtype}: {options.batch_size} × {options.time} tokens, {options.layers} layers of {options.dim}"
                )
                rows += _condition(options, name, dtype)
    notes = []
    if options.quick:
        notes.append("quick: ≤ 60 s on 2 cores; two narrow layers, few rounds, one thread: read its times as a smoke test")
    return Report("hf", {"hf": rows}, summarise(rows), notes)


def _condition(options: HFOptions, name: str, dtype: str) -> list[Row]:
    """Rows of one model and dtype."""
    from laneway.connections.hf import accelerate_hf

    shape = {"dim": options.dim, "layers": options.layers}
    original = hf_models.build(name, DTYPES[dtype], **shape)
    plain = hf_models.plain_residual(name, DTYPES[dtype], **shape)
    ours = accelerate_hf(copy.deepcopy(original))
    ids = torch.randint(4, hf_models.VOCABULARY, (options.batch_size, options.time))
    losses = [_loss(model, ids).item() for model in (original, ours)]
    steps = {key: _step(model, ids) for key, model in ((ORIGINAL, original), (OURS, ours), (PLAIN, plain))}
    samples = interleave(steps, seconds=options.seconds, min_rounds=3 if options.quick else 5, warmup=1)
    condition = {
        "model": name,
        "dtype": dtype,
        "dim": options.dim,
        "layers": options.layers,
        "streams": hf_models.STREAMS,
        "batch_size": options.batch_size,
        "time": options.time,
        "threads": torch.get_num_threads(),
        "quick": int(options.quick),
        "loss_difference": abs(losses[1] - losses[0]) / losses[0],
    }
    return [condition | _row(key, samples, step) for key, step in steps.items()]


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def _step(model: nn.Module, ids: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        _loss(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _row(key: str, samples: dict[str, Samples], step: Callable[[], None]) -> Row:
    """One variant: its times, how many times longer it takes than ours, and what of it the hyper-connections are."""
    over = ratio(samples[key], samples[OURS])
    share = _share(samples[key], samples[PLAIN])
    return {
        "variant": key,
        **samples[key].columns(),
        **over.columns("over_accelerated"),
        **share.columns("connections_share"),
        "peak_bytes": peak_bytes(step),
    }


def _share(own: Samples, plain: Samples) -> Interval:
    """1 − plain / own, within the rounds: the part of a step that would be gone with plain residuals."""
    part = paired_ratio(plain.wall_s, own.wall_s)
    return Interval(1 - part.value, 1 - part.high, 1 - part.low)


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Per model and dtype: how many times faster a step is, the hyper-connections' share before and after, memory."""
    summary: dict[str, Any] = {}
    for row in rows:
        if row["variant"] != ORIGINAL:
            continue
        key = f"{row['model']} {row['dtype']} {row['threads']}t"
        ours = next(r for r in rows if r["variant"] == OURS and (r["model"], r["dtype"]) == (row["model"], row["dtype"]))
        summary[key] = {
            "step_speedup": parts(row, "over_accelerated"),
            "connections_share_before": parts(row, "connections_share"),
            "connections_share_after": parts(ours, "connections_share"),
            "step_memory_over_transformers": Interval.exact(ours["peak_bytes"] / row["peak_bytes"]).as_json(),
            "loss_difference": row["loss_difference"],
        }
    return summary
