"""Rules over the tiered memory manager: a run that waits, a shared link, a host that is too small, a machine that swaps."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import Run, healthy

from laneway.doctor import examine_run
from laneway.doctor.activity import sample_paging
from laneway.doctor.advice import examine_machine
from laneway.doctor.rules_memory import VARIABLES
from laneway.doctor.show import machine_lines
from laneway.memory.config import VARIABLES as REAL_VARIABLES
from laneway.memory.config import MemoryConfig

GIB = 1 << 30


def managed(seed: int = 0, wait: float = 0.0, shared: float = 0.0, **memory) -> Run:
    """A healthy run under the manager, whose steps of half a second wait and share the link for these parts of them."""
    run = healthy(seed, spikes=0.0)
    run.config["memory"] = {"budget": "6GiB", "policy": "cost_aware", "tier": "host", "host_buffer_ratio": 0.5} | memory
    run.env = {"memory_bytes": 256 * GIB, "device": {"type": "cuda", "bytes": 24 * GIB}}
    draw = random.Random(seed)
    for row in run.rows:
        row["step_ms"] = 500 * draw.uniform(0.9, 1.1)
        row["memory_stall_seconds"] = wait * row["step_ms"] / 1000 + draw.expovariate(1) * 0.002
        row["memory_transfer_contention_seconds"] = shared * row["step_ms"] / 1000 + draw.expovariate(1) * 0.002
        row |= {"memory_bytes_out": 3 * GIB // 2, "memory_bytes_in": 5 * GIB // 4, "memory_misses": 14 if wait else 0}
    return run


def rules_of(run: Run) -> list[str]:
    return [finding.rule for finding in examine_run(run.facts)]


@pytest.mark.parametrize("seed", range(20))
def test_a_manager_that_hides_its_transfers_is_healthy(seed):
    assert rules_of(managed(seed, wait=0.05, shared=0.02)) == []


@pytest.mark.parametrize("seed", range(3))
def test_steps_that_wait_are_thrash(seed):
    run = managed(seed, wait=0.3, policy="lru", tier="disk", max_swap_ops_per_second=50)
    (found,) = examine_run(run.facts)
    assert found.rule == "swap-thrash"
    assert found.evidence.startswith("the median step waits 30 % of its time, 1.50 GiB out, 1.25 GiB in, 14 misses")
    advice = {knob.name: knob.advice for knob in found.knobs}
    assert advice["memory.policy"] == "cost_aware: what is needed next stays (now lru); in the environment MHC_EVICTION_STRATEGY"
    assert "(now 50); in the environment MHC_MAX_SWAP_OPS_PER_SEC" in advice["memory.max_swap_ops_per_second"]
    assert advice["memory.tier"].startswith("host")
    assert "memory.max_bytes_per_second" not in advice, "no cap is set"


def test_knobs_that_are_turned_right_are_not_named():
    (found,) = examine_run(managed(wait=0.3).facts)
    assert {knob.name for knob in found.knobs} == {"memory.budget", "micro_batch_size", "activation_checkpointing"}


def test_a_shared_link_is_contention():
    (found,) = examine_run(managed(shared=0.12, collective_reservation=0.25).facts)
    assert found.rule == "transfer-contention"
    assert found.evidence == "both are under way for 12 % of the median step"
    assert found.knobs[0].name == "memory.collective_reservation"
    assert "(now 0.25); in the environment MHC_COLLECTIVE_RESERVATION" in found.knobs[0].advice


def test_both_are_told_and_few_rows_are_not_judged():
    run = managed(wait=0.3, shared=0.12)
    assert rules_of(run) == ["swap-thrash", "transfer-contention"]
    run.rows = run.rows[:10]
    assert rules_of(run) == []


def test_the_first_part_may_wait():
    run = managed()
    for row in run.rows[:119]:
        row["memory_stall_seconds"] = 0.4
    assert rules_of(run) == []


def test_rows_without_a_step_time_or_with_nonsense_are_left_out():
    run = managed(wait=0.3)
    for index, row in enumerate(run.rows):
        row["step_ms"] = (None, 0.0, -1.0, "x")[index % 4]
    assert rules_of(run) == []
    run = managed(wait=0.3)
    for row in run.rows:
        row["memory_stall_seconds"] = None
    assert rules_of(run) == []


@pytest.mark.parametrize(
    ("memory", "env", "ratio"),
    [
        ({}, {"memory_bytes": 100 * GIB}, "at least 0.6 (now 0.5)"),
        ({"host_buffer_ratio": 0.2}, {}, "at least 0.24 (now 0.2)"),
        ({}, {"memory_bytes": 32 * GIB}, "no ratio does here: a host with 63.2 GiB would"),
        ({"budget": "8GiB"}, {"memory_bytes": 32 * GIB, "device": {"type": "cpu"}}, "at least 0.63 (now 0.5)"),
    ],
)
def test_a_small_host_buffer_is_found(memory, env, ratio):
    run = managed(**memory)
    run.env |= env
    (found,) = examine_run(run.facts)
    assert found.rule == "host-buffer"
    assert "2.5 to 3 times are advised" in found.evidence
    assert found.knobs[0].name == "memory.host_buffer_ratio"
    assert found.knobs[0].advice.startswith(ratio)
    assert found.knobs[0].advice.endswith("in the environment MHC_CPU_BUFFER_RATIO")


@pytest.mark.parametrize(
    ("memory", "env"),
    [
        ({"budget": ""}, {"memory_bytes": GIB}),
        ({"tier": "disk"}, {"memory_bytes": GIB}),
        ({"tier": "auto"}, {"memory_bytes": 8 * GIB, "device": {"type": "cpu"}}),
        ({"host_buffer_ratio": "x"}, {"memory_bytes": 50 * GIB}),
        ({}, {"memory_bytes": None}),
        ({}, {"device": {"type": "cuda"}}),
        ({"budget": "x"}, {"memory_bytes": 8 * GIB, "device": {"type": "cpu"}}),
    ],
)
def test_where_there_is_no_host_buffer_its_size_is_no_finding(memory, env):
    run = managed(**memory)
    run.env |= env
    assert rules_of(run) == []


def test_a_run_without_the_manager_has_nothing_to_say_about_it():
    run = healthy(0, spikes=0.0)
    run.env = {"memory_bytes": GIB, "device": {"type": "cuda", "bytes": 80 * GIB}}
    assert rules_of(run) == []


# The machine


@pytest.fixture
def machine() -> dict:
    """A machine of which the other rules have nothing to say."""
    return {
        "system": "Linux-6.1",
        "torch": {"version": "2.13.0", "build": "cpu", "threads": 8},
        "cpu": {"cores": 8, "usable_cores": 8},
        "memory": {"total_bytes": 128 * GIB, "available_bytes": 100 * GIB, "swap_used_bytes": 0, "limit_bytes": None},
        "paging": {"seconds": 0.5, "system_share": 0.02, "major_faults_per_s": 3, "pages_in_per_s": 0, "pages_out_per_s": 0},
        "devices": [{"device": f"cuda:{index}", "name": "X", "total_bytes": 24 * GIB} for index in range(2)],
        "accelerator_files": [],
        "disk": {"folder": "/data", "total_bytes": 500 * GIB, "free_bytes": 200 * GIB},
        "bandwidth": [],
        "compilers": {"c++": "g++ 12"},
        "allocator": {},
        "memory_settings": {},
    }


@pytest.mark.parametrize(
    ("paging", "fires"),
    [
        ({"pages_in_per_s": 5000, "pages_out_per_s": 4000}, True),
        ({"pages_in_per_s": 5000, "pages_out_per_s": 10}, False),
        ({"pages_in_per_s": 10, "pages_out_per_s": 5000}, False),
        ({"system_share": 0.6, "major_faults_per_s": 900}, True),
        ({"system_share": 0.6}, False),
        ({"major_faults_per_s": 900}, False),
        (None, False),
    ],
)
def test_a_thrashing_machine_is_found(machine, paging, fires):
    machine["paging"] = paging and machine["paging"] | paging
    found = examine_machine(machine)
    assert [finding.rule for finding in found] == ["swap-thrash"] * fires
    if fires:
        assert f"{100 * machine['paging']['system_share']:.0f} % of the processor time in the kernel" in found[0].evidence
        assert found[0].knobs[0].name == "memory.host_buffer_ratio"
        assert any("MHC_MAX_SWAP_OPS_PER_SEC" in knob.advice for knob in found[0].knobs)


@pytest.mark.parametrize(
    ("settings", "evidence"),
    [
        ({"MHC_MEMORY_BUDGET": "auto"}, "(0.5 of 128.0 GiB = 64.0 GiB) holds 1.3 times the device memory of 48.0 GiB"),
        ({"MHC_CPU_BUFFER_RATIO": "0.9"}, "(0.9 of 128.0 GiB = 115.2 GiB) holds 2.4 times"),
        ({"MHC_CPU_BUFFER_RATIO": "0.94"}, None),
        ({"MHC_CPU_BUFFER_RATIO": "0.1", "MHC_MEMORY_TIER": "disk"}, None),
        ({"MHC_EVICTION_STRATEGY": "lru"}, None),
        ({"MHC_CPU_BUFFER_RATIO": "many"}, "MHC_CPU_BUFFER_RATIO: got 'many'; accepted: a number from 0 to 0.95"),
        ({}, None),
    ],
)
def test_the_host_buffer_of_a_machine_serves_all_its_devices(machine, settings, evidence):
    machine["memory_settings"] = settings
    found = examine_machine(machine)
    assert [finding.rule for finding in found] == ["host-buffer"] * (evidence is not None)
    assert evidence is None or evidence in found[0].evidence


def test_without_an_accelerator_the_budget_is_the_device(machine):
    machine["devices"] = []
    machine["memory_settings"] = {"MHC_MEMORY_BUDGET": "32GiB", "MHC_CPU_BUFFER_RATIO": "0.5", "MHC_MEMORY_TIER": "host"}
    (found,) = examine_machine(machine)
    assert "holds 2.0 times the device memory of 32.0 GiB" in found.evidence
    machine["memory_settings"]["MHC_MEMORY_BUDGET"] = "16GiB"
    assert examine_machine(machine) == []
    machine["memory_settings"] = {"MHC_MEMORY_BUDGET": "32GiB", "MHC_CPU_BUFFER_RATIO": "0.1"}
    assert examine_machine(machine) == [], "auto goes to the disk here"
    machine["memory_settings"]["MHC_MEMORY_TIER"] = "host"
    machine["memory_settings"]["MHC_MEMORY_BUDGET"] = "4G"
    (found,) = examine_machine(machine)
    assert "MHC_MEMORY_BUDGET: got '4G'" in found.evidence


def test_a_limit_of_the_container_is_the_host(machine):
    machine["memory_settings"] = {"MHC_CPU_BUFFER_RATIO": "0.94"}
    machine["memory"]["limit_bytes"] = 64 * GIB
    assert [finding.rule for finding in examine_machine(machine)] == ["host-buffer"]


# What is read


def counters(folder: Path, ticks: list[int], faults: int, pages_in: int, pages_out: int) -> None:
    (folder / "stat").write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3\n", "ascii")
    (folder / "vmstat").write_text(f"nr_free 9\npgmajfault {faults}\npswpin {pages_in}\npswpout {pages_out}\n", "ascii")


def test_rates_are_differences_over_time(tmp_path, monkeypatch):
    counters(tmp_path, [100, 0, 50, 800, 10, 2, 3, 0, 90, 0], 1000, 40, 60)
    clock = iter((10.0, 12.0))

    def meanwhile(seconds: float) -> None:
        assert seconds == 0.25
        counters(tmp_path, [130, 0, 90, 810, 10, 7, 8, 10, 120, 0], 1500, 140, 560)

    monkeypatch.setattr("time.sleep", meanwhile)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    told = sample_paging(0.25, tmp_path)
    assert told == {
        "seconds": 2.0,
        "system_share": 0.5,  # 40 system, 5 irq and 5 softirq of 100; guest time is in user already
        "major_faults_per_s": 250.0,
        "pages_in_per_s": 50.0,
        "pages_out_per_s": 250.0,
    }


def test_a_system_without_counters_has_no_rates(tmp_path):
    assert sample_paging(0.0, tmp_path) is None
    (tmp_path / "stat").write_text("nothing\n", "ascii")
    (tmp_path / "vmstat").write_text("", "ascii")
    assert sample_paging(0.0, tmp_path) is None


@pytest.mark.skipif(not Path("/proc/vmstat").is_file(), reason="no /proc/vmstat on this system")
def test_the_kernel_at_work_is_seen():
    """Other processes do nothing but call into the kernel."""
    busy = "import os\nwhile True: os.stat('/')"
    loops = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(len(os.sched_getaffinity(0)))]
    try:
        worked = max((sample_paging(0.3) for _ in range(4)), key=lambda told: told["system_share"])
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert 0.05 < worked["system_share"] <= 1
    assert all(worked[name] >= 0 for name in ("major_faults_per_s", "pages_in_per_s", "pages_out_per_s"))


def test_paging_and_settings_are_shown(machine):
    machine |= {
        "laneway": "1",
        "python": {"version": "3", "implementation": "C"},
        "distributed": {},
        "packages": {},
        "memory_settings": {"MHC_EVICTION_STRATEGY": "lru"},
    }
    machine["torch"] |= {"cpu_capability": "X"}
    machine["cpu"] |= {"model": "P", "logical_cores": 8, "instruction_sets": []}
    machine["memory"] |= {"swap_total_bytes": 0}
    lines = dict(machine_lines(machine))
    assert lines["paging"] == "2 % system time; swap 0 pages/s in, 0 out; 3 major faults/s"
    assert lines["memory manager"] == "MHC_EVICTION_STRATEGY=lru"


def test_every_knob_and_variable_exists():
    """The doctor never imports the memory manager; its advice must still name fields and variables that exist."""
    assert VARIABLES.items() <= REAL_VARIABLES.items()
    fields = {f"memory.{name}" for name in MemoryConfig.__dataclass_fields__} | {"micro_batch_size", "activation_checkpointing"}
    runs = [
        managed(wait=0.3, shared=0.3, policy="fifo", tier="disk", max_swap_ops_per_second=1, max_bytes_per_second=1),
        managed(host_buffer_ratio=0.1),
    ]
    named = {knob.name for run in runs for finding in examine_run(run.facts) for knob in finding.knobs}
    assert len(named) == 9
    assert named <= fields


def test_the_doctor_reads_without_torch_or_the_manager():
    code = (
        "import sys, laneway.doctor, laneway.doctor.advice, laneway.doctor.activity\n"
        "sys.exit(any(name == 'torch' or name.startswith('laneway.memory') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
