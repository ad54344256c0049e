"""`laneway validate`: every problem of a file at once, or what the run would come to."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from laneway.cli import main
from laneway.cli.validate import summarise
from laneway.connections.scheduler import ConnectionScheduler
from laneway.models.gpt import GPT
from laneway.recipes import RECIPES
from laneway.train.control_config import ControlConfig
from laneway.train.controls import with_control
from laneway.train.settings import to_toml

BAD = """
stepz = 3
batch_size = 0
precision = 3
[model]
streams = -2
residual = "mch"
[data]
validation_fraction = 3
path = "nope"
[optimizr]
lr = 3
"""

NAMES = [
    "stepz",
    "precision",
    "data.validation_fraction",
    "optimizr",
    "model.streams",
    "model.residual",
    "batch_size",
    "data.path",
]


@pytest.fixture
def bad(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text(BAD)
    return "bad.toml"


def test_every_problem_has_its_line(bad, capsys):
    assert main(["validate", "--config", bad]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert [line.split(": ")[1] for line in lines] == NAMES
    assert "did you mean 'mhc'?" in lines[NAMES.index("model.residual")]
    assert "did you mean 'optimizer'?" in lines[NAMES.index("optimizr")]


def test_json_has_the_same_problems(bad, capsys):
    assert main(["validate", "--config", bad, "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.err == ""
    found = json.loads(shown.out)
    assert not found["ok"]
    assert found["summary"] == {}
    assert [problem["field"] for problem in found["problems"]] == NAMES
    assert found["problems"][0] | {"accepted": ""} == {
        "field": "stepz",
        "given": 3,
        "accepted": "",
        "hint": "did you mean 'steps'?",
    }


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_fine(name, capsys, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(to_toml(RECIPES[name]()))
    assert main(["validate", name, "--config", str(path)]) == 0
    assert "parameters" in capsys.readouterr().out
    assert main(["validate", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["problems"] == []
    assert found["summary"] == summarise(RECIPES[name]())


def test_the_summary_is_counted():
    config = RECIPES["tiny"]()
    parameters = sum(p.numel() for p in GPT(config.model).parameters())
    tokens = config.batch_size * config.model.context
    assert summarise(config) == {
        "parameters": parameters,
        "tokens_per_step": tokens,
        "tokens": tokens * config.steps,
        "state_bytes": 16 * parameters,
    }


def test_the_states_take_what_is_estimated():
    """Parameters, gradients and both moments of AdamW, measured on the real objects."""
    config = RECIPES["tiny"]()
    model = GPT(config.model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert sum(t.numel() * t.element_size() for t in tensors) == pytest.approx(summarise(config)["state_bytes"], rel=1e-3)


def test_gpt2_124m_has_its_size():
    assert summarise(RECIPES["gpt2-124m"]())["parameters"] == pytest.approx(124e6, rel=0.02)


def test_the_number_of_ranks_counts(capsys):
    assert main(["validate", "--ranks", "7"]) == 2
    assert "a multiple of the 7 ranks" in capsys.readouterr().err
    assert main(["validate", "--ranks", "0"]) == 2
    assert "ranks: got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [(["tinny"], "did you mean 'tiny'?"), (["--config", "none.toml"], "No such file"), (["--confg", "x"], "--config")],
)
def test_bad_flags_are_one_line(capsys, args, words):
    assert main(["validate", *args]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert words in shown


def test_help(capsys):
    with pytest.raises(SystemExit) as leave:
        main(["validate", "--help"])
    assert leave.value.code == 0
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("RECIPE", "--config", "--ranks", "--json"))


def test_the_parameters_of_a_scheduler_count():
    config = replace(RECIPES["tiny"](), control=ControlConfig(scheduler=True))
    model = with_control(GPT(config.model), config.control)
    assert summarise(config)["parameters"] == sum(p.numel() for p in model.parameters())
    assert summarise(config)["parameters"] == summarise(RECIPES["tiny"]())["parameters"] + ConnectionScheduler(model).parameters
