"""A run with the scheduler of streams in its configuration: resumed exactly, exported with its parameters, told in its rows."""

from __future__ import annotations

import math

import pytest
import torch
from built import Stops

from laneway.connections.gates import FixedGate
from laneway.connections.schedule import schedulers
from laneway.core import InputError, LanewayError
from laneway.rundir import RunDirectory
from laneway.train.loop import train
from laneway.train.trained import load_trained

KEYS = ("priority", "read_priority", "similarity", "damping")


def quick(change, **fields):
    looks = {"checkpoint_every": 6, "validate_every": 0, "probe_every": 0, "sample_tokens": 0}
    model = {"layers": 2, "context": 16, "dim": 8}
    control = {"scheduler": True, "scheduler_every": 3, "scheduler_temperature": 0.5}
    return change(**{"steps": 10, "batch_size": 4, "model": model, "control": control} | looks | fields)


def rows(path, *keys):
    return [[row.get(key) for key in keys] for row in RunDirectory(path).read_metrics() if "loss" in row]


def test_a_scheduled_run_resumes_tells_and_comes_back(change, tmp_path):
    config = quick(change)
    train(config, out=tmp_path / "whole", console=None, extensions=[Stops()])
    with pytest.raises(LanewayError, match="as if killed"):
        train(config, out=tmp_path / "parts", console=None, extensions=[Stops(8)])
    train(config, out=tmp_path / "parts", console=None, resume=True, extensions=[Stops()])
    found = rows(tmp_path / "whole", "loss", "grad_norm", *KEYS)
    assert rows(tmp_path / "parts", "loss", "grad_norm", *KEYS) == found
    assert found[0][2:] == [None] * 4
    assert all(math.isfinite(number) and 0 <= number <= 1 for part in found[-1][2:] for site in part for number in site)
    model = load_trained(tmp_path / "whole", torch.device("cpu")).model
    assert len(schedulers(model)) == 4
    assert all(site.demand.abs().sum() > 0 for site in schedulers(model))
    (tmp_path / "whole" / "export" / "config.json").unlink()
    again = load_trained(tmp_path / "whole", torch.device("cpu")).model
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def test_a_run_with_all_controls_comes_back_from_its_export_as_from_its_checkpoint(change, tmp_path):
    """Gates that stand behind a scheduler at each site."""
    both = {"scheduler": True, "curvature": 0.9, "curvature_every": 2, "curvature_sample": 24, "curvature_neighbours": 5}
    train(quick(change, control=both | {"scheduler_every": 2}), out=tmp_path / "run", console=None)
    models = [load_trained(tmp_path / "run", torch.device("cpu"))]
    (tmp_path / "run" / "export" / "config.json").unlink()
    models.append(load_trained(tmp_path / "run", torch.device("cpu")))
    assert "export" in models[0].source
    assert "checkpoint" in models[1].source
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    outputs = [each.model(tokens) for each in models]
    assert torch.equal(*outputs)
    [last] = rows(tmp_path / "run", "gate")[-1]
    gates = [part.gate.tolist() for part in models[0].model.modules() if isinstance(part, FixedGate)]
    assert gates == [pytest.approx(site) for site in last]


def test_off_is_the_run_without(change, tmp_path):
    train(quick(change, control={"scheduler": False, "scheduler_floor": 0.1}, steps=3), out=tmp_path / "a", console=None)
    train(quick(change, control={}, steps=3), out=tmp_path / "b", console=None)
    assert rows(tmp_path / "a", "loss", "grad_norm", *KEYS) == rows(tmp_path / "b", "loss", "grad_norm", *KEYS)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"control": {"scheduler_temperature": 0.0}}, "control.scheduler_temperature"),
        ({"control": {"scheduler": True, "scheduler_floor": 0.25}}, "control.scheduler_floor"),
        ({"control": {"scheduler_form": "add"}}, "control.scheduler_form"),
        ({"control": {"scheduler": True}, "model": {"streams": 1}}, "control.scheduler"),
        ({"control": {"scheduler": True}, "model": {"residual": "residual"}}, "control.scheduler"),
    ],
)
def test_a_wrong_field_is_named(change, fields, name):
    with pytest.raises(InputError) as caught:
        change(**fields).check()
    assert caught.value.field == name
