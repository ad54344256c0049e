"""The loop from the outside: what a run leaves behind, in which order things happen, and how it ends when it must."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from laneway.checkpoint import CheckpointStore, load_export
from laneway.core import Extension, InputError, LanewayError
from laneway.models.gpt import GPT, GPTConfig
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.loop import TrainResult, train
from laneway.train.resume import saved_config
from laneway.train.settings import to_toml
from laneway.train.trained import load_trained


class Recorder:
    """An extension that writes down every call and adds a figure of its own."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.total = 0

    def on_step_begin(self, step: int) -> None:
        self.calls.append(("begin", step))

    def on_backward_end(self, step: int) -> None:
        self.calls.append(("backward", step))

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        self.calls.append(("end", step))
        self.total += step
        metrics["total"] = self.total

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def quiet(config: TrainConfig, out: Path, **options: Any) -> TrainResult:
    return train(config, out=out, console=None, **options)


def rows(folder: Path) -> list[dict[str, Any]]:
    return RunDirectory(folder).read_metrics()


def kinds(folder: Path) -> list[str]:
    return [event["kind"] for event in RunDirectory(folder).read_events()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text_file) -> tuple[Path, TrainConfig, TrainResult]:
    """One complete run that several tests look at."""
    from laneway.data.text import TextDataConfig
    from laneway.train.config import OptimizerConfig

    config = TrainConfig(
        model=GPTConfig(context=32, layers=2, heads=2, dim=16, streams=4),
        data=TextDataConfig(path=str(text_file), cache=str(text_file.parent / "cache"), validation_fraction=0.2),
        optimizer=OptimizerConfig(lr=1e-2, warmup=0.1),
        steps=40,
        batch_size=8,
        device="cpu",
        log_every=2,
        validate_every=16,
        checkpoint_every=15,
        probe_every=9,
        sample_prompt="the ",
        sample_tokens=12,
    )
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, config, quiet(config, folder)


def test_a_run_learns(finished):
    folder, _, result = finished
    first, last = rows(folder)[0]["loss"], rows(folder)[-1]["loss"]
    assert first == pytest.approx(math.log(256), abs=0.2)  # a fresh network knows nothing
    assert last < first - 1.5
    assert result.val_loss == pytest.approx(last, abs=0.3)
    assert result.val_bits_per_byte == pytest.approx(result.val_loss / math.log(2))


def test_rows_are_written_where_something_is_due(finished):
    folder, _, _ = finished
    written = [row["step"] for row in rows(folder)]
    assert written == sorted({1, 9, 27, *range(2, 41, 2)})
    assert [row["step"] for row in rows(folder) if "gain_forward" in row] == [1, 9, 18, 27, 36, 40]
    assert [row["step"] for row in rows(folder) if "val_loss" in row] == [16, 32, 40]


def test_rows_have_what_the_contract_names(finished):
    folder, config, _ = finished
    for row in rows(folder):
        assert row.keys() >= {"step", "time", "loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_s", "step_ms", "peak_bytes"}
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2))
        assert row["tokens_per_s"] == pytest.approx(8 * 32 / row["step_ms"] * 1000)
        assert 0 < row["lr"] <= config.optimizer.lr
    probed = rows(folder)[0]
    assert {"gain_backward", "sinkhorn_error", "collapse", "res_entropy"} <= probed.keys()
    assert len(probed["site_gain_forward"]) == config.model.sites


def test_events_tell_the_run(finished):
    folder, _, result = finished
    assert kinds(folder) == ["start", "checkpoint", "sample", "checkpoint", "sample", "checkpoint", "sample", "finish"]
    events = RunDirectory(folder).read_events()
    assert [event["step"] for event in events] == [0, 15, 16, 30, 32, 40, 40, 40]
    assert events[-1]["val_loss"] == result.val_loss
    assert events[-1]["val_bits_per_byte"] == result.val_bits_per_byte
    assert events[0]["world_size"] == 1
    samples = [event for event in events if event["kind"] == "sample"]
    assert {sample["prompt"] for sample in samples} == {"the "}
    assert [len(sample["text"].encode()) >= length for sample, length in zip(samples, [3, 3, 12], strict=True)] == [True] * 3


