"""Scheduler, curvature constraint and purification on the same sites: narrow streams, poisoned tokens, no tokens, one token."""

from __future__ import annotations

import math

import pytest
import torch
from cases import random_site

from laneway.connections.constraint import CurvatureConstraint, Measurement, Rule
from laneway.connections.purify import GradientPurifier
from laneway.connections.schedule import Schedule
from laneway.connections.scheduler import ConnectionScheduler

TOKENS, N, DIM, BAD = 24, 4, 16, 7


class Together:
    """Two sites under all three, and a step of theirs on streams x."""

    def __init__(self) -> None:
        self.sites = torch.nn.ModuleList([random_site(DIM, N) for _ in range(2)])
        scheduler = ConnectionScheduler(self.sites, Schedule(every=1, directions=2, sample=8))
        for site in scheduler.sites:
            torch.nn.init.normal_(site.query)
        measured = Measurement(every=1, sample=TOKENS, neighbours=5, projection=6)
        self.constraint = CurvatureConstraint(self.sites, 0.9, measurement=measured, rule=Rule(res=True))
        self.told: list[dict] = []
        purifier = GradientPurifier(self.sites, 1, tell=lambda kind, **fields: self.told.append(fields))
        self.controls = [scheduler, self.constraint, purifier]
        self.number = 0

    def step(self, x: torch.Tensor, without: int | None = None) -> tuple[torch.Tensor, dict]:
        """Output and metrics; the loss leaves a token out."""
        self.number += 1
        for control in self.controls:
            control.on_step_begin(self.number)
        self.sites.zero_grad()
        for site in self.sites:
            h, merge = site(x)
            x = merge(torch.tanh(h))
        x[torch.arange(len(x)) != (len(x) if without is None else without)].float().square().sum().backward()
        row: dict = {"loss": 1.0, "grad_norm": 1.0}
        for control in self.controls:
            control.on_backward_end(self.number)
        for control in self.controls:
            control.on_step_end(self.number, row)
        return x.detach(), row


def flat(row: dict) -> list[float]:
    return [number for key in ("curvature", "gate", "priority", "damping") for site in row[key] for number in site]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_a_poisoned_token_changes_no_other_and_no_decision(dtype, poison):
    together = Together()
    for _ in range(3):
        together.step(torch.randn(TOKENS, N, DIM).to(dtype))
    x = torch.randn(TOKENS, N, DIM).to(dtype)
    bad = x.clone()
    bad[BAD, 1, 3] = poison

    def run(streams: torch.Tensor) -> torch.Tensor:
        for site in together.sites:
            h, merge = site(streams)
            streams = merge(torch.tanh(h))
        return streams.detach()

    others = torch.arange(TOKENS) != BAD
    assert torch.equal(run(bad)[others], run(x)[others])
    together.step(bad, without=BAD)
    out, row = together.step(x)
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert all(map(math.isfinite, flat(row)))
    assert {fields["correction"] for fields in together.told} == {None}  # the step's gradients were told of, not changed
    assert all(fields["path"].split(".")[0] in "01" for fields in together.told)


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_decide_nothing(tokens):
    together = Together()
    for _ in range(3):
        together.step(torch.randn(TOKENS, N, DIM))
    together.step(torch.randn(TOKENS, N, DIM))
    _, before = together.step(torch.randn(tokens, N, DIM))
    out, after = together.step(torch.randn(TOKENS, N, DIM))
    assert out.isfinite().all()
    assert after["curvature"] == before["curvature"]
    assert after["similarity"] == [[0.0] * N] * 2
    assert after["purified_paths"] == 0
