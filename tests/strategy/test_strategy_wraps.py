"""A plan applied on one process: ``Strategy.wrap_model``."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from laneway.core import LanewayError
from laneway.models.gpt import GPT, GPTConfig
from laneway.strategy.auto import auto_config
from laneway.strategy.strategy import Strategy
from laneway.train.plan import architecture_of

CONFIG = GPTConfig(vocab_size=64, context=16, layers=2, heads=2, dim=16, residual="residual")


def plan(streams: int = 1) -> Strategy:
    arch = replace(architecture_of(CONFIG), streams=streams)
    return auto_config(arch=arch, hardware_topology="1xCPU", seq_len=16, global_batch=4, precision="fp32")


@pytest.mark.parametrize("streams", [1, 4])
def test_one_process_trains_what_the_plan_wraps(streams: int) -> None:
    torch.manual_seed(torch.seed() % 2**31)
    model = plan(streams).wrap_model(GPT(CONFIG), device="cpu")
    optimizer = torch.optim.AdamW(model.param_groups(weight_decay=0.0), lr=1e-2)
    inputs, targets = torch.randint(0, 64, (2, 4, 16))
    losses = []
    for _ in range(8):
        losses.append(float(model.step(inputs, targets)))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert ("readout" in " ".join(dict(model.named_parameters()))) is (streams > 1)


def test_a_plan_for_more_processes_is_refused_by_number() -> None:
    many = auto_config(arch=architecture_of(CONFIG), hardware_topology="4xCPU", seq_len=16, global_batch=4, precision="fp32")
    with pytest.raises(LanewayError, match=r"\b4\b"):
        many.wrap_model(GPT(CONFIG), device="cpu")


def test_state_on_the_host_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "laneway"):
        replace(plan(), memory="host").wrap_model(GPT(CONFIG), device="cpu")
    assert "optimizer_state='streamed'" in caplog.text
