"""How often ranks talk: shards after every micro-batch or once, replicas once a step, and nothing where a degree is one."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from laneway.cluster.layout import Layout
from laneway.models.gpt import GPT, GPTConfig
from laneway.strategy.dry_run import _fake_ranks
from laneway.strategy.wrap import wrap_model

CONFIG = GPTConfig(vocab_size=24, context=8, layers=2, heads=2, dim=8, residual="residual")
GROUPS = CONFIG.layers + 1  # of parameters that FSDP2 gathers together: each block, and the root


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randint(0, 24, (2, rows, 8))
    return inputs, targets


@cache
def counted(layout: Layout) -> Counter[str]:
    """Collectives of a step of two micro-batches, by name, on rank 0 of a group that moves nothing."""
    with _fake_ranks(0, layout.world):
        wrapped = wrap_model(GPT(CONFIG), layout, device="cpu")
        with Counting() as seen:
            wrapped.step(*batch(2))
        return seen.found


def of_kind(found: Counter[str], kind: str) -> int:
    return sum(count for name, count in found.items() if kind in name.replace("_", ""))


class Counting(TorchDispatchMode):
    """Counts collectives by their op's name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.found[func.name().split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("zero", "reduced"), [(1, 1), (2, 2), (3, 2)])
def test_replicas_are_reduced_in_the_last_micro_batch_alone(zero, reduced):
    found = counted(Layout(dp_replicate=2, dp_shard=2, zero=zero, precision="fp32"))
    assert of_kind(found, "reducescatter") == GROUPS * reduced
    assert of_kind(found, "allreduce") == GROUPS + 2  # and the loss, over each of the two axes


def test_gathered_parameters_are_kept_as_long_as_zero_says():
    layouts = {zero: Layout(dp_replicate=2, dp_shard=2, zero=zero, precision="fp32") for zero in (1, 2, 3)}
    gathers = {zero: of_kind(counted(layout), "allgather") for zero, layout in layouts.items()}
    assert gathers[1] < gathers[2] < gathers[3]


def test_degrees_of_one_change_no_bit_of_accumulation():
    """Gradients are not summed again by groups of one rank, micro-batch after micro-batch."""
    torch.manual_seed(2)
    layout, (inputs, targets) = Layout(precision="fp32"), batch(4)
    found: list[dict[str, Any]] = []
    for grouped in (False, True):
        torch.manual_seed(3)
        model = GPT(CONFIG)
        if grouped:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            wrapped = wrap_model(model, layout, device="cpu")
            assert (wrapped.mesh is not None) == grouped
            loss = wrapped.step(inputs, targets)
            norm = wrapped.clip_grad_norm_(float("inf"))
            found.append({"loss": loss, "norm": norm, **{name: p.grad for name, p in wrapped.named_parameters()}})
        finally:
            if grouped:
                dist.destroy_process_group()
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