def test_the_configuration_is_complete(finished):
    folder, config, _ = finished
    assert saved_config(RunDirectory(folder)) == config


def test_the_environment_is_described(finished):
    folder, _, _ = finished
    env = RunDirectory(folder).read_env()
    assert env["torch"] == torch.__version__
    assert env.keys() >= {"laneway", "python", "system", "cpu", "cores", "threads", "memory_bytes", "device", "command"}


def test_two_checkpoints_are_kept(finished):
    folder, config, _ = finished
    store = CheckpointStore(RunDirectory(folder), config.keep_checkpoints)
    assert store.steps() == [30, 40]
    assert RunDirectory(folder).latest.read_text().strip() == "step_00000040"


def test_the_export_is_the_model(finished):
    folder, config, result = finished
    tensors, described = load_export(folder / "export")
    assert GPTConfig(**described["model"]) == config.model
    model = GPT(config.model)
    model.load_state_dict(tensors)
    assert load_trained(folder, torch.device("cpu")).model.state_dict().keys() == model.state_dict().keys()
    assert result.run == folder


def test_the_same_run_twice_is_the_same(finished, tmp_path):
    folder, config, result = finished
    again = quiet(config, tmp_path / "again")
    assert again.val_loss == result.val_loss
    assert [row["loss"] for row in rows(tmp_path / "again")] == [row["loss"] for row in rows(folder)]


def test_looking_changes_nothing(change, tmp_path):
    """Validation, probes, samples and checkpoints leave no trace in the curve."""
    busy = change(steps=6, validate_every=1, probe_every=1, checkpoint_every=1)
    idle = change(steps=6, validate_every=0, probe_every=0, checkpoint_every=0, sample_tokens=0)
    quiet(busy, tmp_path / "busy")
    quiet(idle, tmp_path / "idle")
    assert [row["loss"] for row in rows(tmp_path / "busy")] == [row["loss"] for row in rows(tmp_path / "idle")]
    assert "gain_forward" not in rows(tmp_path / "idle")[-1]
    assert kinds(tmp_path / "idle") == ["start", "checkpoint", "finish"]


@pytest.mark.parametrize("residual", ["residual", "hc", "mhc", "mhc-lite", "kronecker", "orthogonal", "identity"])
def test_every_residual_trains(change, tmp_path, residual):
    quiet(change(steps=4, model={"residual": residual}, sample_tokens=2), tmp_path / "run")
    assert all(math.isfinite(row["loss"]) for row in rows(tmp_path / "run"))
    assert ("gain_forward" in rows(tmp_path / "run")[-1]) == (residual != "residual")


def test_no_steps_build_everything_and_save(change, tmp_path):
    result = quiet(change(steps=0), tmp_path / "run")
    assert result.steps == 0
    assert result.val_loss == pytest.approx(math.log(256), abs=0.2)
    assert [row["step"] for row in rows(tmp_path / "run")] == [0]
    assert CheckpointStore(RunDirectory(tmp_path / "run")).latest_step() == 0
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
    assert kinds(tmp_path / "run") == ["start", "checkpoint", "sample", "finish"]


def test_extensions_are_called_in_order(change, tmp_path):
    first, second = Recorder(), Recorder()
    assert isinstance(first, Extension)
    second.calls = first.calls
    quiet(change(steps=2, micro_batch_size=4), tmp_path / "run", extensions=[first, second])
    once = [("begin", 0), ("begin", 0), ("backward", 0), ("backward", 0), ("end", 0), ("end", 0)]
    assert first.calls == [(name, step) for step in (1, 2) for name, _ in once]
    assert [row["total"] for row in rows(tmp_path / "run")] == [1, 3]


