"""`--compile` changes the speed and not the curve; validation, probes and samples go on beside it."""

import shutil

import pytest
import torch

from laneway.core import LanewayError
from laneway.rundir import RunDirectory
from laneway.train.loop import train


def column(folder, key):
    return [row[key] for row in RunDirectory(folder).read_metrics() if key in row]


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["residual", "mhc"])
@pytest.mark.filterwarnings("default")  # inductor's own
@pytest.mark.compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_the_curve_is_the_eager_one(change, tmp_path, residual):
    torch._dynamo.reset()
    changes = {"steps": 6, "validate_every": 3, "probe_every": 3, "model": {"residual": residual}}
    train(change(**changes), out=tmp_path / "eager", console=None)
    train(change(**changes, compile=True), out=tmp_path / "compiled", console=None)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] >= 1  # something was compiled …
    assert not counters["graph_break"]  # … in whole blocks
    for key in ("loss", "val_loss"):
        assert column(tmp_path / "compiled", key) == pytest.approx(column(tmp_path / "eager", key), rel=1e-4)


def test_without_a_compiler_it_says_so(change, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(LanewayError, match=r"needs a C\+\+ compiler .* leave --compile out"):
        train(change(compile=True), out=tmp_path / "run", console=None)
    assert not (tmp_path / "run").exists()
