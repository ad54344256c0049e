"""Each of the three symptoms is shown by its recipe, found by doctor with evidence and knob, and gone once the knob is turned."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from laneway.bench.symptoms import SymptomOptions, run
from laneway.cli import main
from laneway.data.text import TextDataConfig
from laneway.doctor import RULES, RunFacts, examine_run
from laneway.recipes import CURES, LIMITS, RECIPES
from laneway.train.config import TrainConfig
from laneway.train.loop import train
from laneway.train.settings import merge

pytestmark = pytest.mark.usefixtures("one_thread")


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


def data_of(text_file: Path) -> TextDataConfig:
    return TextDataConfig(path=str(text_file), cache=str(text_file.parent / "cache"))


def test_slow_convergence_is_found_and_says_what_to_turn(text_file, tmp_path):
    config = replace(RECIPES["slow-convergence"](), data=data_of(text_file), seed=3, probe_every=0)
    train(config, out=tmp_path / "sick", console=None)
    (finding,) = [found for found in examine_run(RunFacts.read(tmp_path / "sick")) if found.rule == "slow-convergence"]
    assert "a uniform guess has 5.55" in finding.evidence
    assert finding.knobs[0].flag == "--optimizer.lr 0.001"


def test_memory_that_runs_out_leaves_what_doctor_needs(text_file, tmp_path, capsys):
    """The allocation fails for want of address space: nothing is so large."""

    def ask(step, batch):
        if step == 3:
            torch.empty(1 << 55)
        return batch

    config = replace(RECIPES["slow-convergence"](), data=data_of(text_file), probe_every=0)
    with pytest.raises(RuntimeError):
        train(config, out=tmp_path / "sick", console=None, on_batch=ask)
    (finding,) = examine_run(RunFacts.read(tmp_path / "sick"))
    assert finding.rule == "memory-overflow"
    assert "1 out-of-memory events, the first at step 3 for 144115188075855872 bytes more at a peak of " in finding.evidence
    assert main(["doctor", str(tmp_path / "sick")]) == 0
    assert "state: stopped after step 3: out of memory: " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", CURES)
def test_doctor_s_own_advice_leads_to_the_cure(text_file, name):
    """As it is, then with the first knob at the value that doctor gives it, as often as it is found."""
    report = run(SymptomOptions({name: RECIPES[name]()}, LIMITS, seeds=2, data=data_of(text_file)))
    (field,) = CURES[name]
    for seed in (0, 1):
        course = [row for row in report.tables["symptoms"] if row["seed"] == seed]
        assert course[0]["found"] == 1
        assert course[0]["value"] > course[0]["limit"]
        assert course[-1]["found"] == 0
        assert course[-1]["completed"] == 1
        assert course[-1]["knob"] == f"--{field.replace('_', '-')} {CURES[name][field]}"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's limit on a process's own memory (RLIMIT_DATA)")
def test_memory_overflow_on_the_command_line(text_file, tmp_path):
    """Under a limit of the system: one line that names doctor, and a run with the knob turned that ends."""
    common = f"--data.path {text_file} --data.cache {text_file.parent / 'cache'} --device cpu"
    laneway = f"{sys.executable} -m laneway"
    limited = f"ulimit -d {{}}; exec {laneway} train memory-overflow --out {{}} {common} {{}}"
    env = os.environ | {"OMP_NUM_THREADS": "1"}

    def ends(kilobytes: int, out: Path, more: str) -> subprocess.CompletedProcess:
        words = ["bash", "-c", limited.format(kilobytes, out, more)]
        return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=env)

    sick = ends(450_000, tmp_path / "sick", "")
    assert sick.returncode == 1
    assert sick.stderr.startswith("laneway train: out of memory: ")
    assert sick.stderr.endswith(f"what to turn: laneway doctor {tmp_path / 'sick'}\n")
    assert [found.rule for found in examine_run(RunFacts.read(tmp_path / "sick"))] == ["memory-overflow"]
    well = ends(450_000, tmp_path / "well", "--micro-batch-size 32")
    assert well.returncode == 0, well.stderr
    assert examine_run(RunFacts.read(tmp_path / "well")) == []


RANK = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from laneway.data.text import TextDataConfig
from laneway.recipes import RECIPES
from laneway.train.loop import train
import os

def ask(step, batch):
    if step == 2 and os.environ["RANK"] == "1":
        torch.empty(1 << 55)
    return batch

torch.set_num_threads(1)
data = TextDataConfig(path=sys.argv[1], cache=str(Path(sys.argv[1]).parent / "cache"))
config = replace(RECIPES["slow-convergence"](), data=data, steps=4, probe_every=0, device="cpu")
train(config, out=sys.argv[2], console=None, on_batch=ask)
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_is_not_the_first_tells_that_its_memory_ran_out(text_file, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK, "utf-8")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*words, str(text_file), str(tmp_path / "run")], capture_output=True, timeout=300, check=False)
    assert done.returncode != 0
    (finding,) = examine_run(RunFacts.read(tmp_path / "run"))
    assert finding.rule == "memory-overflow"
    assert "the first at step 2 on rank 1 for " in finding.evidence
    assert {knob.name: knob.flag for knob in finding.knobs}["micro_batch_size"] == "--micro-batch-size 1"


def test_every_cure_is_of_a_recipe_and_says_a_doctor_s_rule():
    for name in CURES:
        assert name in RECIPES
        rule = next(rule for rule in RULES if rule.name == name)
        assert set(CURES[name]) <= set(rule.knobs)
        assert cured(name).problems() == []
    assert set(LIMITS) <= set(CURES)
