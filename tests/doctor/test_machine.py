"""The look at this machine: real measurements here, and rules over machines that lack something."""

import copy
import io
import json
import os
import re
import time
from pathlib import Path

import psutil
import pytest
import torch

import laneway
from laneway.doctor import bandwidth
from laneway.doctor.advice import MACHINE_RULES, examine_machine
from laneway.doctor.bandwidth import disk_rates, measure, memory_rates
from laneway.doctor.finding import Finding, Knob
from laneway.doctor.machine import accelerator_files, cache_folder, cgroup_limit, describe_machine, optional_packages
from laneway.doctor.show import machine_lines, show

GIB = 1 << 30


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """This machine, looked at and measured."""
    folder = tmp_path_factory.mktemp("disk")
    seen = describe_machine(folder)
    assert list(folder.iterdir()) == [], "nothing may stay on the disk"
    return seen


@pytest.fixture
def good():
    """A machine with nothing to change."""
    rates = {"memory copy": 9.0, "memory, fresh tensor": 8.0, "disk write": 1.0, "disk read": 1.0}
    return {
        "laneway": "0.1.0",
        "python": {"version": "3.12.1", "implementation": "CPython"},
        "system": "Linux-6.1",
        "torch": {"version": "2.13.0", "build": "cpu", "cpu_capability": "AVX512", "threads": 8, "interop_threads": 8},
        "cpu": {"model": "P", "cores": 8, "logical_cores": 16, "usable_cores": 16, "instruction_sets": ["avx2"]},
        "memory": {
            "total_bytes": 64 * GIB,
            "available_bytes": 50 * GIB,
            "swap_total_bytes": 8 * GIB,
            "swap_used_bytes": 0,
            "limit_bytes": None,
        },
        "devices": [],
        "accelerator_files": [],
        "disk": {"folder": "/data", "total_bytes": 500 * GIB, "free_bytes": 200 * GIB},
        "bandwidth": [
            {"what": what, "bytes_per_s": rate * GIB, "low": rate * GIB, "high": rate * GIB, "payload_bytes": GIB, "note": ""}
            for what, rate in rates.items()
        ],
        "compilers": {"c++": "g++ 12", "ninja": None, "triton": None, "nvcc": None},
        "distributed": {"gloo": True, "nccl": False},
        "allocator": {},
        "packages": {"data": {"tokenizers": None}},
    }


