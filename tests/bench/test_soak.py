"""``laneway bench soak``: its schedule, damage and arithmetic; a short run with real processes, a long one of all kinds."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laneway.bench import soak
from laneway.bench.soak_schedule import KINDS, PROTECTIONS, Fault, Job, Workload, draw, length, most_faults
from laneway.bench.soak_server import damage
from laneway.checkpoint import CheckpointStore
from laneway.core import InputError
from laneway.rundir import RunDirectory


@given(seed=st.integers(0, 10**6), steps=st.integers(20, 200), each=st.integers(1, 40))
def test_a_schedule_has_as_many_faults_of_each_kind_on_steps_of_their_own(seed, steps, each):
    work = Workload(steps=steps)
    each = min(each, most_faults(work))
    faults = draw(seed, work, each)
    assert faults == draw(seed, work, each)
    assert sorted(fault.kind for fault in faults) == sorted(kind for kind in KINDS for _ in range(each))
    where = [fault.step for fault in faults]
    assert where == sorted(set(where))
    assert 1 < where[0] <= where[-1] < steps
    assert {fault.factor for fault in faults if fault.kind == "spike"} <= {2, 3, 4}
    assert length(seed, where[0], work.lengths) in work.lengths


def test_other_seeds_give_other_schedules():
    assert len({tuple(draw(seed, Workload(), 1)) for seed in range(20)}) == 20


def test_a_job_survives_its_way_to_the_server():
    job = Job("managed", 3, Workload(lengths=(5, 7)), (Fault("spike", 4, 3), Fault("kill", 6)), "/somewhere", 10, 9)
    assert Job.of(json.loads(json.dumps(asdict(job)))) == job


@pytest.mark.parametrize("seed", range(6))
def test_damage_is_noticed_and_only_the_newest_checkpoint_has_it(tmp_path, seed):
    store = CheckpointStore(RunDirectory(tmp_path / "run"))
    for step in (1, 2):
        store.save(step, {"w": torch.randn(500)})
    damage(tmp_path, seed, Fault("corrupt", 9))
    again = CheckpointStore(RunDirectory(tmp_path / "run"))
    assert again.latest_step() == 1
    assert ["step_00000002 is skipped" in notice for notice in again.notices] == [True]


def test_without_a_checkpoint_there_is_nothing_to_damage(tmp_path):
    damage(tmp_path, 0, Fault("corrupt", 9))
    assert list(tmp_path.iterdir()) == []


def made_up(variant: str, seed: int, interruptions: int, longest: int) -> dict[str, object]:
    figures = {"interruptions": interruptions, "longest_steps": longest, "longest_seconds": longest / 2, "lost_steps": 0}
    return {"faults": "all", "variant": variant, "seed": seed, **figures, "exact": int(variant == "managed"), "completed": 1}


def test_ratios_are_paired_by_seed_and_nothing_is_divided_by_nothing():
    counts = [(8, 10, 2, 30), (4, 20, 3, 30), (5, 10, 5, 50)]
    rows = []
    for seed, (plain, plain_longest, managed, managed_longest) in enumerate(counts):
        rows += [made_up("unmanaged", seed, plain, plain_longest), made_up("managed", seed, managed, managed_longest)]
    compared = {row["figure"]: row for row in soak.compare(rows)}
    assert [compared["interruptions"][part] for part in ("value", "low", "high")] == [0.75, 0.25, 1.0]
    assert [compared["longest_steps"][part] for part in ("value", "low", "high")] == [3.0, 1.5, 5.0]
    assert compared["lost_steps"]["value"] is None
    summary = soak.summarise(rows, list(compared.values()))["all"]
    assert summary["interruptions: unmanaged"] == {"value": 5, "low": 4, "high": 8}
    assert (summary["exact: managed"], summary["exact: unmanaged"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("faults", {"faults": ("flood",)}),
        ("variants", {"variants": ("managed",)}),
        ("variants", {"variants": ("unmanaged", "reference")}),
        ("seeds", {"seeds": 0}),
        ("each", {"each": 7}),
        ("steps", {"workload": Workload(steps=5)}),
        ("checkpoint_every", {"workload": Workload(checkpoint_every=0)}),
    ],
)
def test_wrong_options_are_named(name, change):
    with pytest.raises(InputError, match=f"^{name}: got"):
        soak.SoakOptions(**change).check()


def test_a_managed_run_gets_over_what_ends_an_unmanaged_one(text_file, tmp_path):
    """Real processes: a spike over the limit, and NaN."""
    text = {"text": str(text_file), "cache": str(tmp_path)}
    work = Workload(steps=20, checkpoint_every=8, **text)
    options = soak.SoakOptions(("spike", "nan"), ("unmanaged", "managed"), seeds=1, alone=False, workload=work)
    options.check()
    said: list[str] = []
    unmanaged, managed = soak.run(options, said.append).tables["soak"]
    assert len(said) == 3
    assert unmanaged["demand_over_limit"] == managed["demand_over_limit"] > 1
    assert (unmanaged["by_spike"], unmanaged["by_nan"], unmanaged["completed"], unmanaged["exact"]) == (1, 1, 1, 0)
    assert (managed["interruptions"], managed["longest_steps"], managed["skipped_steps"], managed["exact"]) == (0, 20, 1, 1)
    assert unmanaged["longest_steps"] < 20
    assert managed["final_loss"] == managed["reference_loss"]


def run(*options: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "laneway", "bench", "soak", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_kinds_of_faults_from_the_command_line(tmp_path: Path):
    done = run("--quick", "--json", "--save", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = [row for row in found["rows"] if "completed" in row]
    assert [row["variant"] for row in rows] == ["unmanaged", "protected", "managed"]
    assert all(row["completed"] == 1 and row["fault_count"] == len(KINDS) for row in rows)
    unmanaged, protected, managed = rows
    assert (unmanaged["by_spike"], unmanaged["by_nan"], unmanaged["by_corrupt"]) == (1, 1, 2)
    assert protected["by_nan"] == managed["by_nan"] == protected["by_disk"] == managed["by_disk"] == 0
    assert (protected["by_spike"], managed["by_spike"], managed["exact"]) == (1, 0, 1)
    assert managed["by_kill"] == managed["by_corrupt"] == 1, "a killed process must be started again, whatever protects it"
    for row in rows:
        for column, value in PROTECTIONS[row["variant"]].columns().items():
            assert row[column] == value
    assert sorted(path.name for path in tmp_path.iterdir()) == ["soak.csv", "soak_summary.csv"]


@pytest.mark.slow
def test_a_wrong_option_is_one_line():
    done = run("--faults", "spike,flood")
    assert done.returncode == 2
    assert "flood" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
