"""Curvature, scheduler and purification in one run over narrow streams: resumed exactly, made again, compiled."""

from __future__ import annotations

import shutil
from contextlib import nullcontext

import pytest
import torch
from built import Stops

from laneway.core import LanewayError
from laneway.rundir import RunDirectory
from laneway.train.loop import train

CONTROL = {
    "curvature": 0.9,
    "curvature_every": 2,
    "curvature_sample": 16,
    "curvature_neighbours": 4,
    "scheduler": True,
    "scheduler_every": 2,
    "scheduler_temperature": 0.5,
    "purify_every": 2,
    "purify_sample": 64,
}
KEYS = (
    "loss",
    "grad_norm",
    "lambda",
    "gate",
    "curvature",
    "priority",
    "read_priority",
    "similarity",
    "damping",
    "purified_paths",
)


def quick(change, **fields):
    looks = {"checkpoint_every": 4, "validate_every": 0, "probe_every": 0, "sample_tokens": 0}
    model = {"layers": 1, "context": 16, "dim": 8}
    return change(**{"steps": 7, "batch_size": 4, "micro_batch_size": 2, "model": model, "control": CONTROL} | looks | fields)


def rows(path, *keys):
    return [[row.get(key) for key in keys] for row in RunDirectory(path).read_metrics() if "loss" in row]


def go(config, out, at: int = 0, **options):
    with pytest.raises(LanewayError, match="as if killed") if at else nullcontext():
        train(config, out=out, console=None, extensions=[Stops(at)], **options)


@pytest.mark.parametrize("again", [{"recompute_streams": True}, {"activation_checkpointing": True}], ids=["streams", "blocks"])
def test_a_run_under_all_controls_resumes_exactly(change, tmp_path, again):
    config = quick(change, precision="bf16", **again)
    go(config, tmp_path / "whole")
    go(config, tmp_path / "parts", at=6)
    go(config, tmp_path / "parts", resume=True)
    found = rows(tmp_path / "whole", *KEYS)
    assert rows(tmp_path / "parts", *KEYS) == found
    assert all(value is not None for value in found[-1])
    assert min(min(site) for site in found[-1][3]) < 1


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.filterwarnings("default")  # inductor's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_run_under_all_controls_has_the_eager_curve(change, tmp_path):
    torch._dynamo.reset()
    go(quick(change), tmp_path / "eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # a step has few kinds: measured or not, gates or none
        go(quick(change, compile=True), tmp_path / "compiled")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert not torch._dynamo.utils.counters["graph_break"]
    for eager, compiled in zip(
        rows(tmp_path / "eager", "loss", "lambda"), rows(tmp_path / "compiled", "loss", "lambda"), strict=True
    ):
        assert compiled == pytest.approx(eager, rel=1e-3)
    for key in ("gate", "priority", "similarity"):
        pairs = zip(rows(tmp_path / "eager", key), rows(tmp_path / "compiled", key), strict=True)
        for [eager], [compiled] in pairs:
            assert (eager is None) is (compiled is None)
            if eager is not None:
                torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager), rtol=2e-2, atol=2e-2)