def test_this_machine_is_described_truly(machine):
    assert machine["laneway"] == laneway.__version__
    assert machine["torch"]["version"] == torch.__version__
    assert machine["torch"]["threads"] == torch.get_num_threads()
    assert machine["memory"]["total_bytes"] == psutil.virtual_memory().total
    assert machine["cpu"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert bool(machine["devices"]) == torch.accelerator.is_available()
    assert machine["distributed"]["gloo"] == torch.distributed.is_gloo_available()
    capability = machine["torch"]["cpu_capability"]
    assert capability not in ("AVX2", "AVX512") or "avx2" in machine["cpu"]["instruction_sets"]
    assert set(machine["compilers"]) == {"c++", "ninja", "triton", "nvcc"}
    json.dumps(machine, allow_nan=False)


def test_every_tier_of_this_machine_is_measured(machine):
    rates = {rate["what"]: rate for rate in machine["bandwidth"]}
    assert {"memory copy", "memory, fresh tensor", "disk write", "disk read"} <= set(rates)
    assert len(rates) == 4 + 3 * bool(machine["devices"])
    for rate in rates.values():
        assert 1e6 < rate["low"] <= rate["bytes_per_s"] <= rate["high"] < 1e13
        assert rate["payload_bytes"] > 0
    assert "page cache" in rates["disk write"]["note"]


def test_the_look_takes_less_than_its_promise(tmp_path):
    start = time.perf_counter()
    describe_machine(tmp_path)
    assert time.perf_counter() - start < 15


def test_rates_are_payload_over_time():
    rate = measure("nap", 10**7, lambda: time.sleep(0.02), seconds=0.1)
    assert 2e8 < rate.low <= rate.bytes_per_s <= rate.high <= 5.1e8, "10 MB in 20 ms (and the scheduler's delay)"


def test_memory_buffers_are_bounded_by_what_is_free():
    assert {rate.payload_bytes for rate in memory_rates(64 << 20)} == {4 << 20}
    assert {rate.payload_bytes for rate in memory_rates(1)} == {1 << 20}
    assert {rate.payload_bytes for rate in memory_rates(1 << 50)} == {bandwidth.MEMORY_BYTES}


@pytest.mark.parametrize("direct", [True, False])
def test_disk_is_written_read_and_left_clean(tmp_path, direct):
    write, read = disk_rates(tmp_path, size=24 << 20, direct=direct)
    assert (write.what, read.what) == ("disk write", "disk read")
    assert write.payload_bytes == 24 << 20
    assert read.payload_bytes == write.payload_bytes, "all that was written is read back"
    assert write.note in ("page cache bypassed", "page cache may take part")
    assert direct or write.note == "page cache may take part"
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_refuses_direct_writes_is_measured_through_the_cache(tmp_path, monkeypatch):
    real = os.write
    calls = []

    def refuse_first(descriptor, data):
        calls.append(len(data))
        if len(calls) == 1:
            raise OSError(22, "Invalid argument")
        return real(descriptor, data)

    monkeypatch.setattr(bandwidth, "_go_direct", lambda descriptor: len(calls) == 0)
    monkeypatch.setattr(os, "write", refuse_first)
    write, _ = disk_rates(tmp_path, size=16 << 20)
    assert write.note == "page cache may take part"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_and_is_said(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        disk_rates(tmp_path)
    assert list(tmp_path.iterdir()) == []
    seen = describe_machine(tmp_path)
    assert seen["disk"]["error"] == "not measured: No space left on device"
    assert {rate["what"] for rate in seen["bandwidth"]} == {"memory copy", "memory, fresh tensor"}
    assert ("disk", seen["disk"]["error"]) in machine_lines(seen)


def test_cache_folder_is_the_nearest_that_exists(tmp_path, monkeypatch):
    monkeypatch.setenv("LANEWAY_CACHE", str(tmp_path / "a" / "b"))
    assert cache_folder() == tmp_path
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert cache_folder() == tmp_path / "a" / "b"
    monkeypatch.delenv("LANEWAY_CACHE")
    assert cache_folder().is_dir()


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "1073741824\n", GIB),
        ("memory.max", "max\n", None),
        ("memory/memory.limit_in_bytes", "42", 42),
        (None, "", None),
    ],
)
def test_memory_limit_of_a_control_group(tmp_path, name, text, limit):
    if name:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "ascii")
    assert cgroup_limit(tmp_path) == limit


def test_optional_packages_come_from_the_extras():
    extras = optional_packages()
    assert {"data", "peers"} <= set(extras)
    assert set(extras["data"]) == {"tokenizers"}
    assert "pytest" in extras["dev"]
    assert extras["dev"]["pytest"] == pytest.__version__
    assert optional_packages("no-such-distribution-anywhere") == {}


def test_accelerator_files_exist():
    assert all(Path(name).exists() for name in accelerator_files())


def change(machine, path, value):
    changed = copy.deepcopy(machine)
    place = changed
    *way, last = path.split(".")
    for part in way:
        place = place[part]
    place[last] = value
    return changed


def rate(machine, what, gib):
    changed = copy.deepcopy(machine)
    for entry in changed["bandwidth"]:
        if entry["what"] == what:
            entry["bytes_per_s"] = gib * GIB
    return changed


def test_a_good_machine_has_no_findings(good):
    assert examine_machine(good) == []


