"""Every field by itself, the environment by its variables, and which source wins."""

import dataclasses
import math
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.cli._parse import parse
from laneway.core import InputError
from laneway.memory.config import VARIABLES, MemoryConfig, check_host_buffer, from_environment, parse_bytes, resolve
from laneway.sizes import LARGEST_HOST_BUFFER_RATIO, host_buffer_advice
from laneway.train.settings import merge, to_toml

GIB = 1 << 30


def test_the_default_is_fine_and_off():
    config = MemoryConfig()
    assert config.problems() == []
    assert not config.on
    assert config.budget_bytes(GIB) is None


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("budget", "lots", "empty (off), auto, or a number of bytes"),
        ("budget", "4G", "write GiB (1024) or GB (1000)"),
        ("budget", 0, "to turn it off, leave it empty"),
        ("budget", "0MB", "to turn it off, leave it empty"),
        ("budget", -5, "a number of bytes"),
        ("budget", 1.5, "a number of bytes"),
        ("budget", True, "a number of bytes"),
        ("policy", "lfu", "one of cost_aware, lru, fifo"),
        ("policy", "cost-aware", "did you mean 'cost_aware'?"),
        ("tier", "nvme", "one of auto, host, disk, host+disk"),
        ("folder", "a\0b", "the path of a folder"),
        ("folder", 3, "the path of a folder"),
        ("host_buffer_ratio", 0.96, "a number from 0 to 0.95"),
        ("host_buffer_ratio", -0.1, "a number from 0 to 0.95"),
        ("host_buffer_ratio", math.nan, "a number from 0 to 0.95"),
        ("host_buffer_ratio", "0.5", "a number from 0 to 0.95"),
        ("host_buffer_ratio", True, "a number from 0 to 0.95"),
        ("max_swap_ops_per_second", -1, "an integer ≥ 0"),
        ("max_swap_ops_per_second", 2.5, "an integer ≥ 0"),
        ("max_bytes_per_second", -1, "an integer ≥ 0"),
        ("max_bytes_per_second", "2GB", "an integer ≥ 0"),
        ("collective_reservation", 1.01, "a number from 0 to 1"),
        ("collective_reservation", None, "a number from 0 to 1"),
        ("solver", "simplex", "one of greedy, milp"),
        ("min_bytes", -1, "an integer ≥ 0"),
        ("saved_tensors", "int4", "one of exact, int8"),
        ("gradients", "streamed", "one of resident, parked"),
        ("parameters", "parked", "one of resident, streamed"),
    ],
)
def test_a_wrong_value_is_named(field, value, words):
    (problem,) = MemoryConfig(**{field: value}).problems("mem")
    assert problem.field == f"mem.{field}"
    assert words in str(problem)
    with pytest.raises(InputError, match=rf"memory\.{field}: got"):
        MemoryConfig(**{field: value}).check()


