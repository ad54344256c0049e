"""Schedulers of replicas: each is told of its own run's use, as it would be alone."""

from __future__ import annotations

import pytest
import torch

from laneway.bench.replicas import Replicas
from laneway.connections.schedule import Schedule
from laneway.connections.scheduler import ConnectionScheduler
from laneway.models.gpt import GPT, GPTConfig
from laneway.train.config import OptimizerConfig
from laneway.train.step import token_loss


def started(seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocab_size=32, context=16, layers=2, heads=2, dim=8))


@pytest.mark.parametrize("form", ["scale", "logits"])
def test_use_is_measured_in_each_replica_apart(form):
    schedule = Schedule(every=1, directions=2, form=form)
    together, apart = [started(seed) for seed in (0, 1)], [started(seed) for seed in (0, 1)]
    controls = [ConnectionScheduler(model, schedule) for model in together]
    replicas = Replicas(together, OptimizerConfig(lr=1e-3))
    tokens = torch.randint(0, 32, (2, 2, 17))
    for control in controls:
        control.on_step_begin(1)
    replicas.step(tokens[..., :-1], tokens[..., 1:], 1e-3, lambda: [control.on_backward_end(1) for control in controls])
    for model, control, own in zip(apart, controls, tokens, strict=True):
        alone = ConnectionScheduler(model, schedule)
        alone.on_step_begin(1)
        token_loss(model(own[:, :-1]), own[:, 1:]).backward()
        alone.on_backward_end(1)
        for one in (control, alone):
            one.on_step_begin(2)
        for here, there in zip(control.sites, alone.sites, strict=True):
            assert there.demand.abs().sum() > 0
            torch.testing.assert_close(here.demand, there.demand, rtol=1e-3, atol=1e-4)