@pytest.mark.parametrize(
    ("bad", "rule", "evidence"),
    [
        (lambda m: change(m, "torch.version", "2.8.1+cpu"), "old-torch", "version 2.8.1+cpu"),
        (lambda m: change(m, "accelerator_files", ["/dev/nvidia0"]), "unused-accelerator", "torch 2.13.0 is built for cpu"),
        (lambda m: change(m, "compilers.c++", None), "no-compiler", "neither"),
        (lambda m: change(m, "torch.threads", 17), "threads", "17 threads, 16 usable"),
        (lambda m: change(m, "torch.threads", 3), "threads", "3 threads"),
        (
            lambda m: rate(m, "memory, fresh tensor", 2.0),
            "fresh-memory",
            "fresh tensor 2.0 GiB/s, into an existing one 9.0 GiB/s",
        ),
        (lambda m: change(m, "memory.available_bytes", GIB // 2), "little-memory", "0.5 GiB of 64.0 GiB"),
        (lambda m: change(m, "memory.swap_used_bytes", 7 * GIB), "swapping", "7.0 GiB in swap"),
        (lambda m: change(m, "disk.free_bytes", GIB), "full-disk", "1.0 GiB of 500.0 GiB free in /data"),
        (lambda m: rate(m, "disk write", 0.02), "slow-disk", "takes 56 s"),
    ],
)
def test_what_a_machine_lacks_is_found_with_its_knob(good, bad, rule, evidence):
    (found,) = examine_machine(bad(good))
    assert found.rule == rule
    assert evidence in found.evidence
    assert found.knobs
    assert found.threshold


def test_rules_know_when_not_to_speak(good):
    slow = rate(good, "memory, fresh tensor", 2.0)
    assert examine_machine(change(slow, "allocator", {"MALLOC_MMAP_THRESHOLD_": "1073741824"})) == []
    assert examine_machine(change(slow, "system", "macOS-15")) == []
    assert examine_machine(change(good, "torch.version", "2.10.0a0+git")) == [], "2.10 is newer than 2.9"
    device = [{"device": "cuda:0", "name": "X", "total_bytes": GIB}]
    assert examine_machine(change(change(good, "accelerator_files", ["/dev/nvidia0"]), "devices", device)) == []
    assert examine_machine(change(change(good, "disk.total_bytes", 9000 * GIB), "disk.free_bytes", 60 * GIB)) == []
    assert examine_machine(change(good, "bandwidth", [])) == [], "what was not measured is no finding"


def test_a_memory_limit_counts_as_the_memory(good):
    limited = change(change(good, "memory.limit_bytes", 4 * GIB), "memory.available_bytes", 2 * GIB)
    assert examine_machine(limited) == []
    assert "limited to 4.0 GiB" in dict(machine_lines(limited))["memory"]


def test_machine_rules_are_named_once():
    assert len({rule.name for rule in MACHINE_RULES}) == len(MACHINE_RULES)


class Terminal(io.StringIO):
    """Text that passes for a terminal."""

    def isatty(self) -> bool:
        return True


FINDING = Finding(
    "a-rule", "something [bold]odd[/bold]", "7 of 9", (Knob("optimizer.lr", "lower"), Knob("steps", "more")), "above 3"
)


def test_plain_lines_where_there_is_no_terminal(good):
    out = io.StringIO()
    show("title", machine_lines(good), [FINDING], "fine", out)
    text = out.getvalue()
    assert "memory copy: 9.00 GiB/s, 1024 MiB\n" in text
    assert "device: no accelerator\n" in text
    assert "extra data: tokenizers absent\n" in text
    assert text.endswith(
        "finding: a-rule: something [bold]odd[/bold]\n  evidence: 7 of 9\n  knob: optimizer.lr: lower\n  knob: steps: more\n"
    )
    assert "\x1b" not in text
    assert "fine" not in text


def test_tables_on_a_terminal(good, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    show("title", machine_lines(good), [FINDING], "fine", out)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert "something [bold]odd[/bold]" in text, "text from outside is no markup"
    assert "optimizer.lr: lower" in text
    assert "1 finding" in text
    assert "│" in text


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()])
def test_nothing_found_is_said(out):
    show("title", [("run", "x")], [], "healthy: nothing", out)
    assert "healthy: nothing" in out.getvalue()


def test_devices_are_listed(good):
    lines = machine_lines(change(good, "devices", [{"device": "cuda:0", "name": "H", "total_bytes": 80 * GIB}]))
    assert ("device", "cuda:0 H, 80.0 GiB") in lines
    assert ("device", "no accelerator") not in lines


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator on this machine")
def test_accelerator_copies_are_measured():
    rates = bandwidth.device_rates()
    assert len(rates) == 3
    assert rates[0].bytes_per_s > rates[1].bytes_per_s, "its own memory is faster than the way to it"
