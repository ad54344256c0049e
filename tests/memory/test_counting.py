"""The counting allocator: exact to the byte, a limit that raises, blocks of whole pages, and nothing lost after a failure.

It is the process's allocator for good, so it runs in processes of its own (counting_checks.py).
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from laneway import native
from laneway.memory import counting

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone"),
    pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler"),
]
CHECKS = Path(__file__).with_name("counting_checks.py")


class Process:
    """A process with the allocator; a call runs one of its checks."""

    def __init__(self, mode):
        self.mode = mode
        self.running = subprocess.Popen(
            [sys.executable, CHECKS, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __call__(self, name, *arguments):
        self.running.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.running.stdin.flush()
        answer = self.running.stdout.readline()
        assert answer, self.running.stderr.read()
        return json.loads(answer)

    def end(self):
        return self.running.communicate()[1], self.running.returncode


@pytest.fixture(scope="module")
def _built():
    counting.build()


@pytest.fixture(scope="module", params=["plain", "caching"])
def process(request, _built):
    process = Process(request.param)
    yield process
    errors, code = process.end()
    assert code == 0, errors


plain = pytest.mark.parametrize("process", ["plain"], indirect=True)
caching = pytest.mark.parametrize("process", ["caching"], indirect=True)


def test_live_and_peak_of_a_sequence_reckoned_by_hand(process):
    fp32 = 4 * 1000
    assert process("by_hand") == [
        [fp32, fp32],
        [2 * fp32, 2 * fp32],
        [fp32, 2 * fp32],
        [100_000, fp32 + 100_000],  # both, while one is copied into the other
        [100_000, fp32 + 100_000],
        [0, 0],
    ]


def test_random_sequences_are_counted_to_the_byte(process):
    for _ in range(10):
        seed = random.randrange(1 << 30)
        counted, own = process("sequence", seed)
        assert counted == own, seed


def test_over_the_limit_is_torchs_out_of_memory_and_the_process_goes_on(process):
    facts = process("over_the_limit")
    wanted, live, limit = facts.pop("expected")
    message = facts.pop("message")
    assert f"wanted {wanted} bytes, live {live} bytes, limit {limit} bytes" in message
    assert facts.pop("live") == facts.pop("left") == 0
    assert facts.pop("refused") == 2
    assert all(facts.values()), facts


def test_where_the_system_has_no_more_it_says_so(process):
    message, left = process("without_memory")
    assert "the system has no more" in message
    assert left == 0


def test_big_blocks_are_whole_pages_and_small_ones_are_told_apart(process):
    facts = process("alignment")
    assert facts.pop("small mapped") == facts.pop("older mapped") == 0
    assert all(facts.values()), facts


def test_files_are_read_and_written_straight_from_a_storage(process, tmp_path):
    facts = process("whole_pages", str(tmp_path / "file"))
    if "skip" in facts:
        pytest.skip(facts["skip"])
    assert facts["bytes"] == [facts["pages"]] * 2
    assert facts["exact"]
    assert facts["untouched"]


@plain
def test_freed_blocks_go_back_to_the_system(process):
    facts = process("resident_memory")
    assert facts["rise"] > 60 << 20
    assert facts["fall"] > 60 << 20
    assert facts["cached"] == 0


@caching
def test_the_cache_keeps_blocks_until_it_is_emptied(process):
    facts = process("cache")
    assert facts["emptied"] == facts["after"] == facts["taken"] == 0
    assert facts["cached"] == facts["mapped"] >= 1_000_000
    assert facts["same block"]
    assert facts["counted"]
    kept, returned = facts["given back"]
    assert kept < 4 << 20
    assert returned > 60 << 20
    assert facts["usable"] == 3_000_000


@caching
def test_the_cache_is_given_up_before_an_allocation_fails(process):
    cached, refusal, too_much = process("cache_gives_way")
    assert cached == 96 << 20
    assert refusal is None
    assert "the system has no more" in too_much


def test_threads(process):
    facts = process("threads", 6, 1500)
    assert facts["wrong"] == []
    assert facts["left"] == 0
    assert facts["refused"] > 50
    assert 0.9 * facts["limit"] < facts["peak"] <= facts["limit"]


def test_a_forked_child_allocates_whatever_other_threads_did(process):
    assert set(process("forks", 15)) == {0}


def test_the_log_holds_the_newest_events(process):
    facts = process("log")
    assert facts["roomy"] == [1000, 100_000, -1000]
    assert facts["recorded"] == 3
    assert facts["times"] == sorted(facts["times"])
    assert facts["narrow"] == [5, -5]
    assert facts["narrow recorded"] == 3
    assert facts["ended"] == [[], 0]


def test_training_gives_the_same_bits(process):
    without = "import torch, counting_checks; torch.set_num_threads(1); print(counting_checks.trained())"
    done = subprocess.run([sys.executable, "-c", without], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    assert process("trained") == done.stdout.strip()


def test_every_allocation_of_a_step_can_fail_and_the_next_step_is_right(process):
    facts = process("failing_everywhere")
    assert facts["allocations"] > 50
    assert facts["raised"] == facts["right after it"] == facts["allocations"]
    assert facts["left"] == 0
    assert facts["not reached"]
    assert facts["fails in"] == 1
    assert facts["taken back"] == 0


def test_a_requested_failure_comes_once_and_counts_only_what_is_big_enough(process):
    raised, message = process("failing_once")
    assert raised == [False, False, False, True, False]
    assert "a failure that was asked for" in message
    assert "wanted 5000 bytes" in message


@plain
def test_torchs_profiler_sees_the_bytes(process):
    seen, asked = process("profiled")
    assert seen == asked


def test_copy_on_write(process):
    assert process("lazily_cloned") == [400_000, 800_000, 100_000.0, 200_000.0]


RAW = """
#include <c10/core/CPUAllocator.h>
#include <cstring>
extern "C" int64_t raw(size_t n) {
  c10::Allocator* a = c10::GetCPUAllocator();
  char* p = static_cast<char*>(a->raw_allocate(n));
  std::memset(p, 3, n);
  c10::DataPtr copy = a->clone(p, n);
  const bool right = !std::memcmp(copy.get(), p, n) && copy.get() != p && a->is_simple_data_ptr(copy);
  a->raw_deallocate(p);
  void* none = a->raw_allocate(0);
  a->raw_deallocate(none);
  return right && !none ? n : 0;
}
"""


@pytest.fixture(scope="module")
def raw_library(tmp_path_factory):
    source = tmp_path_factory.mktemp("raw") / "raw.cpp"
    source.write_text(RAW)
    target = source.with_suffix(".so")
    flags = ("-std=c++20", "-fPIC", "-shared")
    return native.Library("raw", "the caller", source, flags, uses_torch=True).build(target).path


def test_the_raw_interface_and_clone(process, raw_library):
    assert process("raw", str(raw_library)) == {"returned": 100_100, "left": 0}


def test_installing_twice(process):
    same, refusal = process("installing")
    assert same
    had = process.mode == "caching"
    assert refusal == f"caching: got {not had}; accepted: {had}, as the counting allocator was installed with"


def test_bad_input_is_named(process):
    messages, limit = process("bad_input")
    starts = ["nbytes: got 0", "allocation: got -1", "min_bytes: got -5", "events: got 0", "nbytes: got 2.5"]
    assert [m[: len(s)] for m, s in zip(messages, starts, strict=True)] == starts
    assert limit is None


def test_the_meter_of_the_cpu_counts(process):
    facts = process("meter")
    assert facts == {
        "counting": True,
        "live": 1_000_000,
        "peak": 1_000_000,
        "live after": 0,
        "reset": 0,
        "capacity": 1 << 25,
        "unlimited": True,
    }


def test_tensors_from_before_are_freed_by_their_own_allocator(process):
    grown, expected, total = process("older_tensors")
    assert grown == expected
    assert total == 200_000.0


def test_without_a_compiler_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("LANEWAY_CACHE", str(tmp_path))
    monkeypatch.setattr(counting.CountingAllocator, "_installed", None)  # another test of this process may have
    with pytest.raises(native.BuildError, match=r"no C\+\+ compiler"):
        counting.CountingAllocator.install()
    assert counting.CountingAllocator.installed() is None
