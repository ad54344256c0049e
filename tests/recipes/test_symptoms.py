"""Each of the three symptoms is shown by its recipe, found by doctor with evidence and knob, and gone once the knob is turned."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from laneway.doctor import RunFacts, examine_run
from laneway.recipes import CURES, RECIPES
from laneway.train.config import TrainConfig
from laneway.train.loop import train
from laneway.train.settings import merge

pytestmark = pytest.mark.usefixtures("one_thread")
# What a shared machine can't help: these say something of its load, not of the recipe.
OF_THE_MACHINE = {"throughput-drop", "memory-growth", "memory-overflow"}


def nested(fields: dict) -> dict:
    found: dict = {}
    for name, value in fields.items():
        section, _, leaf = name.rpartition(".")
        (found.setdefault(section, {}) if section else found)[leaf] = value
    return found


def cured(name: str) -> TrainConfig:
    config, problems = merge(RECIPES[name](), nested(CURES[name]))
    assert problems == []
    return config


def findings(config: TrainConfig, text_file: Path, out: Path, seed: int) -> list:
    data = replace(config.data, path=str(text_file), cache=str(text_file.parent / "cache"))
    train(replace(config, data=data, seed=seed), out=out, console=None)
    return [finding for finding in examine_run(RunFacts.read(out)) if finding.rule not in OF_THE_MACHINE]


@pytest.mark.parametrize(
    ("name", "words"),
    [("unstable-start", "at the start"), ("slow-convergence", "a uniform guess has 5.55")],
)
def test_a_symptom_and_its_cure(text_file, tmp_path, name, words):
    seed = 1
    found = findings(RECIPES[name](), text_file, tmp_path / "sick", seed)
    (finding,) = [finding for finding in found if finding.rule == name]
    assert words in finding.evidence
    assert {knob.name for knob in finding.knobs} >= set(CURES[name])
    assert [f.rule for f in findings(cured(name), text_file, tmp_path / "well", seed)] == []


# Sick, then cured, each under the same limit over what is there when it begins.
SCRIPT = """
import gc, sys, torch
from dataclasses import replace
from laneway.memory.counting import CountingAllocator
torch.set_num_threads(1)
allocator = CountingAllocator.install()
from laneway.recipes import RECIPES
from laneway.train.loop import train
text, cache, limit, *runs = sys.argv[1:]
config = RECIPES["memory-overflow"]()
config = replace(config, data=replace(config.data, path=text, cache=cache))
for run in runs:
    out, _, micro = run.rpartition(":")
    gc.collect()
    allocator.limit(allocator.live + int(limit))
    try:
        train(replace(config, micro_batch_size=int(micro) or None), out=out, console=None)
    except torch.OutOfMemoryError:
        print("out of memory in", out)
    allocator.limit(None)
"""


def test_memory_overflow_and_its_cure(text_file, tmp_path):
    """The same limit of memory; the micro-batch alone is smaller."""
    sick, well = tmp_path / "sick", tmp_path / "well"
    runs = [f"{sick}:0", f"{well}:{CURES['memory-overflow']['micro_batch_size']}"]
    words = [sys.executable, "-c", SCRIPT, str(text_file), str(text_file.parent / "cache"), str(200 << 20), *runs]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == [f"out of memory in {sick}", ""]
    (finding,) = [finding for finding in examine_run(RunFacts.read(sick)) if finding.rule == "memory-overflow"]
    assert "1 out-of-memory events, the first at step 1" in finding.evidence
    assert {knob.name for knob in finding.knobs} >= set(CURES["memory-overflow"])
    facts = RunFacts.read(well)
    assert facts.events[-1]["kind"] == "finish"
    assert [f for f in examine_run(facts) if f.rule == "memory-overflow" and "out-of-memory" in f.evidence] == []


def test_every_cure_is_of_a_recipe_and_says_a_doctor_s_rule():
    from laneway.doctor import RULES

    for name in CURES:
        assert name in RECIPES
        assert name in {rule.name for rule in RULES}
        assert cured(name).problems() == []
