"""What the runs of ``laneway bench stability`` go through: learning rates, depth, narrow streams, faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from laneway.bench.replicas import Replicas

Fault = Literal["", "noise", "spike", "persistent"]
STREAMS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Faults begin in the middle of the run. Their sizes are those of real incidents: a burst of garbage batches, one path whose
# gradient is orders of magnitude too large, once or from then on.
NOISE_STEPS, SPIKE_FACTOR = 4, 1e4


@dataclass(frozen=True)
class Condition:
    """One column of the matrix.

    Args:
        lr: learning rate after the warm-up.
        layers: blocks, two sites each.
        streams: dtype of the streams between sites; sub-layers compute in fp32.
        fault: noise (a burst of batches of random bytes), spike (one path's gradient ×1e4 in one step), persistent (the same on
            every step from then on), or "" for none.
        twin: the condition without the fault.
        size: fields of the runs' ``Shape`` that it changes, as pairs.
    """

    lr: float
    layers: int = 16
    streams: str = "fp32"
    fault: Fault = ""
    twin: str = ""
    size: tuple[tuple[str, int], ...] = ()


BASE = "lr-0.003"
# Wider, longer and with more tokens a step than the others, and half as deep.
WIDE = (("dim", 64), ("context", 64), ("batch_size", 4), ("steps", 160))
CONDITIONS: dict[str, Condition] = {
    BASE: Condition(3e-3),
    "noise": Condition(3e-3, fault="noise", twin=BASE),
    "spike": Condition(3e-3, fault="spike", twin=BASE),
    "persistent": Condition(3e-3, fault="persistent", twin=BASE),
    "lr-0.01": Condition(1e-2),
    "lr-0.03": Condition(3e-2),
    "lr-0.1": Condition(1e-1),
    "bf16": Condition(2e-2, streams="bf16"),
    "fp16": Condition(2e-2, streams="fp16"),
    "wide": Condition(1e-2, layers=8, size=WIDE),
    "deep": Condition(1e-2, layers=32),
    "deep-fp16": Condition(1e-2, layers=32, streams="fp16"),
}


# What mechanisms on top of mHC are run under by default: where something goes wrong, and where nothing does.
OF_MECHANISMS = (BASE, "noise", "spike", "persistent", "lr-0.1", "fp16")


def units(conditions: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The conditions in groups that are run together: those with a fault follow the one that they are compared with."""
    firsts = [name for name in conditions if not CONDITIONS[name].twin]
    firsts += [twin for name in conditions if (twin := CONDITIONS[name].twin) and twin not in firsts]
    firsts = list(dict.fromkeys(firsts))
    return [(first, *(name for name in conditions if CONDITIONS[name].twin == first)) for first in firsts]


def onset(steps: int) -> int:
    """The step at which a fault begins."""
    return steps // 2 + 1


def corrupt(fault: Fault, step: int, steps: int, seeds: list[int], inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The batches [R, b, t] of a step as the fault leaves them: random bytes, drawn from seed and step, in place of text."""
    if fault != "noise" or not onset(steps) <= step < onset(steps) + NOISE_STEPS:
        return inputs, targets
    shape = (*inputs.shape[1:-1], inputs.shape[-1] + 1)
    drawn = np.stack([np.random.default_rng((seed, step)).integers(0, 256, shape) for seed in seeds])
    noise = torch.from_numpy(drawn)
    return noise[..., :-1].contiguous(), noise[..., 1:].contiguous()


def disturb(fault: Fault, step: int, steps: int, replicas: Replicas) -> None:
    """The gradients of a step as the fault leaves them: those of the middle block's feed-forward path times ``SPIKE_FACTOR``."""
    hit = step >= onset(steps) if fault == "persistent" else fault == "spike" and step == onset(steps)
    if not hit:
        return
    path = f"blocks.{len(replicas.models[0].blocks) // 2}.ffn."
    for name, columns in replicas.columns.items():
        if name.startswith(path):
            replicas.grad[:, columns] *= SPIKE_FACTOR
