"""``laneway plan``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laneway.cli import main
from laneway.strategy.strategy import Strategy

ASK = ["plan", "--model-size", "7B", "--topology", "8xH100_2nodes"]


def test_it_prints_plan_prediction_reasons_and_alternatives(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ASK) == 0
    said = capsys.readouterr().out
    for word in ("layout", "predicted step", "exposed", "why", "not taken", "kWh/token"):
        assert word in said


def test_json_is_one_object_and_the_written_plan_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, picture = tmp_path / "plan.toml", tmp_path / "plan.svg"
    assert main([*ASK, "--json", "--compare", "flat", "--write", str(target), "--picture", str(picture)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert Strategy.from_dict(said["plan"]) == Strategy.load(target)
    assert said["compare"]["planned_seconds"] == said["plan"]["predicted"]["seconds"]["value"]
    assert picture.read_text().startswith("<svg")


def test_settings_of_the_network_are_written_and_the_users_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_NTHREADS", "2")
    ask = [
        "plan",
        "--model-size",
        "7B",
        "--topology",
        "8xH100_2nodes_2racks@NDR400/400GbE:4",
        "--export-settings",
        str(tmp_path / "s"),
    ]
    assert main([*ask, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["settings"]
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["nccl_tuner.csv", "network.env"]
    assert said["kept"] == {"NCCL_SOCKET_NTHREADS": "2"}
    assert said["environment"]["NCCL_NSOCKS_PERTHREAD"] == "4"
    assert main(ask) == 0
    assert "NCCL_SOCKET_NTHREADS=2 is yours and stays" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["--model-size", "7B", "--topology", "8xH100", "--export-settings", "/proc/nowhere"], "export_settings"),
        (["--model-size", "175", "--topology", "8xH100"], "model_size"),
        (["--model-size", "7B", "--topology", "8xH10O"], "topology"),
        (["--topology", "8xH100"], "model_size"),
        (["--model-size", "7B", "--recipe", "tiny", "--topology", "8xH100"], "model_size"),
        (["--model-size", "7B", "--topology", "8xH100", "--compare", "round"], "compare"),
        (["--model-size", "7B", "--topology", "8xH100", "--write", "/nowhere/plan.toml"], "write"),
        (["--model-size", "7B", "--topology", "8xH100", "--picture", "plan.png"], "picture"),
        (["--model-size", "7B", "--topology", "8xH100", "--picture", "/proc/plan.svg"], "picture"),
        (["--model-size", "7B", "--topology", "8xH100", "--probe", "/nowhere.toml"], "calibration"),
        (["--model-size", "7B", "--topology", "8xH100", "--micro-batch", "7", "--global-batch", "8"], "global_batch"),
        (["--model-size", "7B", "--topology", "8xH100", "--tp", "16"], "fixed.tp"),
        (["--model-size", "7B", "--topology", "8xH100", "--streams", "9" * 400], "streams"),
        (["--model-size", "7B", "--topology", "8xA100", "--precision", "fp8"], "precision"),
        (["--recipe", "teeny", "--topology", "8xH100"], "recipe"),
        (["--model-size", "175B", "--topology", "8xH100"], "does not fit"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(args: list[str], field: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *args]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"laneway plan: {field}")