class Poison:
    """Makes the gradient of chosen steps infinite."""

    def __init__(self, steps: set[int]) -> None:
        self.steps, self.model = steps, None

    def on_step_begin(self, step: int) -> None:
        pass

    def on_backward_end(self, step: int) -> None:
        import gc

        if step in self.steps:
            for model in (item for item in gc.get_objects() if type(item) is GPT):
                if model.embedding.weight.grad is not None:
                    model.embedding.weight.grad.fill_(math.inf)

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_bad_step_is_skipped_and_told(change, tmp_path):
    result = quiet(change(steps=8), tmp_path / "run", extensions=[Poison({3, 6})])
    assert result.steps == 8
    bad = [event for event in RunDirectory(tmp_path / "run").read_events() if event["kind"] == "nonfinite"]
    assert [(event["step"], event["grad_norm"], event["in_a_row"]) for event in bad] == [(3, None, 1), (6, None, 1)]
    assert [row["step"] for row in rows(tmp_path / "run") if row.get("skipped")] == [3, 6]
    assert all(math.isfinite(row["loss"]) for row in rows(tmp_path / "run"))


def test_too_many_bad_steps_stop_the_run_and_keep_the_last_good_checkpoint(change, tmp_path):
    config = change(steps=20, checkpoint_every=2, keep_checkpoints=1, max_nonfinite=5)
    with pytest.raises(LanewayError, match=r"step 13: .* 5 steps in a row; the checkpoint of step 8 is kept; try a lower"):
        quiet(config, tmp_path / "run", extensions=[Poison(set(range(9, 21)))])
    store = CheckpointStore(RunDirectory(tmp_path / "run"), 1)
    assert store.steps() == [8]  # the steps that were skipped did not push it out
    assert store.latest_step() == 8
    assert kinds(tmp_path / "run")[-1] == "stop"
    assert "finish" not in kinds(tmp_path / "run")


