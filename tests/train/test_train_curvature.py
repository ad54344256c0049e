"""A run under the curvature constraint, through the loop: strength zero, resuming, its rows, what it leaves behind."""

from __future__ import annotations

import pytest
import torch
from built import Stops

import laneway.train.loop as loop
from laneway.checkpoint import load_export
from laneway.connections.constraint import CurvatureConstraint, Measurement
from laneway.connections.gates import restore_gates
from laneway.core import LanewayError
from laneway.models.gpt import GPT, GPTConfig
from laneway.rundir import RunDirectory

QUICK = Measurement(every=2, sample=24, neighbours=5, projection=6, window=4)


@pytest.fixture
def go(monkeypatch, change):
    """A run of twenty steps with a control of this strength (None: without)."""

    def run(out, strength, killed=0, **options):
        def controls(config, parallel, steps, tell):
            if strength is None:
                return []
            constraint = CurvatureConstraint(parallel.model, strength, measurement=QUICK)
            for _ in range(3):  # nearly flat, so that the real measurements close the gates
                constraint.apply_statistics({"curvature": torch.tensor([0.05, 1]).repeat_interleave(16)})
            return [constraint]

        with monkeypatch.context() as patch:
            patch.setattr(loop, "build_controls", controls)
            config = change(validate_every=0, sample_tokens=0, probe_every=0, log_every=1)
            return loop.train(config, out=out, console=None, extensions=[Stops(killed)], **options)

    return run


def rows(path, *keys):
    return [[row.get(key) for key in keys] for row in RunDirectory(path).read_metrics() if "loss" in row]


def test_at_strength_zero_the_run_is_the_run_without(go, tmp_path):
    go(tmp_path / "plain", None)
    go(tmp_path / "zero", 0.0)
    assert rows(tmp_path / "zero", "loss", "grad_norm") == rows(tmp_path / "plain", "loss", "grad_norm")
    curvature, gate, strength = rows(tmp_path / "zero", "curvature", "gate", "lambda")[-1]
    assert [len(site) for site in curvature] == [len(site) for site in gate] == [4] * 4
    assert strength == 0


def test_a_gated_run_resumes_exactly_and_its_export_holds_the_gates(go, tmp_path):
    go(tmp_path / "whole", 1.0)
    with pytest.raises(LanewayError, match="as if killed"):
        go(tmp_path / "parts", 1.0, killed=13)
    go(tmp_path / "parts", 1.0, resume=True)
    keys = ("loss", "grad_norm", "curvature", "gate", "lambda")
    assert rows(tmp_path / "parts", *keys) == rows(tmp_path / "whole", *keys)
    last = rows(tmp_path / "whole", "gate")[-1][0]
    assert min(min(site) for site in last) < 1

    state, described = load_export(tmp_path / "whole" / "export")
    model = GPT(GPTConfig(**described["model"]))
    assert restore_gates(model, state) == 4
    model.load_state_dict(state)
    torch.testing.assert_close(model.blocks[1].site_ffn.control.gate, torch.tensor(last[3]), rtol=1e-5, atol=1e-5)
