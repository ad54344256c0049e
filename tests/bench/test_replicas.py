"""A replica is the run of the real model alone: same losses, same weights, to rounding; and a broken one breaks no other."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from laneway.bench.replicas import Replicas, narrow_streams
from laneway.bench.stability_conditions import STREAMS
from laneway.connections import StreamProbe, constraint
from laneway.connections.control import StreamControl, attach
from laneway.connections.curvature import local_curvature
from laneway.core import InputError
from laneway.data.text import TextDataConfig
from laneway.models.gpt import GPT, GPTConfig
from laneway.train.config import OptimizerConfig, TrainConfig
from laneway.train.ranks import ranks_of_run
from laneway.train.workbench import build, seed_all

pytestmark = pytest.mark.usefixtures("one_thread")
SEEDS, STEPS, LR = (3, 11, 4), 5, 3e-3
MODEL = GPTConfig(layers=2, heads=2, dim=16, context=16)


def config(text_file, residual: str, seed: int) -> TrainConfig:
    return TrainConfig(
        model=replace(MODEL, residual=residual),
        data=TextDataConfig(path=str(text_file), cache=str(text_file.parent / "cache")),
        optimizer=OptimizerConfig(lr=LR, clip_norm=0.5),
        batch_size=2,
        validation_batches=2,
        seed=seed,
        device="cpu",
    )


def started(text_file, residual: str, seed: int, streams: str) -> GPT:
    seed_all(seed)
    model = GPT(config(text_file, residual, seed).model)
    model.chained = True
    narrow_streams(model, STREAMS[streams])
    return model


@pytest.mark.parametrize(("residual", "streams"), [("residual", "fp32"), ("mhc", "fp32"), ("hc", "fp16"), ("mhc-lite", "bf16"),
                                                   ("mhc", "fp16")])  # fmt: skip
def test_a_replica_is_the_run_alone(text_file, residual, streams):
    alone, losses, batches = [], [], []
    with ranks_of_run("cpu") as ranks:
        for seed in SEEDS:
            bench = build(config(text_file, residual, seed), ranks)
            narrow_streams(bench.parallel.model, STREAMS[streams])
            own, seen = [], []
            for _ in range(STEPS):
                seen.append(next(bench.loader))
                own.append(bench.stepper(seen[-1], LR, False, lambda: None))
            alone.append(bench)
            losses.append([(step.loss, step.grad_norm) for step in own])
            batches.append(seen)
        replicas = Replicas(
            [started(text_file, residual, seed, streams) for seed in SEEDS], config(text_file, residual, 0).optimizer
        )
        for step in range(STEPS):
            inputs, targets = (torch.stack([own[step][part] for own in batches]) for part in (0, 1))
            outcome = replicas.step(inputs, targets, LR)
            rough = 3e-5 if streams == "fp32" else 2e-2
            assert outcome.finite.all()
            assert outcome.loss.tolist() == pytest.approx([own[step][0] for own in losses], rel=rough)
            assert outcome.norm.tolist() == pytest.approx([own[step][1] for own in losses], rel=20 * rough)
        validations = [bench.evaluator.validation_loss() for bench in alone]
        inputs, targets = (torch.cat(parts) for parts in zip(*alone[0].evaluator.batches(), strict=True))
        assert replicas.loss(inputs, targets).tolist() == pytest.approx(validations, rel=1e-4 if streams == "fp32" else 2e-2)
    with torch.no_grad():
        for bench, model in zip(alone, replicas.models, strict=True):
            for name, weights in bench.parallel.model.named_parameters():
                # Adam turns a gradient that is nothing but rounding into a whole step: a part of the steps taken bounds it
                assert (weights - model.get_parameter(name)).abs().mean() < (0.02 if streams == "fp32" else 0.5) * STEPS * LR


def test_gain_is_the_probe_s(text_file):
    replicas = Replicas([started(text_file, "hc", seed, "fp32") for seed in SEEDS], OptimizerConfig(lr=LR))
    inputs, targets = torch.randint(0, 256, (2, len(SEEDS), 2, 16))
    for _ in range(3):
        outcome = replicas.step(inputs, targets, 3e-2)
    probed = []
    outcome = replicas.step(inputs, targets, 0.0)
    for model, own in zip(replicas.models, inputs, strict=True):
        with torch.no_grad(), StreamProbe(model) as probe:
            model(own)
        probed.append(probe.summary())
    for way in ("forward", "backward"):
        assert getattr(outcome, f"gain_{way}").tolist() == pytest.approx([p[f"gain_{way}"] for p in probed], rel=1e-3)


@pytest.mark.parametrize("residual", ["hc", "mhc"])
def test_a_broken_replica_stays_alone_and_is_not_updated(text_file, residual):
    def trained(poison: bool) -> tuple[Replicas, list]:
        replicas = Replicas([started(text_file, residual, seed, "fp32") for seed in SEEDS], OptimizerConfig(lr=LR))
        if poison:
            with torch.no_grad():
                replicas.models[1].get_parameter("blocks.0.ffn.out.weight").mul_(math.inf)
        generator = torch.Generator().manual_seed(5)
        steps = []
        for _ in range(3):
            inputs, targets = torch.randint(0, 256, (2, len(SEEDS), 2, 16), generator=generator)
            steps.append(replicas.step(inputs, targets, LR))
        return replicas, steps

    sound, broken = trained(False), trained(True)
    for one, other in zip(sound[1], broken[1], strict=True):
        assert other.finite.tolist() == [True, False, True]
        assert torch.equal(one.loss[[0, 2]], other.loss[[0, 2]])
    assert torch.equal(sound[0].flat[[0, 2]], broken[0].flat[[0, 2]])
    start = started(text_file, residual, SEEDS[1], "fp32")
    for name, weights in start.named_parameters():
        if name != "blocks.0.ffn.out.weight":
            assert torch.equal(broken[0].models[1].get_parameter(name), weights)


class Noting(StreamControl):
    """Keeps a number of what passed, beside its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.noted = torch.zeros(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, site, x, pre, post, res):
        self.noted.copy_(x.detach().float().mean((0, 1, 3)))
        self.calls.add_(1)
        return pre, post, res


