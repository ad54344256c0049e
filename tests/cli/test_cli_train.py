"""`laneway train`: where values come from, what is refused and how, what is printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from laneway.cli import main
from laneway.cli.train import as_json, read_request
from laneway.core import InputError
from laneway.recipes import RECIPES
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.loop import TrainResult
from laneway.train.resume import saved_config

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = """
steps = 4
batch_size = 4
validate_every = 0
validation_batches = 1
sample_tokens = 3
[model]
dim = 16
layers = 1
heads = 2
context = 16
[data]
path = "text.txt"
cache = "cache"
"""


@pytest.fixture
def here(tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of these tests, with a text and a configuration in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for the processes that are started here
    (tmp_path / "text.txt").write_bytes(text_file.read_bytes())
    (tmp_path / "c.toml").write_text(SMALL)
    return tmp_path


def settings(*args: str) -> TrainConfig:
    return read_request(args).settings


def test_the_default_is_the_tiny_recipe():
    assert settings() == RECIPES["tiny"]()
    assert str(read_request([]).folder) == "runs/tiny"


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_by_its_name(name):
    assert settings(name) == RECIPES[name]()
    assert str(read_request([name]).folder) == f"runs/{name}"


def test_flags_win_over_the_file_and_the_file_over_the_recipe(here):
    (here / "c.toml").write_text("seed = 5\nsteps = 50\n[optimizer]\nlr = 0.5\n")
    found = settings("small", "--config", "c.toml", "--steps", "7", "--model.dim", "64")
    recipe = RECIPES["small"]()
    assert (found.seed, found.steps, found.optimizer.lr, found.model.dim) == (5, 7, 0.5, 64)
    assert (found.batch_size, found.precision, found.model.layers) == (recipe.batch_size, recipe.precision, recipe.model.layers)


@pytest.mark.parametrize("order", [["small", "--steps", "3"], ["--steps", "3", "small"]])
def test_the_recipe_may_stand_anywhere(order):
    assert settings(*order) == read_request(["small", "--steps", "3"]).settings
    assert settings(*order).model == RECIPES["small"]().model


def test_every_field_has_a_flag():
    found = settings(
        "--micro-batch-size",
        "2",
        "--compile",
        "--activation-checkpointing",
        "--optimizer.clip-norm",
        "0",
        "--data.suffixes",
        ".md",
        ".txt",
    )
    assert (found.micro_batch_size, found.compile, found.activation_checkpointing, found.optimizer.clip_norm) == (
        2,
        True,
        True,
        0.0,
    )
    assert found.data.suffixes == (".md", ".txt")
    assert not settings("--no-compile").compile


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["tinny"], ["recipe: got 'tinny'", "tiny, small, gpt2-124m", "did you mean 'tiny'?"]),
        (["--steps", "1.5"], ["--steps", "1.5"]),
        (["--steps"], ["--steps"]),
        (["--stepz", "3"], ["--stepz", "--steps"]),
        (["--model.streems", "3"], ["--model.streems", "--model.streams"]),
        (["--optimizer.lr", "fast"], ["--optimizer.lr", "fast"]),
        (["--optimizer.lr", "-1"], ["optimizer.lr: got -1.0", "a number > 0"]),
        (["--model.residual", "mch"], ["model.residual: got 'mch'", "did you mean 'mhc'?"]),
        (["--model.streams", "0"], ["model.streams: got 0", "an integer ≥ 1"]),
        (["--model.dim", "-8"], ["model.dim: got -8"]),
        (["--data.path", "nowhere.txt"], ["data.path: got 'nowhere.txt'", "no such file"]),
        (["--data.validation-fraction", "2"], ["data.validation_fraction: got 2.0"]),
        (["--device", "abacus"], ["device: got 'abacus'", "auto, cpu"]),
        (["--precision", "fp8"], ["precision: got 'fp8'", "fp32, bf16"]),
        (["--config", "none.toml"], ["config: got 'none.toml'", "No such file"]),
        (["--resume"], ["resume: got 'runs/tiny'", "a run directory"]),
        (["--resume", "--out", "elsewhere"], ["resume: got 'elsewhere'"]),
        (["--parallel", "fsdp"], ["parallel: got 'fsdp'", "torchrun"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(here, capsys, args, words):
    assert main(["train", *args]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("laneway train: ")
    for word in words:
        assert word in shown.err
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("stepz = 3", ["stepz: got 3", "did you mean 'steps'?"]),
        ("[model]\nstreams = 'four'", ["model.streams: got 'four'", "an integer"]),
        ("[model]\nresidual = 'mhc-light'", ["model.residual: got 'mhc-light'", "did you mean 'mhc-lite'?"]),
        ("steps = ", ["a TOML file"]),
    ],
)
def test_a_bad_file_is_named_by_its_field(here, capsys, toml, words):
    (here / "bad.toml").write_text(toml)
    assert main(["train", "--config", "bad.toml"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert all(word in shown for word in words)


def test_help_names_the_fields_and_the_recipes_values(capsys):
    with pytest.raises(SystemExit) as leave:
        main(["train", "small", "--help"])
    assert leave.value.code == 0
    shown = capsys.readouterr().out
    for flag in ("RECIPE", "--config", "--out", "--resume", "--json", "--steps", "--model.dim", "--optimizer.lr", "--data.path"):
        assert flag in shown
    assert f"(default: {RECIPES['small']().steps})" in shown


def test_a_run_from_the_command_line(here, capsys):
    assert main(["train", "--config", "c.toml"]) == 0
    shown = capsys.readouterr()
    last = shown.out.strip().splitlines()[-1]
    assert "bits/byte after 4 steps in" in last
    assert last.endswith("run in runs/tiny; next: laneway report runs/tiny")
    assert saved_config(RunDirectory(here / "runs" / "tiny")).model.dim == 16
    assert main(["train", "--config", "c.toml"]) == 0  # a second time it takes the next name
    assert "runs/tiny-2" in capsys.readouterr().out.strip().splitlines()[-1]


def test_json_is_one_object_and_nothing_else(here, capsys):
    assert main(["train", "--config", "c.toml", "--out", "r", "--json"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result.keys() == {"run", "steps", "val_loss", "val_bits_per_byte", "seconds", "stopped"}
    assert json.loads(json.dumps(as_json(TrainResult(Path("r"), 1, float("nan"), 2.0, 1.0)))) | {"run": "r"} == {
        "run": "r",
        "steps": 1,
        "val_loss": None,
        "val_bits_per_byte": 2.0,
        "seconds": 1.0,
        "stopped": None,
    }
    assert (result["run"], result["steps"], result["stopped"]) == ("r", 4, None)
    assert "step 4/4" in shown.err


def test_a_taken_folder_says_what_to_do(here, capsys):
    assert main(["train", "--config", "c.toml", "--out", "r"]) == 0
    assert main(["train", "--config", "c.toml", "--out", "r"]) == 2
    assert "continue it with `--resume --out r`, or choose another --out" in capsys.readouterr().err


def test_resume_takes_the_runs_own_configuration(here, capsys):
    assert main(["train", "--config", "c.toml", "--out", "r", "--seed", "9"]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", "--out", "r"]) == 0  # no --config, no --seed: they stand in the run
    assert "after 4 steps" in capsys.readouterr().out
    assert main(["train", "--resume", "--out", "r", "--steps", "8"]) == 2
    assert "steps 4 → 8" in capsys.readouterr().err
    assert main(["train", "small", "--resume", "--out", "r"]) == 2
    assert "model.layers 1 → 8" in capsys.readouterr().err
    assert main(["train", "--config", "c.toml", "--resume", "--out", "r", "--seed", "8"]) == 2
    assert "seed 9 → 8" in capsys.readouterr().err


def test_resume_without_out_takes_the_latest_run(here, capsys):
    for _ in range(2):
        assert main(["train", "--config", "c.toml"]) == 0
    capsys.readouterr()
    assert read_request(["--resume"]).out == Path("runs/tiny-2")
    assert main(["train", "--resume"]) == 0
    assert "run in runs/tiny-2" in capsys.readouterr().out


def test_a_runs_configuration_runs_again(here):
    assert main(["train", "--config", "c.toml", "--out", "a"]) == 0
    assert main(["train", "--config", "a/config.toml", "--out", "b"]) == 0
    losses = [[row["loss"] for row in RunDirectory(here / name).read_metrics()] for name in "ab"]
    assert losses[0] == losses[1]


def test_steps_0_is_a_run_of_no_steps(here, capsys):
    assert main(["train", "--config", "c.toml", "--out", "r", "--steps", "0"]) == 0
    assert "after 0 steps" in capsys.readouterr().out
    assert (here / "r" / "export" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("kibibytes", "flags", "words"),
    [
        (40, [], "failed: the file would be larger"),
        (8, ["--steps", "500", "--checkpoint-every", "0"], "saving step 500 failed: the file would be larger"),
    ],
    ids=["checkpoint", "metrics"],
)
def test_no_room_for_a_file_is_one_line(here, kibibytes, flags, words):
    """A limit on the size of files stands for the full disk: the same calls fail, in the same places."""
    assert main(["train", "--config", "c.toml", "--out", "before", "--steps", "0"]) == 0  # the token shards exist now
    command = f"ulimit -f {kibibytes}; exec {sys.executable} -m laneway train --config c.toml --out r {' '.join(flags)}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr
    assert not list((here / "r").rglob("*.distcp"))


def test_read_request_raises_what_the_verb_prints():
    with pytest.raises(InputError, match="recipe"):
        read_request(["nope"])


def test_python_m_laneway_is_the_command(here):
    done = subprocess.run([sys.executable, "-m", "laneway", "train", "tinny"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'tiny'?" in done.stderr
