"""Run directories as they are found: half-written, broken, of another version, going on, of several ranks, under controls."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from laneway.cli import main
from laneway.rundir import RunDirectory, append_event, append_row

CONFIG = "steps = 100\n[model]\nresidual = 'mhc'\nvocab_size = 256\n[optimizer]\nlr = 0.003\nwarmup = 0.05\n"


def make(path: Path, steps: int = 30, config: str = CONFIG, **scalars: float) -> RunDirectory:
    path.mkdir()
    run = RunDirectory(path)
    run.config.write_text(config, "utf-8")
    run.env.write_text(json.dumps({"laneway": "0.1.0", "memory_bytes": 8 << 30, "device": {"type": "cpu"}}), "utf-8")
    append_event(run, "start", 0, steps=100)
    for step in range(1, steps + 1):
        append_row(run.metrics(), {"step": step, "time": time.time(), "loss": 1.3 + 4.2 * (1 + step / 10) ** -0.7, **scalars})
    return run


def doctor(capsys: pytest.CaptureFixture[str], run: RunDirectory) -> str:
    assert main(["doctor", str(run.path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_an_empty_folder_is_no_run(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "it holds no config.toml" in captured.err


def test_a_row_that_is_being_written_is_passed_over(tmp_path, capsys):
    run = make(tmp_path / "run")
    for path in (run.metrics(), run.events):
        with path.open("a", encoding="utf-8") as file:
            file.write('{"step": 31, "lo')
    out = doctor(capsys, run)
    assert "rows: 30, up to step 30\n" in out
    assert "healthy" in out


def cut_config(run: RunDirectory) -> None:
    run.config.write_text(CONFIG[:40], "utf-8")


def cut_env(run: RunDirectory) -> None:
    run.env.write_text('{"laneway": ', "utf-8")


def broken_row(run: RunDirectory) -> None:
    lines = run.metrics().read_text("utf-8").splitlines()
    run.metrics().write_text("\n".join([*lines[:5], lines[5][:20], *lines[6:], ""]), "utf-8")


def broken_event(run: RunDirectory) -> None:
    run.events.write_text("not a row\n" + run.events.read_text("utf-8"), "utf-8")


def broken_row_of_another_rank(run: RunDirectory) -> None:
    run.metrics(2).write_text('{"loss": 1}\n{"step": 2}\n', "utf-8")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_config, "config.toml: not TOML"),
        (cut_env, "env.json: not JSON"),
        (broken_row, "rank0.jsonl, line 6: not a JSON row"),
        (broken_event, "events.jsonl, line 1: not a JSON row"),
        (broken_row_of_another_rank, "rank2.jsonl: a row without a step"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_read_is_one_line(tmp_path, capsys, damage, words):
    run = make(tmp_path / "run")
    damage(run)
    assert main(["doctor", str(run.path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_a_run_of_another_version(tmp_path, capsys):
    """Fields and columns that we do not know, and none of those that we do."""
    run = make(tmp_path / "run", config="steps = 'many'\nmodel = 3\n[wild]\nx = 1\n")
    run.env.write_text('{"laneway": "99.1", "device": "abacus", "world_size": "all"}', "utf-8")
    append_row(run.metrics(), {"step": 31, "loss": [1, 2], "peak_bytes": "much", "collapse": {"a": 1}})
    assert "version: written by laneway 99.1, read by 0.1.0" in doctor(capsys, run)
    run.env.write_text("[]", "utf-8")
    assert "\nversion: " not in doctor(capsys, run)


def test_where_a_run_stands(tmp_path, capsys):
    run = make(tmp_path / "run")
    assert "state: no end is written: still running, or killed; last heard of " in doctor(capsys, run)
    append_event(run, "signal", 30, signal="SIGTERM")
    words = f"state: stopped by SIGTERM after step 30; go on: laneway train --resume --out {run.path}\n"
    assert words in doctor(capsys, run)
    append_event(run, "resume", 30)
    assert "state: no end is written" in doctor(capsys, run)
    append_event(run, "lost", 30, ranks=[3], reason="rank 3 did not answer")
    assert "state: ranks [3] were lost after step 30: rank 3 did not answer\n" in doctor(capsys, run)
    append_event(run, "finish", 100, val_loss=1.5)
    assert "state: finished at step 100\n" in doctor(capsys, run)
    run.events.unlink()
    run.metrics().unlink()
    out = doctor(capsys, run)
    assert "state: no end is written: still starting, or killed\n" in out
    assert out.endswith("no metrics rows yet: nothing to examine\n")


def test_a_run_that_was_given_up(tmp_path, capsys):
    run = make(tmp_path / "run")
    for step in range(31, 36):
        append_row(run.metrics(), {"step": step, "loss": None, "grad_norm": None, "skipped": 1})
        append_event(run, "nonfinite", step, in_a_row=step - 30)
    append_event(run, "stop", 35, reason="stopped at step 35: the loss or the gradient was not finite in 5 steps in a row")
    out = doctor(capsys, run)
    assert "state: stopped at step 35: the loss or the gradient was not finite in 5 steps in a row\n" in out
    assert "finding: nonfinite-steps: 5 steps were not finite and were skipped\n" in out


def test_a_run_of_several_ranks(tmp_path, capsys):
    run = make(tmp_path / "run", peak_bytes=1 << 30)
    append_row(run.metrics(1), {"step": 1, "peak_bytes": 1 << 30})
    append_row(run.metrics(2), {"step": 1, "peak_bytes": int(7.6 * 2**30)})
    append_event(run, "stop", 30, rank=1, reason="out of memory: you tried to allocate 512 bytes", peak_bytes=3 << 29)
    out = doctor(capsys, run)
    assert "ranks: 3; the curves are rank 0's, memory is looked at on all\n" in out
    first = "1 out-of-memory events, the first at step 30 on rank 1 for 512 bytes more at a peak of 1.50 GiB"
    assert f"  evidence: {first}; peak 7.60 GiB of 8.00 GiB (95 %) on rank 2\n" in out


def test_a_run_under_controls(tmp_path, capsys):
    run = make(tmp_path / "run", purified_paths=0, **{"lambda": 0.3})
    append_row(run.metrics(), {"step": 31, "lambda": 0.25, "purified_paths": 1, "curvature": [[0.1, 0.2]], "gate": [[1.0, 0.9]]})
    append_event(run, "purify", 31, path="blocks.1.attention", score=7.0, correction=0.2, in_a_row=1)
    out = doctor(capsys, run)
    assert "controls: curvature constraint: λ 0.25 at the end; gradients of 1 paths corrected, in 1 of 31 rows\n" in out
    assert "healthy" in out
    append_event(run, "purify", 40, path="blocks.1.attention", score=7.0, correction=0.2, in_a_row=10)
    out = doctor(capsys, run)
    assert "finding: path-outlier: the gradient of a path is an outlier again and again\n" in out
    assert "  evidence: blocks.1.attention was corrected in 10 checks in a row or more, first at step 31\n" in out


def test_json_says_where_the_run_stands_and_what_was_watched(tmp_path, capsys):
    run = make(tmp_path / "run", steps=60, peak_bytes=4 << 30)
    append_event(run, "finish", 60)
    assert main(["doctor", str(run.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["about"]["state"] == "finished at step 60"
    assert told["measures"]["memory-overflow"] == {"what": "peak over the memory", "value": 0.5, "limit": 0.9}
    assert set(told["measures"]) == {"unstable-start", "slow-convergence", "memory-overflow"}
