"""Findings about the machine: rules over what ``machine.describe_machine`` saw."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from laneway.core import InputError
from laneway.doctor.finding import Finding, Knob, Symptom
from laneway.doctor.rules_memory import VARIABLES, host_buffer_symptom, memory_knob
from laneway.sizes import DEFAULT_HOST_BUFFER_RATIO, LARGEST_HOST_BUFFER_RATIO, budget_bytes, parse_fraction

Machine = dict[str, Any]
GIB = 2.0**30
LEAST_TORCH = (2, 9)


@dataclass(frozen=True)
class MachineRule:
    """Like ``rules.Rule``, over the machine."""

    name: str
    threshold: str
    check: Callable[[Machine], Symptom | None]


def _rate(machine: Machine, what: str) -> float | None:
    return next((rate["bytes_per_s"] for rate in machine["bandwidth"] if rate["what"] == what), None)


def old_torch(machine: Machine) -> Symptom | None:
    """A torch that we don't support."""
    version = machine["torch"]["version"]
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) >= LEAST_TORCH:
        return None
    return Symptom("torch is too old", f"version {version}", (Knob("torch", "pip install 'torch>=2.9'"),))


def unused_accelerator(machine: Machine) -> Symptom | None:
    """Hardware that torch can't use."""
    files = machine["accelerator_files"]
    if machine["devices"] or not files:
        return None
    build = machine["torch"]["build"]
    return Symptom(
        "there is an accelerator, but torch does not use it",
        f"{files[0]} exists; torch {machine['torch']['version']} is built for {build}",
        (Knob("torch", "install the build for this accelerator (see pytorch.org), or look at the driver"),),
    )


def no_compiler(machine: Machine) -> Symptom | None:
    """torch.compile on a CPU writes C++."""
    if machine["compilers"]["c++"]:
        return None
    return Symptom(
        "no C++ compiler: torch.compile does not work on this CPU",
        "neither $CXX nor c++, g++ or clang++ runs",
        (Knob("c++", "install g++ or clang (Debian, Ubuntu: apt install g++)"), Knob("compile", "leave it false until then")),
    )


def threads(machine: Machine) -> Symptom | None:
    """Threads and cores do not match."""
    used, usable = machine["torch"]["threads"], machine["cpu"]["usable_cores"]
    cores = min(usable, machine["cpu"]["cores"] or usable)
    if used > usable:
        text = "more threads than cores: they wait for each other"
    elif used < cores / 2:
        text = "torch uses less than half of the cores"
    else:
        return None
    evidence = f"{used} threads, {usable} usable logical cores ({machine['cpu']['cores']} cores)"
    return Symptom(text, evidence, (Knob("OMP_NUM_THREADS", f"{cores}, or unset"),))


def fresh_memory(machine: Machine) -> Symptom | None:
    """Every fresh tensor faults its pages in."""
    fresh, copy = _rate(machine, "memory, fresh tensor"), _rate(machine, "memory copy")
    tuned = {"MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"} & set(machine["allocator"])
    if fresh is None or copy is None or fresh >= 0.6 * copy or tuned or not machine["system"].startswith("Linux"):
        return None
    return Symptom(
        "fresh tensors are slow: the allocator gives each one back to the system and pays for its pages again",
        f"copy into a fresh tensor {fresh / GIB:.1f} GiB/s, into an existing one {copy / GIB:.1f} GiB/s",
        (
            Knob("MALLOC_MMAP_THRESHOLD_", "1073741824 in the environment: large tensors come from the heap and are reused"),
            Knob("MALLOC_TRIM_THRESHOLD_", "2147483647 with it: what is freed stays with the process"),
        ),
    )


def little_memory(machine: Machine) -> Symptom | None:
    """Hardly any memory is free."""
    memory = machine["memory"]
    free, total = memory["available_bytes"], memory["limit_bytes"] or memory["total_bytes"]
    if free >= max(1 * GIB, 0.1 * total):
        return None
    return Symptom(
        "little memory is free",
        f"{free / GIB:.1f} GiB of {total / GIB:.1f} GiB",
        (Knob("micro_batch_size", "smaller"), Knob("activation_checkpointing", "true")),
    )


def swapping(machine: Machine) -> Symptom | None:
    """Memory lies on disk."""
    memory = machine["memory"]
    if memory["swap_used_bytes"] <= max(0.1 * memory["total_bytes"], 0.5 * GIB):
        return None
    return Symptom(
        "the machine swaps",
        f"{memory['swap_used_bytes'] / GIB:.1f} GiB in swap, {memory['available_bytes'] / GIB:.1f} GiB of memory available",
        (Knob("micro_batch_size", "smaller"), Knob("other processes", "end what is not needed before a run")),
    )


# Swap both ways at 1 MiB/s of 4 KiB pages each: what goes out is wanted back. Or reads that processes wait for while the kernel
# takes more time than it does for a training step, which hardly calls it.
BOTH_WAYS, FAULTS, SYSTEM = 256.0, 100.0, 0.3


