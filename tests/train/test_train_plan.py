"""``laneway train --plan``: a written plan sets the run's layout, is kept beside it and drawn in its report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from laneway.cli import main
from laneway.core import InputError
from laneway.models.gpt import GPT
from laneway.recipes import RECIPES
from laneway.rundir import RunDirectory
from laneway.strategy.auto import auto_config
from laneway.strategy.strategy import Strategy
from laneway.train.plan import apply_plan, architecture_of, check_world

TINY = RECIPES["tiny"]()
SHORT = ["--steps", "2", "--batch-size", "8", "--probe-every", "0", "--validation-batches", "1", "--sample-tokens", "0"]


def planned(topology: str = "1xCPU", **options: object) -> Strategy:
    asked = {"seq_len": TINY.model.context, "global_batch": TINY.batch_size, "precision": "fp32"} | options
    return auto_config(hardware_topology=topology, arch=architecture_of(TINY.model), **asked)  # type: ignore[arg-type]


def test_a_plan_knows_the_size_of_our_model() -> None:
    """The cost model's count and the model's own, connections included."""
    from laneway.cluster.costs import parameters_of

    for residual in ("residual", "mhc"):
        config = replace(TINY.model, residual=residual)
        actual = sum(p.numel() for p in GPT(config).parameters())
        assert parameters_of(architecture_of(config)) == pytest.approx(actual, rel=0.01)


@pytest.mark.parametrize(("residual", "dim", "layers"), [("mhc", 32, 3), ("mhc", 8, 1), ("residual", 32, 2)])
def test_a_plan_counts_what_the_scheduler_adds_exactly(residual: str, dim: int, layers: int) -> None:
    """As the run's model has it, at any width; in the plan's bytes and in the model that a dry run wraps too."""
    from laneway.cluster.costs import parameters_of
    from laneway.cluster.costs.memory import parameters_on_device
    from laneway.cluster.layout import Layout
    from laneway.strategy.decoder import decoder
    from laneway.train.control_config import ControlConfig
    from laneway.train.controls import with_control

    config = replace(TINY.model, dim=dim, heads=2, layers=layers, residual=residual)
    controls = [ControlConfig(), ControlConfig(scheduler=residual == "mhc")]
    archs = [architecture_of(config, control) for control in controls]
    built = [sum(p.numel() for p in with_control(GPT(config), control).parameters()) for control in controls]
    added = built[1] - built[0]
    assert (added > 0) is (residual == "mhc")
    assert parameters_of(archs[1]) - parameters_of(archs[0]) == added
    assert sum(parameters_on_device(archs[1], Layout())) - sum(parameters_on_device(archs[0], Layout())) == added
    wrapped = [sum(p.numel() for p in decoder(arch).parameters()) for arch in archs]
    assert wrapped == built


def test_a_plan_without_the_runs_scheduler_is_refused() -> None:
    from laneway.train.control_config import ControlConfig

    with pytest.raises(InputError, match=r"^plan: got 'scheduler=0'; accepted: a plan for a model with scheduler=16; plan for"):
        apply_plan(planned(), replace(TINY, control=ControlConfig(scheduler=True)))


def test_one_process_trains_by_its_plan_and_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, run = tmp_path / "plan.toml", tmp_path / "run"
    assert main(["plan", "--recipe", "tiny", "--topology", "1xCPU", "--global-batch", "8", "--write", str(plan), "--json"]) == 0
    capsys.readouterr()
    assert main(["train", "tiny", "--plan", str(plan), "--out", str(run), "--json", *SHORT]) == 0
    directory = RunDirectory.open(run)
    assert Strategy.load(directory.plan) == Strategy.load(plan)
    written = directory.read_config()
    assert written["micro_batch_size"] == Strategy.load(plan).layout.micro_batch
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert 'id="plan"' in page
    assert "parameters on 1 × CPU" in page


def test_what_a_plan_sets() -> None:
    plan = planned("4xCPU_1node", fixed={"tp": 1, "pp": 1, "dp_shard": 4})
    changed = apply_plan(plan, TINY)
    assert (changed.parallel, changed.micro_batch_size) == ("fsdp", plan.layout.micro_batch)
    assert changed.activation_checkpointing is (plan.layout.recompute == "full")
    replicated = planned("4xCPU_1node", fixed={"tp": 1, "pp": 1, "dp_shard": 1})
    assert apply_plan(replicated, TINY).parallel == "ddp"


@pytest.mark.parametrize("field", ["layers", "streams", "hidden"])
def test_a_plan_for_another_model_is_refused(field: str) -> None:
    plan = planned()
    other = replace(plan, arch=replace(plan.arch, **{field: 2 * getattr(plan.arch, field)}))
    with pytest.raises(InputError, match=f"^plan: got '{field}="):
        apply_plan(other, TINY)


def test_degrees_that_the_loop_does_not_apply_are_refused() -> None:
    with pytest.raises(InputError, match=r"^plan: got 'pp=2'.*wrap_model"):
        apply_plan(planned("2xCPU_1node", fixed={"pp": 2}), TINY)


def test_another_number_of_processes_is_refused() -> None:
    with pytest.raises(InputError, match=r"^plan: got '1 ranks'; accepted: a plan for the 3 processes"):
        check_world(planned(), 3)


def test_a_flag_against_the_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned().save(tmp_path / "plan.toml")
    assert main(["train", "tiny", "--plan", str(plan), "--out", str(tmp_path / "run"), "--batch-size", "4"]) == 2
    assert capsys.readouterr().err.startswith("laneway train: batch_size: got 4")
    assert not (tmp_path / "run").exists()