def test_a_wrong_field_leaves_nothing_behind(change, tmp_path):
    with pytest.raises(InputError, match=r"optimizer\.lr"):
        quiet(change(optimizer={"lr": -1.0}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_that_is_too_small_is_refused(change, tmp_path):
    with pytest.raises(InputError, match=r"model.vocab_size: got 100; accepted: at least the tokenizer's 256"):
        quiet(change(model={"vocab_size": 100}), tmp_path / "run")


@pytest.mark.parametrize(("size", "context", "split"), [(2000, 1700, "train"), (2000, 500, "validation")])
def test_text_shorter_than_one_sequence_is_refused(change, tmp_path, size, context, split):
    short = tmp_path / "short.txt"
    short.write_text("only a few words in a line\n" * (size // 27))
    with pytest.raises(InputError, match=f"{split} split of .* is too short"):
        quiet(change(data={"path": str(short)}, model={"context": context}), tmp_path / "run")
    assert not (tmp_path / "run").exists()  # nothing began, nothing is left


def test_a_run_that_never_began_leaves_other_files_alone(change, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="vocab_size"):
        quiet(change(model={"vocab_size": 100}), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_a_taken_folder_is_refused_or_another_one_chosen(change, tmp_path):
    config = change(steps=1, sample_tokens=0)
    quiet(config, tmp_path / "run")
    with pytest.raises(InputError, match="out: got"):
        quiet(config, tmp_path / "run")
    assert quiet(config, tmp_path / "run", spare=True).run == tmp_path / "run-2"
    assert quiet(config, tmp_path / "run", spare=True).run == tmp_path / "run-3"


def test_the_display_has_plain_lines(change, tmp_path, capsys):
    train(change(steps=3), out=tmp_path / "run", console="stdout")
    shown = capsys.readouterr()
    assert "training in" in shown.out
    assert "step 3/3  loss " in shown.out
    assert shown.err == ""
    train(change(steps=3), out=tmp_path / "run2", console="stderr")
    shown = capsys.readouterr()
    assert "step 3/3" in shown.err
    assert shown.out == ""
    train(change(steps=3), out=tmp_path / "run3", console=None)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_saves_and_ends_well(change, tmp_path, monkeypatch, name):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "c.toml").write_text(to_toml(change(steps=100_000, checkpoint_every=0, validate_every=0, probe_every=0)))
    command = [sys.executable, "-m", "laneway", "train", "--config", "c.toml", "--out", "run", "--json"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = RunDirectory(tmp_path / "run").metrics()
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size > 2000):
        assert time.monotonic() < deadline, "it never began"
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(getattr(__import__("signal"), name))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["stopped"] == name
    steps = result["steps"]
    assert 0 < steps < 100_000
    assert CheckpointStore(RunDirectory(tmp_path / "run")).latest_step() == steps
    events = RunDirectory(tmp_path / "run").read_events()
    assert [event["kind"] for event in events] == ["start", "checkpoint", "signal"]
    assert events[-1]["signal"] == name
    assert "--resume" in err


class PoisonAndStop(Poison):
    """Asks the process to stop in a step whose gradient is infinite."""

    def on_step_begin(self, step: int) -> None:
        if step in self.steps:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_diverged_fails_and_exports_nothing(change, tmp_path):
    config = change(steps=6, validate_every=2, checkpoint_every=0, max_nonfinite=50)
    config = replace(config, optimizer=replace(config.optimizer, lr=1e30, warmup=0.0))
    with pytest.raises(LanewayError, match="validation loss of nan: nothing is exported"):
        quiet(config, tmp_path / "run")
    assert not (tmp_path / "run" / "export").exists()
    events = RunDirectory(tmp_path / "run").read_events()
    assert any("not finite" in event.get("message", "") for event in events), "its samples are left out, and it is said"
    assert events[-1]["kind"] == "stop"


def test_a_skipped_step_does_not_cost_a_stop_its_checkpoint(change, tmp_path):
    """A skipped step leaves the parameters as they were, so a stop after it has something to save."""
    config = change(steps=20, checkpoint_every=0, validate_every=0, sample_tokens=0)
    result = quiet(config, tmp_path / "run", extensions=[PoisonAndStop({5})])
    assert (result.stopped, result.steps) == ("SIGTERM", 5)
    assert CheckpointStore(RunDirectory(tmp_path / "run")).latest_step() == 5


def test_a_skipped_last_step_does_not_cost_the_run_its_checkpoint(change, tmp_path):
    config = change(steps=6, checkpoint_every=0, sample_tokens=0)
    quiet(config, tmp_path / "run", extensions=[Poison({6})])
    assert CheckpointStore(RunDirectory(tmp_path / "run")).latest_step() == 6


def test_a_resume_that_finds_the_disk_full_keeps_the_configuration(change, tmp_path, monkeypatch):
    config = change(steps=4, checkpoint_every=2, sample_tokens=0)
    quiet(config, tmp_path / "run")
    before = (tmp_path / "run" / "config.toml").read_bytes()

    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("laneway.rundir.write_synced", full)
    with pytest.raises(LanewayError, match="space"):
        quiet(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "config.toml").read_bytes() == before
    assert not list((tmp_path / "run").glob(".tmp*"))


def test_what_is_trained_on_may_be_made_of_the_batch(change, tmp_path):
    seen: list[tuple[int, ...]] = []

    def shorter(step: int, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = (part[:, : 8 * step] for part in batch)
        seen.append((step, *inputs.shape))
        return inputs, targets

    quiet(change(steps=3), tmp_path / "run", on_batch=shorter)
    assert seen == [(1, 8, 8), (2, 8, 16), (3, 8, 24)]
    tokens = [row["tokens_per_s"] * row["step_ms"] / 1000 for row in rows(tmp_path / "run")]
    assert tokens == pytest.approx([64, 128, 192])