def test_what_controls_note_comes_back_to_each_replica(text_file):
    models = [started(text_file, "mhc", seed, "fp32") for seed in SEEDS]
    controls = [attach(model, lambda site, place: Noting()) for model in models]
    replicas = Replicas(models, OptimizerConfig(lr=LR))
    inputs, targets = torch.randint(0, 256, (2, len(SEEDS), 2, 16))
    replicas.step(inputs, targets, 0.0)
    noted = [[control.noted.clone() for control in own] for own in controls]
    assert all(float(control.calls) == 1 for own in controls for control in own)
    for index, model in enumerate(replicas.models):
        model(inputs[index])
        for control, before in zip(controls[index], noted[index], strict=True):
            assert torch.allclose(control.noted, before, atol=1e-6)
            assert float(control.calls) == 2
    assert np.unique([float(own[0][0]) for own in noted]).size == len(SEEDS)


def test_models_of_one_shape_only(text_file):
    with pytest.raises(InputError, match="models"):
        Replicas([], OptimizerConfig())
    with pytest.raises(InputError, match="one shape"):
        Replicas([started(text_file, "mhc", 0, "fp32"), started(text_file, "hc", 0, "fp32")], OptimizerConfig())


def test_a_replica_s_curvature_is_the_run_s_alone(text_file, monkeypatch):
    """Also in how many tokens it looks at, which hangs on the size of the batch."""
    monkeypatch.setattr(constraint, "TOKENS", 1)
    monkeypatch.setattr(constraint, "FEWEST", 1)
    measurement = constraint.Measurement(sample=64, neighbours=5)
    strides: list[int] = []
    monkeypatch.setattr(constraint, "local_curvature", lambda p, k, s: strides.append(s) or local_curvature(p, k, s))
    models = [started(text_file, "mhc", seed, "fp32") for seed in SEEDS]
    together = [constraint.CurvatureConstraint(model, measurement=measurement) for model in models]
    alone = [constraint.CurvatureConstraint(copy.deepcopy(model), measurement=measurement) for model in models]
    replicas = Replicas(models, OptimizerConfig(lr=LR))
    inputs, targets = torch.randint(0, 256, (2, len(SEEDS), 2, 16))
    for each in (*together, *alone):
        each.on_step_begin(1)
    replicas.step(inputs, targets, 0.0)
    for index, (one, other) in enumerate(zip(together, alone, strict=True)):
        other.model(inputs[index])
        one.on_backward_end(1)
        other.on_backward_end(1)
        torch.testing.assert_close(one.statistics(), other.statistics(), rtol=1e-3, atol=1e-4)
    assert strides == [2] * 2 * len(SEEDS)  # 32 tokens of a batch