def swap_thrash(machine: Machine) -> Symptom | None:
    """Memory goes to disk and comes back, now."""
    paging = machine.get("paging")
    if not paging:
        return None
    both = min(paging["pages_in_per_s"], paging["pages_out_per_s"]) > BOTH_WAYS
    busy = paging["system_share"] > SYSTEM and paging["major_faults_per_s"] > FAULTS
    if not (both or busy):
        return None
    return Symptom(
        "the machine thrashes: memory goes to disk and is wanted back",
        f"{100 * paging['system_share']:.0f} % of the processor time in the kernel; {paging['pages_in_per_s']:,.0f} pages/s in "
        f"from swap, {paging['pages_out_per_s']:,.0f} out; {paging['major_faults_per_s']:,.0f} major faults/s",
        (
            memory_knob("host_buffer_ratio", "lower: the host buffer leaves the system too little"),
            memory_knob("max_swap_ops_per_second", "a cap on the manager's own transfers, while the system swaps beside them"),
            memory_knob("tier", "disk: written round the page cache, it takes no host memory"),
            Knob("micro_batch_size", "smaller"),
        ),
    )


def host_buffer(machine: Machine) -> Symptom | None:
    """The memory manager's host buffer against the devices; nothing where no variable turns the manager on."""
    settings = {field: machine.get("memory_settings", {}).get(name, "").strip() for field, name in VARIABLES.items()}
    devices, tier = machine["devices"], settings["tier"] or "auto"
    if not (settings["budget"] or settings["host_buffer_ratio"]) or tier == "disk" or (not devices and tier != "host"):
        return None
    host = machine["memory"]["limit_bytes"] or machine["memory"]["total_bytes"]
    try:
        ratio = DEFAULT_HOST_BUFFER_RATIO
        if settings["host_buffer_ratio"]:
            ratio = parse_fraction(VARIABLES["host_buffer_ratio"], settings["host_buffer_ratio"], LARGEST_HOST_BUFFER_RATIO)
        device = sum(entry["total_bytes"] for entry in devices)
        if not devices:
            if not settings["budget"]:
                return None
            device = budget_bytes(VARIABLES["budget"], settings["budget"], host)
    except InputError as error:
        return Symptom("a variable of the memory manager is wrong", str(error), (Knob(error.field, error.accepted),))
    return host_buffer_symptom(host, ratio, device)


def full_disk(machine: Machine) -> Symptom | None:
    """No room for checkpoints."""
    disk = machine["disk"]
    if disk["free_bytes"] >= max(2 * GIB, 0.02 * disk["total_bytes"]) or disk["free_bytes"] >= 50 * GIB:
        return None
    return Symptom(
        "the disk is nearly full",
        f"{disk['free_bytes'] / GIB:.1f} GiB of {disk['total_bytes'] / GIB:.1f} GiB free in {disk['folder']}",
        (Knob("keep_checkpoints", "1"), Knob("data.cache", "a folder on another disk")),
    )


def slow_disk(machine: Machine) -> Symptom | None:
    """Checkpoints take long."""
    write = _rate(machine, "disk write")
    if write is None or write >= 50e6:
        return None
    return Symptom(
        "the disk is slow to write",
        f"{write / 1e6:.0f} MB/s: a checkpoint of 100 M parameters with its optimizer state (1.2 GB) takes {1.2e9 / write:.0f} s",
        (Knob("checkpoint_every", "more steps"), Knob("data.cache", "a folder on a faster disk")),
    )


MACHINE_RULES: tuple[MachineRule, ...] = (
    MachineRule(
        "old-torch", "below 2.9: DTensor checkpoints and torch.accelerator are used as they are from there on", old_torch
    ),
    MachineRule("unused-accelerator", "a device file of an NVIDIA or AMD accelerator, and none in torch", unused_accelerator),
    MachineRule("no-compiler", "no C++ compiler answers --version", no_compiler),
    MachineRule("threads", "more threads than usable cores, or fewer than half of the cores", threads),
    MachineRule("fresh-memory", "below 60 % of the copy into existing memory: the rest goes to page faults", fresh_memory),
    MachineRule("little-memory", "below 1 GiB or 10 %", little_memory),
    MachineRule("swapping", "more than 0.5 GiB and 10 % of the memory in swap", swapping),
    MachineRule(
        "swap-thrash",
        "in half a second, more than 256 pages/s (1 MiB/s) swapped in and as many out; or more than 30 % of the processor time "
        "in the kernel and more than 100 major faults/s: a training step hardly calls the kernel",
        swap_thrash,
    ),
    MachineRule(
        "host-buffer",
        "where the environment sets the memory manager: a host buffer below 2.5 times the memory of all accelerators (or the "
        "budget, without one), or a variable that can't be read",
        host_buffer,
    ),
    MachineRule("full-disk", "below 2 GiB or 2 %, and below 50 GiB", full_disk),
    MachineRule("slow-disk", "below 50 MB/s written", slow_disk),
)


def examine_machine(machine: Machine) -> list[Finding]:
    """Apply the rules; a machine with nothing to change gives an empty list."""
    found = []
    for rule in MACHINE_RULES:
        symptom = rule.check(machine)
        if symptom is not None:
            found.append(Finding.of(rule.name, rule.threshold, symptom))
    return found
