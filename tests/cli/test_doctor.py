"""``laneway doctor`` from the command line."""

import json
import subprocess
import sys

import pytest

from laneway.cli import main
from laneway.rundir import RunDirectory, append_event, append_row


def make(path, loss=lambda step: 1.3 + 4.2 * (1 + step / 10) ** -0.7, steps=300):
    path.mkdir()
    run = RunDirectory(path)
    run.config.write_text(
        f"steps = {steps}\n[model]\nresidual = 'mhc'\nvocab_size = 256\n[optimizer]\nlr = 0.003\nwarmup = 0.05\n", "utf-8"
    )
    for step in range(1, steps + 1):
        append_row(run.metrics(), {"step": step, "loss": loss(step), "grad_norm": 0.5, "gain_forward": 1.0})
    return path


def test_a_healthy_run_says_so(tmp_path, capsys):
    assert main(["doctor", str(make(tmp_path / "run"))]) == 0
    out = capsys.readouterr().out
    assert "rows: 300, up to step 300\n" in out
    assert out.endswith("healthy: none of 16 rules found anything\n")


def test_findings_are_no_failure(tmp_path, capsys):
    run = make(tmp_path / "run")
    append_event(RunDirectory(run), "nonfinite", 250, in_a_row=1)
    append_row(RunDirectory(run).metrics(), {"step": 301, "gain_forward": 812.0})
    assert main(["doctor", str(run)]) == 0
    out = capsys.readouterr().out
    assert "finding: nonfinite-steps: 1 steps were not finite and were skipped\n" in out
    assert "finding: composite-gain: the streams are amplified: composite gain 812\n" in out
    assert "  knob: optimizer.lr: lower (now 0.003): --optimizer.lr 0.0015\n" in out
    assert "healthy" not in out


def test_json_is_one_object_with_the_count(tmp_path, capsys):
    run = make(tmp_path / "run", loss=lambda step: 5.5 - step / 1000)
    assert main(["doctor", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["rows"], told["count"]) == (str(run), 300, 1)
    assert told["findings"][0]["rule"] == "slow-convergence"
    assert "slow-convergence" in told["rules"]


def test_a_run_without_rows(tmp_path, capsys):
    assert main(["doctor", str(make(tmp_path / "run", steps=0))]) == 0
    assert "no metrics rows yet: nothing to examine" in capsys.readouterr().out


def test_the_machine_as_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LANEWAY_CACHE", str(tmp_path))
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"machine", "rules", "count", "findings"}
    assert told["count"] == len(told["findings"])
    assert told["machine"]["disk"]["folder"] == str(tmp_path)
    assert {rate["what"] for rate in told["machine"]["bandwidth"]} >= {"memory copy", "disk write", "disk read"}
    assert list(tmp_path.iterdir()) == []


def test_the_machine_in_words(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LANEWAY_CACHE", str(tmp_path))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for label in ("python: ", "torch: ", "processor: ", "memory copy: ", "disk write: ", "c++: ", "distributed: ", "allocator: "):
        assert f"\n{label}" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], "run: got 'nowhere'; accepted: a run directory (made by `laneway train`); there is no such folder"),
        ([""], "run: got"),
        (["--jsn"], "--jsn"),
        (["a", "b"], "b"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, monkeypatch, tmp_path, args, words):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("laneway doctor: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_examining_a_run_needs_no_torch(tmp_path):
    run = make(tmp_path / "run", steps=50)
    code = "import sys; from laneway.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    for verb in ("doctor", "report"):
        done = subprocess.run([sys.executable, "-c", code, verb, str(run)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_help(capsys):
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--help"])
    assert end.value.code == 0
    assert "--json" in capsys.readouterr().out
