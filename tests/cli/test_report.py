"""``laneway report`` from the command line."""

import json

import pytest

from laneway.cli import main
from laneway.rundir import RunDirectory, append_event, append_row


def make(path):
    path.mkdir()
    run = RunDirectory(path)
    run.config.write_text("steps = 3\n[model]\nresidual = 'mhc'\n", "utf-8")
    for step in (1, 2, 3):
        append_row(run.metrics(), {"step": step, "time": float(step), "loss": 4.0 / step, "lr": float("nan")})
    append_event(run, "finish", 3, val_loss=1.5, val_bits_per_byte=2.16, seconds=2.0)
    return path


def test_report_of_one_run(tmp_path, capsys):
    assert main(["report", str(make(tmp_path / "run"))]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"wrote {tmp_path / 'run' / 'report.html'} (")
    assert out.endswith("KiB, 1 run)\n")
    assert "1.500" in (tmp_path / "run" / "report.html").read_text("utf-8")


def test_json_is_one_object_and_nothing_else(tmp_path, capsys):
    target = tmp_path / "both.html"
    runs = [str(make(tmp_path / name)) for name in ("a", "b")]
    assert main(["report", *runs, "--out", str(target), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["out"] == str(target)
    assert told["bytes"] == target.stat().st_size
    assert [run["name"] for run in told["runs"]] == ["a", "b"]
    assert told["runs"][0] | {} == {
        "name": "a",
        "path": str(tmp_path / "a"),
        "state": "finished",
        "steps": 3.0,
        "loss": pytest.approx(4 / 3),
        "val_loss": 1.5,
        "val_bits_per_byte": 2.16,
        "tokens_per_s": None,
        "seconds": 2.0,
        "parameters": None,
        "peak_bytes": None,
    }


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "runs: got []; accepted: one or more run directories"),
        (["nowhere"], "runs: got 'nowhere'; accepted: a run directory (made by `laneway train`); there is no such folder"),
        (["RUN", "RUN"], "accepted: each run once"),
        (["RUN", "--out", "no/such/x.html"], "out: got 'no/such/x.html'; accepted: a file in an existing folder"),
        (["RUN", "--jsn"], "--jsn"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path, capsys, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    run = make(tmp_path / "run")
    assert main(["report", *(str(run) if arg == "RUN" else arg for arg in args)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("laneway report: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err
    assert list(run.glob("*.html")) == []


def test_a_broken_run_is_one_line_and_exit_1(tmp_path, capsys):
    run = make(tmp_path / "run")
    (run / "config.toml").write_text("= nonsense", "utf-8")
    assert main(["report", str(run)]) == 1
    assert "not TOML" in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as end:
        main(["report", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "--out" in out
    assert "--json" in out
