"""Two processes train the curve of one: DDP and FSDP2, with and without accumulation, on the same global batches; and go on."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from launch import CURVES, TRAIN, torchrun

from laneway.checkpoint import CheckpointStore, load_export
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.loop import train
from laneway.train.settings import to_toml

pytestmark = pytest.mark.distributed

EXACT = ["ddp", "ddp-accumulating", "fsdp", "fsdp-accumulating", "fsdp-checkpointing"]


@pytest.fixture(scope="module")
def curves(small: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of one process (``one``) and one run for each way of two."""
    folder = tmp_path_factory.mktemp("curves")
    (folder / "c.toml").write_text(to_toml(small))
    train(small, out=folder / "one", console=None)
    torchrun(2, CURVES, "c.toml", ".", cwd=folder)
    return folder


def column(folder: Path, key: str) -> list[float]:
    return [row[key] for row in RunDirectory(folder).read_metrics() if key in row]


@pytest.mark.parametrize("way", EXACT)
@pytest.mark.parametrize("key", ["loss", "grad_norm", "val_loss"])
def test_the_curve_is_that_of_one_process(curves, way, key):
    """To rounding: fp32 sums in another order, carried through ten steps of AdamW."""
    expected = column(curves / "one", key)
    assert len(expected) == (2 if key == "val_loss" else 10)
    assert column(curves / way, key) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("way", EXACT)
def test_the_weights_are_those_of_one_process(curves, way):
    expected, _ = load_export(curves / "one" / "export")
    found, _ = load_export(curves / way / "export")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-3 * tensor.norm() + 1e-6, name


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("key", ["loss", "grad_norm", "val_loss"])
def test_managed_memory_changes_no_bit(curves, kind, key):
    """With a budget that nothing fits in, so that everything moves."""
    assert column(curves / f"{kind}-memory", key) == column(curves / f"{kind}-accumulating", key)
    assert sum(column(curves / f"{kind}-memory", "memory_bytes_out")) > 0


def test_a_wrong_scale_would_show(curves):
    """The curves move enough that a gradient twice or half as large could not pass for rounding."""
    losses, norms = column(curves / "one", "loss"), column(curves / "one", "grad_norm")
    assert losses[0] - losses[-1] > 0.5
    assert min(norms) > 0.1


@pytest.mark.parametrize("way", ["ddp-bf16", "fsdp-bf16"])
def test_bf16_follows_the_curve_roughly(curves, way):
    losses = column(curves / way, "loss")
    assert losses != column(curves / "one", "loss")
    assert losses == pytest.approx(column(curves / "one", "loss"), rel=0.03)


def test_the_maps_stay_wide_under_mixed_precision(curves):
    facts = json.loads((curves / "facts.json").read_text())
    for way in facts.values():
        way.pop("buckets", None)
    assert facts["fsdp"] == {"maps": "torch.float32", "streams": "torch.float32", "ffn": "torch.float32"}
    assert facts["fsdp-bf16"] == {"maps": "torch.float32", "streams": "torch.bfloat16", "ffn": "torch.bfloat16"}
    assert (facts["ddp-bf16"]["maps"], facts["ddp-bf16"]["ffn"]) == ("torch.float32", "torch.bfloat16")


def test_accumulation_reduces_once_a_step(curves):
    facts = json.loads((curves / "facts.json").read_text())
    assert facts["ddp"]["buckets"] == facts["ddp-accumulating"]["buckets"] >= 10


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_every_rank_has_its_rows_and_the_same_losses(curves, way):
    run = RunDirectory(curves / way)
    first, second = run.read_metrics(0), run.read_metrics(1)
    assert [row["loss"] for row in first] == [row["loss"] for row in second]
    assert [row["grad_norm"] for row in first] == [row["grad_norm"] for row in second]
    assert all(row["peak_bytes"] > 0 and row["step_ms"] > 0 for row in second)
    assert all(math.isfinite(row["gain_forward"]) for row in first if "gain_forward" in row)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_shared_files_are_written_once(curves, way):
    kinds = [event["kind"] for event in RunDirectory(curves / way).read_events()]
    assert kinds == ["start", "sample", "checkpoint", "checkpoint", "sample", "finish"]
    samples = [
        [event["text"] for event in RunDirectory(curves / name).read_events() if event["kind"] == "sample"]
        for name in (way, "one")
    ]
    assert samples[0] == samples[1]


def cut_to(run: Path, step: int) -> None:
    """What the run directory looked like right after the checkpoint of ``step``, had the processes been killed then."""
    store = CheckpointStore(RunDirectory(run))
    for later in [found for found in store.steps() if found > step]:
        shutil.rmtree(store.folder(later))
    assert store.latest_step() == step


def test_a_resumed_run_of_two_ranks_is_exact_and_prints_one_json_object(curves, small, tmp_path):
    """From the command line, in the run's own way."""
    shutil.copytree(curves / "ddp", tmp_path / "run")
    cut_to(tmp_path / "run", 5)
    (tmp_path / "c.toml").write_text(to_toml(small))
    done = torchrun(2, *TRAIN, "--parallel", "ddp", "--out", "run", "--json", "--resume", cwd=tmp_path)
    result: dict[str, Any] = json.loads(done.stdout)
    assert (result["run"], result["steps"]) == ("run", small.steps)
    assert done.stderr.count("step 10/10") == 1  # the other rank keeps silent
    for key in ("loss", "grad_norm", "val_loss"):
        assert column(tmp_path / "run", key) == column(curves / "ddp", key)
    assert result["val_loss"] == column(curves / "ddp", "val_loss")[-1]
    assert ("resume", 5) in [(event["kind"], event["step"]) for event in RunDirectory(tmp_path / "run").read_events()]
    expected, _ = load_export(curves / "ddp" / "export")
    found, _ = load_export(tmp_path / "run" / "export")
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


def test_one_rank_goes_on_where_two_sharded_ones_stopped(curves, small, tmp_path):
    shutil.copytree(curves / "fsdp", tmp_path / "run")
    cut_to(tmp_path / "run", 5)
    alone = dataclasses.replace(small, parallel="none")
    result = train(alone, out=tmp_path / "run", resume=True, console=None)
    assert column(tmp_path / "run", "loss") == pytest.approx(column(curves / "one", "loss"), rel=2e-5)
    assert result.steps == 10
