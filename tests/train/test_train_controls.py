"""The controls of a run: off is the run without them, on they act after other extensions, tell of it and resume exactly."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from built import shown

from laneway.connections.gates import FixedGate
from laneway.core import LanewayError
from laneway.rundir import RunDirectory
from laneway.train.control_config import ControlConfig
from laneway.train.controls import build_controls
from laneway.train.loop import train
from laneway.train.trained import load_trained


class Fault:
    """One matrix's gradient times ``by`` in some steps, as a faulty device would."""

    def __init__(self, steps: range, by: float = 1e4, stop_at: int = 0) -> None:
        self.steps, self.by, self.stop_at = steps, by, stop_at
        self.model: torch.nn.Module | None = None

    def attach(self, model: torch.nn.Module) -> None:
        self.model = model

    def on_step_begin(self, step: int) -> None:
        if step == self.stop_at:
            raise LanewayError("as if killed")

    def on_backward_end(self, step: int) -> None:
        if step in self.steps:
            assert self.model is not None
            self.model.blocks[1].ffn.out.weight.grad.mul_(self.by)

    def on_step_end(self, step: int, metrics: dict) -> None: ...

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None: ...


@pytest.fixture
def go():
    """A run whose fault finds the run's model."""

    def run(config, out, fault: Fault | None = None, stop: bool = False, **options):
        fault = fault or Fault(range(0))
        with shown(fault.attach), pytest.raises(LanewayError, match="as if killed") if stop else nullcontext():
            train(config, out=out, console=None, extensions=[fault], **options)

    return run


def quick(change, **control):
    model = {"layers": 3, "context": 16, "dim": 8}
    return change(
        steps=26,
        model=model,
        control=control,
        checkpoint_every=20,
        validate_every=0,
        probe_every=0,
        sample_tokens=0,
        batch_size=4,
    )


def resumed_at(path) -> list[int]:
    return [event["step"] for event in RunDirectory(path).read_events() if event["kind"] == "resume"]


def rows(path, key: str) -> list:
    return [row.get(key) for row in RunDirectory(path).read_metrics() if "loss" in row]


def test_everything_is_off_by_default():
    assert build_controls(ControlConfig(), None, 1, print) == []


@pytest.mark.parametrize("screen", ["now", "late"])
def test_a_purified_run_is_the_run_until_something_is_wrong(change, go, tmp_path, screen):
    config = quick(change, purify_every=4, purify_screen=screen)
    go(config, tmp_path / "purified", Fault(range(21, 24), stop_at=25), stop=True)
    found = rows(tmp_path / "purified", "purified_paths")
    assert found[:20] == [0] * 20
    assert found[20:24] == ([1, 1, 1, 0] if screen == "now" else [0, 1, 1, 0])
    go(config, tmp_path / "purified", Fault(range(21, 24)), resume=True)
    assert resumed_at(tmp_path / "purified") == [20]
    go(quick(change), tmp_path / "off")
    assert rows(tmp_path / "purified", "loss")[:21] == rows(tmp_path / "off", "loss")[:21]
    go(config, tmp_path / "whole", Fault(range(21, 24)))
    for key in ("loss", "grad_norm", "purified_paths"):
        assert rows(tmp_path / "purified", key) == rows(tmp_path / "whole", key)
    [event] = [event for event in RunDirectory(tmp_path / "whole").read_events() if event["kind"] == "purify"]
    assert (event["path"], event["step"]) == ("blocks.1.ffn.out", 21 if screen == "now" else 22)
    assert event["score"] >= 1
    assert event["correction"] < 1e-2


def test_a_guard_repairs_a_run_and_says_so(change, go, tmp_path):
    go(quick(change), tmp_path / "healthy")
    go(quick(change, norm_guard=3.0), tmp_path / "guarded")
    assert rows(tmp_path / "guarded", "loss") == rows(tmp_path / "healthy", "loss")
    go(quick(change, norm_guard=3.0), tmp_path / "faulty", Fault(range(22, 25)))
    assert rows(tmp_path / "faulty", "purified_paths")[20:26] == [0, 1, 1, 1, 0, 0]
    norms, healthy = (rows(tmp_path / name, "grad_norm") for name in ("faulty", "healthy"))
    assert max(norms) < 2 * max(healthy)
    told = [
        (event["step"], event["path"]) for event in RunDirectory(tmp_path / "faulty").read_events() if event["kind"] == "purify"
    ]
    assert told == [(step, "blocks.1.ffn.out") for step in (22, 23, 24)]


def test_a_guarded_run_resumes_exactly(change, go, tmp_path):
    config = quick(change, norm_guard=3.0)
    go(config, tmp_path / "whole", Fault(range(23, 25)))
    go(config, tmp_path / "parts", Fault(range(23, 25), stop_at=22), stop=True)
    go(config, tmp_path / "parts", Fault(range(23, 25)), resume=True)
    assert resumed_at(tmp_path / "parts") == [20]
    for key in ("loss", "grad_norm", "purified_paths"):
        assert rows(tmp_path / "parts", key) == rows(tmp_path / "whole", key)
    with pytest.raises(LanewayError, match=r"control\.norm_guard"):
        go(quick(change), tmp_path / "parts", Fault(range(0)), resume=True)


@pytest.mark.parametrize("control", [{"curvature": 0.3, "curvature_final": 0.9}, {"curvature": "auto"}], ids=["schedule", "auto"])
def test_a_constrained_run_resumes_exactly_and_its_weights_come_back_with_their_gates(change, go, tmp_path, control):
    config = quick(change, **control, curvature_every=2, curvature_sample=16, curvature_neighbours=4)
    go(config, tmp_path / "whole")
    go(config, tmp_path / "parts", Fault(range(0), stop_at=23), stop=True)
    trained = load_trained(tmp_path / "parts", torch.device("cpu"))
    assert "checkpoint of step 20" in trained.source
    assert trained.write("a", 4)
    go(config, tmp_path / "parts", resume=True)
    for key in ("loss", "lambda", "gate", "curvature"):
        assert rows(tmp_path / "parts", key) == rows(tmp_path / "whole", key)
    strengths = rows(tmp_path / "whole", "lambda")
    if "curvature_final" in control:
        assert strengths == sorted(strengths)
        assert strengths[-1] == pytest.approx(0.9)
        assert min(min(site) for site in rows(tmp_path / "whole", "gate")[-1]) < 1
    exported = load_trained(tmp_path / "whole", torch.device("cpu")).model
    gates = [m.gate.tolist() for m in exported.modules() if isinstance(m, FixedGate)]
    assert gates == [pytest.approx(site) for site in rows(tmp_path / "whole", "gate")[-1]]
