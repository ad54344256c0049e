"""The cheaper options of a run, write strength and fixed priorities: what they multiply, resumed, exported, refused."""

from __future__ import annotations

import json

import pytest
import torch

from laneway.connections.control import control_parts, controlled_sites
from laneway.connections.gates import FixedGate
from laneway.connections.schedule import FixedPriorities
from laneway.core import InputError, collect
from laneway.models.gpt import GPT, GPTConfig
from laneway.rundir import RunDirectory
from laneway.train.control_config import ControlConfig
from laneway.train.controls import with_control
from laneway.train.loop import train
from laneway.train.settings import merge
from laneway.train.trained import load_trained

BOTH = {"write_strength": 0.7, "priorities": (0.4, 0.3, 0.2, 0.1)}


def quick(change, **fields):
    looks = {"checkpoint_every": 3, "validate_every": 0, "probe_every": 0, "sample_tokens": 0}
    model = {"layers": 2, "context": 16, "dim": 8}
    return change(**{"steps": 6, "batch_size": 4, "model": model} | looks | fields)


def losses(path):
    return [row["loss"] for row in RunDirectory(path).read_metrics() if "loss" in row]


def test_a_run_with_both_comes_back_from_export_and_checkpoint(change, tmp_path):
    train(quick(change), out=tmp_path / "plain", console=None)
    train(quick(change, control=BOTH), out=tmp_path / "run", console=None)
    assert losses(tmp_path / "run") != losses(tmp_path / "plain")
    exported = load_trained(tmp_path / "run", torch.device("cpu")).model
    described = json.loads((tmp_path / "run" / "export" / "config.json").read_text("utf-8"))
    assert described["control"]["priorities"] == list(BOTH["priorities"])
    (tmp_path / "run" / "export" / "config.json").unlink()
    saved = load_trained(tmp_path / "run", torch.device("cpu")).model
    tokens = torch.randint(0, 256, (2, 16))
    with torch.no_grad():
        assert torch.equal(exported(tokens), saved(tokens))
    for model in (exported, saved):
        for site in controlled_sites(model):
            shares, gate = control_parts(site.control)
            assert isinstance(shares, FixedPriorities)
            assert isinstance(gate, FixedGate)
            assert torch.equal(gate.gate, torch.full((4,), 0.7))
            assert torch.allclose(shares.priority, 4 * torch.tensor(BOTH["priorities"]))


def test_one_and_even_shares_are_the_plain_model_bit_for_bit():
    torch.manual_seed(0)
    config = GPTConfig(layers=2, context=16, dim=8)
    plain = GPT(config)
    other = GPT(config)
    other.load_state_dict(plain.state_dict())
    assert with_control(other, ControlConfig()) is other
    assert all(site.control is None for site in controlled_sites(other))
    with_control(other, ControlConfig(priorities=(1.0, 1.0, 1.0, 1.0)))
    tokens = torch.randint(0, 256, (2, 16))
    assert torch.equal(plain(tokens), other(tokens))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"write_strength": 0.0}, "above 0"),
        ({"write_strength": 1.5}, "up to 1"),
        ({"write_strength": float("nan")}, "above 0"),
        ({"write_strength": 0.8, "curvature": 0.3}, "beside curvature"),
        ({"priorities": (0.5, 0.5)}, "each of 4 streams"),
        ({"priorities": (1.0, 1.0, 1.0, -1.0)}, "> 0 for each"),
        ({"priorities": (1.0, 1.0, 1.0, float("inf"))}, "> 0 for each"),
        ({"priorities": BOTH["priorities"], "scheduler": True}, "beside the scheduler"),
    ],
)
def test_bad_values_are_named(fields, words):
    config = ControlConfig(**fields)
    problems = config.problems() or collect([lambda: config.check_model(GPTConfig())])
    assert words in str(problems[0])
    assert problems[0].field in {f"control.{name}" for name in fields}


def test_one_stream_is_refused():
    for fields in ({"write_strength": 0.8}, {"priorities": (1.0,)}):
        with pytest.raises(InputError, match="streams ≥ 2"):
            ControlConfig(**fields).check_model(GPTConfig(residual="residual"))


def test_shares_come_from_a_file_as_a_list():
    config, problems = merge(ControlConfig(), {"priorities": [0.4, 0.2, 0.2, 0.2]})
    assert not problems
    assert tuple(config.priorities) == (0.4, 0.2, 0.2, 0.2)
    _, problems = merge(ControlConfig(), {"priorities": "many"})
    assert problems