def test_all_problems_are_told_at_once():
    wrong = MemoryConfig(budget="x", policy="x", tier="x", host_buffer_ratio=2, solver="x", min_bytes=-1)
    assert [problem.field for problem in wrong.problems("m")] == [
        "m.budget", "m.policy", "m.tier", "m.host_buffer_ratio", "m.solver", "m.min_bytes",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1.5GiB", 3 * GIB // 2),
        ("800MB", 800_000_000),
        ("800 mb", 800_000_000),
        (" 64KiB ", 65536),
        ("6Gi", 6 * GIB),
        ("2TiB", 2 << 40),
        ("0.1kB", 100),
        (".5B", 0),
        ("12", 12),
        ("7 B", 7),
        (12, 12),
        (0, 0),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_bytes("x", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1.5.2GB", "-3MB", "1e9", "4G", "4 gibi", "٣MB", None, 1.0, True, -1])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match=r"some.field: got .* accepted: a number of bytes such as"):
        parse_bytes("some.field", text)


@given(st.integers(0, 2**60), st.sampled_from([("", 1), ("kB", 1000), ("KiB", 1024), ("GB", 10**9), ("Ti", 1 << 40)]))
def test_whole_sizes_are_exact(number, unit):
    assert parse_bytes("x", f"{number}{unit[0]}") == number * unit[1]


def test_a_budget_in_bytes():
    assert MemoryConfig(budget="auto").budget_bytes(1000) == 820
    assert MemoryConfig(budget="1KiB").budget_bytes(5000) == 1024
    assert MemoryConfig(budget=1024).budget_bytes(1024) == 1024
    with pytest.raises(InputError, match=r"memory.budget: got '2KiB'; accepted: at most what the device holds, 1024 bytes"):
        MemoryConfig(budget="2KiB").budget_bytes(1024)
    assert MemoryConfig(host_buffer_ratio=0.25).host_buffer_bytes(1000) == 250


@dataclasses.dataclass(frozen=True)
class Whole:
    """A configuration that has the manager's among its groups, as a training run may."""

    steps: int = 1
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)


@settings(deadline=None)
@given(st.sampled_from(["", "auto", "1.5GiB", 123456, "800MB"]), st.floats(0, 0.95), st.integers(0, 10**6))
def test_files_and_flags_hold_every_field(budget, ratio, cap):
    config = Whole(memory=MemoryConfig(budget=budget, host_buffer_ratio=ratio, max_swap_ops_per_second=cap, solver="milp"))
    read, wrong = merge(Whole(), tomllib.loads(to_toml(config)))
    assert (read, wrong) == (config, [])
    flags = ["--memory.budget", str(budget), "--memory.host-buffer-ratio", repr(ratio), "--memory.solver", "milp"]
    flagged = parse(Whole, [*flags, "--memory.max-swap-ops-per-second", str(cap)], prog="x").memory
    assert flagged.problems() == []
    assert flagged.budget_bytes(1 << 40) == config.memory.budget_bytes(1 << 40)
    assert (flagged.host_buffer_ratio, flagged.solver, flagged.max_swap_ops_per_second) == (ratio, "milp", cap)


# The environment

GIVEN = {
    "budget": ("1.5GiB", "1.5GiB"),
    "policy": ("lru", "lru"),
    "tier": ("disk", "disk"),
    "folder": ("/scratch/swap", "/scratch/swap"),
    "host_buffer_ratio": ("0.75", 0.75),
    "max_swap_ops_per_second": ("200", 200),
    "max_bytes_per_second": ("2GB", 2_000_000_000),
    "collective_reservation": ("0.25", 0.25),
    "solver": ("milp", "milp"),
    "saved_tensors": ("int8", "int8"),
    "gradients": ("parked", "parked"),
    "parameters": ("streamed", "streamed"),
    "min_bytes": ("128KiB", 131072),
    "optimizer_state": ("streamed", "streamed"),
    "optimizer_bits": ("8", 8),
    "replay": ("False", False),
}


def test_every_field_has_one_variable():
    fields = [field.name for field in dataclasses.fields(MemoryConfig)]
    assert list(VARIABLES) == fields
    assert len(set(VARIABLES.values())) == len(fields)
    assert all(variable.startswith("MHC_") for variable in VARIABLES.values())
    assert set(GIVEN) == set(fields)


@pytest.mark.parametrize("field", GIVEN)
def test_a_variable_sets_its_field_and_no_other(field):
    text, value = GIVEN[field]
    assert from_environment({VARIABLES[field]: text}) == {field: value}
    assert resolve(environ={VARIABLES[field]: text}) == MemoryConfig(**{field: value})


def test_names_that_the_world_knows():
    environ = {"MHC_CPU_BUFFER_RATIO": "0.6", "MHC_EVICTION_STRATEGY": "fifo", "MHC_MAX_SWAP_OPS_PER_SEC": "50"}
    assert from_environment(environ) == {"host_buffer_ratio": 0.6, "policy": "fifo", "max_swap_ops_per_second": 50}


def test_nothing_given_is_nothing(monkeypatch):
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    assert from_environment() == {}
    assert from_environment(dict.fromkeys(VARIABLES.values(), " ")) == {}
    monkeypatch.setenv("MHC_EVICTION_STRATEGY", "lru")
    assert from_environment() == {"policy": "lru"}
    assert resolve().policy == "lru"


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("MHC_MEMORY_BUDGET", "4G", "write GiB (1024) or GB (1000)"),
        ("MHC_MEMORY_BUDGET", "0", "to turn it off, leave it empty"),
        ("MHC_EVICTION_STRATEGY", "belady", "one of cost_aware, lru, fifo"),
        ("MHC_EVICTION_STRATEGY", "LRU", "did you mean 'lru'?"),
        ("MHC_SAVED_TENSORS", "INT8", "did you mean 'int8'?"),
        ("MHC_MEMORY_TIER", "ssd", "one of auto, host, disk"),
        ("MHC_CPU_BUFFER_RATIO", "80%", "a number from 0 to 0.95"),
        ("MHC_CPU_BUFFER_RATIO", "nan", "a number from 0 to 0.95"),
        ("MHC_CPU_BUFFER_RATIO", "1", "a number from 0 to 0.95"),
        ("MHC_MAX_SWAP_OPS_PER_SEC", "-1", "an integer ≥ 0"),
        ("MHC_MAX_SWAP_OPS_PER_SEC", "1.5", "an integer ≥ 0"),
        ("MHC_MAX_SWAP_BYTES_PER_SEC", "fast", "a number of bytes"),
        ("MHC_COLLECTIVE_RESERVATION", "2", "a number from 0 to 1"),
        ("MHC_PLAN_SOLVER", "gready", "did you mean 'greedy'?"),
        ("MHC_OPTIMIZER_BITS", "16", "32, 8 or 4"),
        ("MHC_OPTIMIZER_BITS", "eight", "32, 8 or 4"),
        ("MHC_MIN_SWAP_BYTES", "1K", "write KiB (1024) or KB (1000)"),
        ("MHC_CPU_BUFER_RATIO", "0.5", "did you mean 'MHC_CPU_BUFFER_RATIO'?"),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(variable, text, words):
    with pytest.raises(InputError) as caught:
        from_environment({variable: text})
    assert caught.value.field == variable
    assert caught.value.given == text
    assert words in str(caught.value)


def test_variables_of_others_are_left_alone():
    assert from_environment({"MHC_SOMETHING_ELSE": "1", "PATH": "x"}) == {}


SOURCES = st.dictionaries(st.sampled_from(sorted(GIVEN)), st.sampled_from((0, 1)))
OTHER = {"saved_tensors": "exact", "gradients": "resident", "parameters": "resident",
         "budget": 77, "policy": "fifo", "tier": "host", "folder": "/x", "host_buffer_ratio": 0.1, "max_swap_ops_per_second": 9,
         "max_bytes_per_second": 8, "collective_reservation": 0.0, "solver": "greedy", "min_bytes": 0,
         "optimizer_state": "device", "optimizer_bits": 4, "replay": True}  # fmt: skip


@given(st.sets(st.sampled_from(sorted(GIVEN))), SOURCES, SOURCES)
def test_the_later_source_wins(environment, file, arguments):
    def values(chosen: dict[str, int]) -> dict:
        return {field: (GIVEN[field][1], OTHER[field])[which] for field, which in chosen.items()}

    environ = {VARIABLES[field]: GIVEN[field][0] for field in environment}
    config = resolve(values(file), values(arguments), environ)
    for field in GIVEN:
        default = getattr(MemoryConfig(), field)
        layers = [values(arguments), values(file), {name: GIVEN[name][1] for name in environment}, {field: default}]
        assert getattr(config, field) == next(layer[field] for layer in layers if field in layer)


def test_unknown_fields_and_wrong_values_are_refused_whatever_their_source():
    with pytest.raises(InputError, match=r"memory.budgte: .* did you mean 'budget'\?"):
        resolve({"budgte": 3}, environ={})
    with pytest.raises(InputError, match=r"memory\.policy: got 'x'"):
        resolve(arguments={"policy": "x"}, environ={})
    with pytest.raises(InputError, match="MHC_PLAN_SOLVER: got 'x'"):
        resolve({"solver": "milp"}, environ={"MHC_PLAN_SOLVER": "x"})


# The size of the host buffer


@given(st.floats(1, 4000), st.floats(0, LARGEST_HOST_BUFFER_RATIO), st.floats(0.5, 2000))
def test_the_sizing_rule_is_two_and_a_half_times_the_device(host, ratio, device):
    told = check_host_buffer(host * GIB, ratio, device * GIB)
    assert (told is None) == (host * GIB * ratio >= 2.5 * device * GIB)


def test_the_sizing_rule_says_the_numbers():
    told = check_host_buffer(256 * GIB, 0.5, 80 * GIB)
    assert told == (
        "the host buffer (0.5 of 256.0 GiB = 128.0 GiB) holds 1.6 times the device memory of 80.0 GiB; 2.5 to 3 times are advised"
    )
    assert host_buffer_advice(256 * GIB, 80 * GIB) == "at least 0.79"
    assert check_host_buffer(256 * GIB, 0.79, 80 * GIB) is None
    assert "a host with 210.5 GiB would" in host_buffer_advice(128 * GIB, 80 * GIB)
