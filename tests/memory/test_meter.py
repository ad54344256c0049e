"""What is in use, was in use at most, and is there at all; the counting allocator's meter is in test_counting.py."""

from __future__ import annotations

import resource
import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch

from laneway.core import LanewayError
from laneway.memory.counting import CountingAllocator
from laneway.memory.meter import AcceleratorMeter, Meter, ProcessMeter, device_meter, host_capacity

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone")
MIB = 1 << 20


@linux
def test_resident_memory_rises_with_what_is_written_and_its_peak_can_be_reset(monkeypatch):
    monkeypatch.setattr(CountingAllocator, "_installed", None)  # another test of this process may have
    meter = device_meter(torch.device("cpu"))
    assert isinstance(meter, ProcessMeter)
    assert isinstance(meter, Meter)
    meter.reset_peak()
    start = meter.live()
    block = np.ones(128 * MIB, dtype=np.uint8)
    full = meter.live()
    assert 120 * MIB < full - start < 160 * MIB
    del block
    assert meter.live() < full - 100 * MIB
    assert meter.peak() >= full - 8 * MIB
    meter.reset_peak()
    assert meter.peak() < full - 100 * MIB
    assert meter.peak() >= meter.live() - 8 * MIB


@linux
def test_resident_memory_is_what_others_measure():
    assert abs(ProcessMeter().live() - psutil.Process().memory_info().rss) < 16 * MIB


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(LanewayError, match="resident memory is read from"):
        ProcessMeter(tmp_path)
    with pytest.raises(LanewayError, match="the size of host memory is read from"):
        host_capacity(tmp_path, tmp_path)


def test_a_peak_that_cannot_be_reset_is_said(tmp_path):
    (tmp_path / "statm").write_text("100 50 1 1 0 1 0\n")
    (tmp_path / "status").write_text("Name:\tx\nVmHWM:\t  4000 kB\n")
    (tmp_path / "clear_refs").mkdir()
    meter = ProcessMeter(tmp_path)
    assert (meter.live(), meter.peak()) == (50 * resource.getpagesize(), 4000 * 1024)
    with pytest.raises(LanewayError, match="cannot be reset"):
        meter.reset_peak()


def test_a_device_without_a_meter_is_named():
    with pytest.raises(LanewayError, match=r"no memory meter for device 'meta'; accepted here: cpu"):
        device_meter(torch.device("meta"))


@pytest.fixture
def machine(tmp_path):
    """A machine of 8 GiB: → a function that writes files and returns the capacity that is read from them."""

    def make(groups: str, **limits: str) -> int:
        for folder in ("proc/self", "cgroup"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/meminfo").write_text(f"MemTotal:       {8 * MIB} kB\nMemFree: 1 kB\n")
        (tmp_path / "proc/self/cgroup").write_text(groups)
        for name, text in limits.items():
            file = tmp_path / "cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        return host_capacity(tmp_path / "proc", tmp_path / "cgroup")

    return make


V1 = "5:devices:/\n4:memory:/pod/one\n1:name=systemd:/\n0::/other\n"
UNLIMITED_V1 = "9223372036854771712"
GIB = 1 << 30


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("", {}, 8 * GIB),
        ("0::/\n", {"memory.max": "max"}, 8 * GIB),
        ("0::/\n", {"memory.max": str(2 * GIB)}, 2 * GIB),
        ("0::/pod/one\n", {"pod/memory.max": str(3 * GIB), "pod/one/memory.max": "max"}, 3 * GIB),
        ("0::/pod/one\n", {"pod/memory.max": str(3 * GIB), "pod/one/memory.max": str(GIB)}, GIB),
        ("0::/pod/one\n", {"pod/two/memory.max": str(GIB)}, 8 * GIB),
        ("0::/not/visible/here\n", {"memory.max": str(4 * GIB)}, 4 * GIB),
        ("0::/\n", {"memory.max": str(16 * GIB)}, 8 * GIB),
        (V1, {"memory/memory.limit_in_bytes": UNLIMITED_V1}, 8 * GIB),
        (V1, {"memory/pod/one/memory.limit_in_bytes": str(GIB)}, GIB),
        (V1, {"memory/pod/memory.limit_in_bytes": str(2 * GIB), "memory/pod/one/memory.limit_in_bytes": UNLIMITED_V1}, 2 * GIB),
        ("4:cpu,memory:/pod\n", {"cpu,memory/pod/memory.limit_in_bytes": str(GIB)}, GIB),
        ("4:memory:/pod:with/colon\n", {"memory/pod:with/colon/memory.limit_in_bytes": str(GIB)}, GIB),
    ],
)
def test_capacity_is_the_least_of_the_limits(machine, groups, limits, expected):
    assert machine(groups, **limits) == expected


@linux
def test_capacity_here():
    assert 0 < host_capacity() <= psutil.virtual_memory().total


@linux
def test_a_limit_of_the_address_space_counts():
    code = """
import resource
from laneway.memory.meter import host_capacity
free = host_capacity()
resource.setrlimit(resource.RLIMIT_AS, (free // 2, resource.RLIM_INFINITY))
print(free, host_capacity())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    free, limited = map(int, done.stdout.split())
    assert limited == free // 2


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_an_accelerator_counts_its_tensors():
    device = torch.accelerator.current_accelerator()
    meter = device_meter(device)
    assert isinstance(meter, AcceleratorMeter)
    kept = torch.ones(MIB, device=device)
    meter.reset_peak()
    start = meter.live()
    assert meter.peak() == start
    more = torch.ones(MIB, device=device)
    assert meter.live() - start == more.nbytes
    del more
    assert meter.live() == start >= kept.nbytes
    assert meter.peak() - start == 4 * MIB
    assert meter.capacity() > meter.peak()
