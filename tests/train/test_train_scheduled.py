"""A run whose tasks are scheduled: they run where it was decided, the same on every rank; the curve is that of a plain run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from laneway.cluster.tasks import Members, TaskScheduler
from laneway.core import InputError
from laneway.data.text import TextDataConfig
from laneway.models.gpt import GPTConfig
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.ranks import Ranks
from laneway.train.scheduled import PreparedBatches, ScheduledTasks, communicating
from laneway.train.settings import to_toml

RANKS, STEPS, STOP, SAVED = 3, 24, 14, 10


@dataclass
class Phase:
    started: float
    seconds: float
    level: int = 0
    nbytes: int = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """A scheduled run, stopped and resumed, and a plain one."""
    folder = tmp_path_factory.mktemp("scheduled")
    config = TrainConfig(
        model=GPTConfig(context=16, layers=1, heads=2, dim=16, streams=2),
        data=TextDataConfig(path=str(text_file), cache=str(text_file.parent / "cache"), validation_fraction=0.2),
        steps=STEPS, batch_size=6, device="cpu", validate_every=0, validation_batches=1, probe_every=0, log_every=1,
        checkpoint_every=SAVED, sample_tokens=0,
    )  # fmt: skip
    (folder / "c.toml").write_text(to_toml(config), "utf-8")
    script = Path(__file__).with_name("scheduled_ranks.py")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text("utf-8")) for rank in range(RANKS)]


def test_all_ranks_decide_the_same(ranks):
    for part in ("first", "resumed"):
        assert len({json.dumps(rank[part]["decisions"]) for rank in ranks}) == 1
    assert [step for step, _, _ in ranks[0]["first"]["decisions"]] == list(range(1, STOP + 1))
    assert [step for step, _, _ in ranks[0]["resumed"]["decisions"]] == list(range(SAVED + 1, STEPS + 1))


def test_every_task_runs_on_the_ranks_it_was_given_to_and_on_no_other(ranks):
    for part in ("first", "resumed"):
        for number, rank in enumerate(ranks):
            for step, places, _ in rank[part]["decisions"]:
                ran = [name for name, at in rank[part]["ran"] if at == (step + 1 if name == "prepare" else step)]
                assert ("prepare" in ran) >= (places["preprocessing"] == f"rank {number}")
                assert ("kernel" in ran) == (places["kernel"] == ("L1 of rank 2" if number == 2 else "L1 of rank 0"))
                tidies = step % 3 == 0 and places["tidy"] == f"rank {number}" and (part, step) != ("first", STOP)
                assert ("tidy" in ran) == tidies
    kernels = [places["kernel"] for _, places, _ in ranks[0]["first"]["decisions"]]
    assert kernels[0] == "L1 of rank 2"  # the level it prefers, from where its data lie


def test_every_way_of_reducing_is_tried_and_set(ranks):
    for rank in ranks:
        decided = [places["aggregation"] for _, places, _ in rank["first"]["decisions"]]
        assert set(decided) == {"flat", "levels"}
        assert rank["first"]["schemes"] == decided[: STOP - 1]


def test_the_curve_is_that_of_a_plain_run_with_the_same_batches(folder):
    scheduled, plain = (RunDirectory(folder / name).read_metrics() for name in ("scheduled", "plain"))
    assert [row["loss"] for row in scheduled] == [row["loss"] for row in plain]
    assert all(row["schedule_ms"] >= 0 for row in scheduled)


def test_a_step_costs_no_more_than_its_gradients_one_vector_and_the_batch(ranks):
    """One bucket, the packed vector, inputs and targets: nothing more over the group of all ranks."""
    for rank in ranks:
        assert set(rank["first"]["counts"][2:]) == {4}


def test_a_resume_goes_on_with_what_was_decided(ranks):
    before = next(places for step, places, _ in ranks[0]["first"]["decisions"] if step == SAVED + 1)
    step, places, reason = ranks[0]["resumed"]["decisions"][0]
    assert step == SAVED + 1
    assert reason != "first"
    assert places == before  # the decision of that step, from the numbers of the step before


def test_decisions_are_events(folder, ranks):
    events = [event for event in RunDirectory(folder / "scheduled").read_events() if event["kind"] == "schedule"]
    assert events[0]["step"] == 1
    assert events[0]["reason"] == "first"
    decided = {step: places for step, places, _ in ranks[0]["first"]["decisions"] + ranks[0]["resumed"]["decisions"]}
    assert all(event["places"] == decided[event["step"]] for event in events if event["step"] > STOP)


def test_time_under_way_counts_once():
    phases = [Phase(0.0, 1.0), Phase(0.5, 1.0), Phase(3.0, 0.25), Phase(3.0, 0.125)]
    assert communicating(phases) == 1.75
    assert communicating([]) == 0.0


def test_batches_alone_are_made_once_each():
    made: list[int] = []

    def prepare(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(step)
        return torch.full((2, 3), step), torch.zeros(2, 3)

    members = Members([()])
    batches = PreparedBatches(
        prepare, (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)), Ranks(0, 0, 1, torch.device("cpu"))
    )
    place = batches.task(members).places[0]
    for step in (5, 6, 7):
        batches.begin(step, place)
        batches._run(place)
        batches.send(place)
        assert batches.on_batch(step, (torch.empty(0), torch.empty(0)))[0].unique().tolist() == [step]
    assert sorted(made) == [5, 6, 7, 8]


def test_mistakes_are_named():
    ranks = Ranks(0, 0, 3, torch.device("cpu"))
    with pytest.raises(InputError, match=r"like: got \(4, 2\); accepted: a first dimension that divides among 3 ranks"):
        PreparedBatches(lambda step: (), (torch.zeros(4, 2),), ranks)
    alone = Ranks(0, 0, 1, torch.device("cpu"))
    batches = PreparedBatches(lambda step: (torch.zeros(1, 2),), (torch.zeros(4, 2),), alone)
    members = Members([()])
    with pytest.raises(InputError, match="prepare: got"):
        batches.begin(1, batches.task(members).places[0])
    tasks = [batches.task(members, name="one"), batches.task(members, name="two")]
    with pytest.raises(InputError, match=r"tasks: got .'one', 'two'.; accepted: one task of kind preprocessing"):
        ScheduledTasks(TaskScheduler(tasks, members, rank=0), batches=batches)
