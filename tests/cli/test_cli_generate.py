"""`laneway generate`: from an export or a checkpoint, repeatable, and clear about what it can't do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from laneway.cli import main
from laneway.data.text import TextDataConfig
from laneway.models.gpt import GPTConfig
from laneway.train.config import OptimizerConfig, TrainConfig
from laneway.train.loop import train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(one_thread: None, tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """A run that has seen enough to know its handful of words."""
    config = TrainConfig(
        model=GPTConfig(context=32, layers=2, heads=2, dim=32, streams=2),
        data=TextDataConfig(path=str(text_file), cache=str(text_file.parent / "cache"), validation_fraction=0.2),
        optimizer=OptimizerConfig(lr=2e-2, warmup=0.1),
        steps=250,
        batch_size=8,
        device="cpu",
        validate_every=0,
        sample_tokens=0,
    )
    folder = tmp_path_factory.mktemp("generate") / "run"
    train(config, out=folder, console=None)
    return folder


def generate(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, object]:
    assert main(["generate", *map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_writes_words_of_the_text(run, capsys, text_file):
    text = str(generate(capsys, run, "--prompt", "the ", "--temperature", "0", "--max-tokens", "60")["text"])
    known = set(text_file.read_text("utf-8").replace(".", " ").split())
    words = text.replace(".", " ").split()[:-1]
    assert len(words) >= 5
    assert sum(word in known for word in words) / len(words) > 0.6


def test_plain_output_is_prompt_and_text(run, capsys):
    assert main(["generate", str(run), "--prompt", "the lane", "--max-tokens", "12"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("the lane")
    assert len(shown.out) > len("the lane\n")
    assert f"from the export in {run}/export" in shown.err


def test_seeds_repeat_and_differ(run, capsys):
    texts = [generate(capsys, run, "--prompt", "the", "--seed", seed, "--temperature", 1.2)["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_greedy_needs_no_seed(run, capsys):
    texts = {generate(capsys, run, "--temperature", 0, "--max-tokens", 30, "--seed", seed)["text"] for seed in (1, 2)}
    assert len(texts) == 1


def test_top_k_1_is_greedy(run, capsys):
    greedy = generate(capsys, run, "--temperature", 0, "--max-tokens", 30)["text"]
    assert generate(capsys, run, "--top-k", 1, "--max-tokens", 30)["text"] == greedy


def test_prompts_longer_than_the_context_are_cut_from_the_left(run, capsys):
    end = "and the lane keeps every number in its place "
    texts = [
        generate(capsys, run, "--prompt", start + end, "--temperature", 0, "--max-tokens", 8)["text"]
        for start in ("", "zzz " * 50)
    ]
    assert texts[0] == texts[1]


def test_an_empty_prompt_starts_from_a_new_line(run, capsys):
    empty, newline = (generate(capsys, run, "--prompt", prompt, "--temperature", 0, "--max-tokens", 20) for prompt in ("", "\n"))
    assert empty["text"] == newline["text"]


def test_without_an_export_the_newest_checkpoint_is_used(run, capsys, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "export")
    options = ("--prompt", "the ", "--temperature", 0, "--max-tokens", 20)
    found = generate(capsys, copy, *options)
    assert found["source"] == f"checkpoint of step 250 in {copy}"
    assert found["text"] == generate(capsys, run, *options)["text"]


def test_an_exports_own_folder_will_do(run, capsys):
    options = ("--prompt", "the ", "--temperature", 0, "--max-tokens", 20)
    assert generate(capsys, run / "export", *options)["text"] == generate(capsys, run, *options)["text"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--max-tokens", "0"], "max_tokens: got 0; accepted: an integer ≥ 1"),
        (["--temperature", "-0.1"], "temperature: got -0.1; accepted: a number ≥ 0"),
        (["--temperature", "nan"], "temperature: got nan"),
        (["--top-k", "-1"], "top_k: got -1; accepted: an integer ≥ 0"),
        (["--seed", "-1"], "seed: got -1"),
        (["--device", "abacus"], "device: got 'abacus'"),
        (["--promt", "x"], "--prompt"),
    ],
)
def test_bad_flags_are_one_line(run, capsys, args, words):
    assert main(["generate", str(run), *args]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert words in shown.err


def test_what_is_no_run_is_refused(capsys, tmp_path):
    assert main(["generate", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["generate", str(tmp_path)]) == 2
    assert "it holds no config.toml" in capsys.readouterr().err
    assert main(["generate"]) == 2
    assert "RUN" in capsys.readouterr().err


def test_a_run_without_weights_says_so(capsys, tmp_path):
    (tmp_path / "config.toml").write_text("steps = 3\n")
    assert main(["generate", str(tmp_path)]) == 1
    assert "no checkpoint" in capsys.readouterr().err


def test_damaged_exports_are_refused(run, capsys, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    weights = copy / "export" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert main(["generate", str(copy)]) == 1
    assert "cut or damaged" in capsys.readouterr().err
    (copy / "export" / "config.json").write_text('{"model": {"dim": 8, "wings": 2}}')
    assert main(["generate", str(copy)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_help(capsys):
    with pytest.raises(SystemExit) as leave:
        main(["generate", "--help"])
    assert leave.value.code == 0
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("RUN", "--prompt", "--max-tokens", "--temperature", "--top-k", "--seed", "--json"))
