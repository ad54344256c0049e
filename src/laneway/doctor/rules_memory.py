"""Rules over the tiered memory manager: swap thrash, contention with collectives, a host buffer that is too small.

What they read in a metrics row, each of that one step: ``memory_stall_seconds`` (the step waited for a tensor),
``memory_bytes_out``, ``memory_bytes_in``, ``memory_misses`` (tensors that were not back when they were needed) and
``memory_transfer_contention_seconds`` (a collective and a transfer shared the link) and ``memory_transfer_held_seconds`` (queued
transfers waited for a collective); and ``step_ms`` beside them.
"""

from __future__ import annotations

import math

import numpy as np

from laneway.core import InputError
from laneway.doctor.facts import RunFacts
from laneway.doctor.finding import Knob, Symptom
from laneway.rundir import number
from laneway.sizes import DEFAULT_HOST_BUFFER_RATIO, budget_bytes, check_host_buffer, host_buffer_advice

THRASH = (
    "in the median row, above 10 % of the step goes by waiting for tensors to come back: a plan that fits its link hides its "
    "transfers"
)
WAITING = 0.1

CONTENTION = (
    "in the median row, above 5 % of the step has transfers and collectives on the link at once: copies to the host slow "
    "collectives down (NVIDIA/nccl, issue 1414), and every rank waits for the slowest"
)
SHARED = 0.05

HOST_BUFFER = (
    "a host buffer below 2.5 times the device memory of one rank: optimizer state, gradients and one step's activations do not "
    "fit beside each other"
)
LEAST_ROWS, GIB = 10, 2.0**30

VARIABLES = {
    "budget": "MHC_MEMORY_BUDGET",
    "policy": "MHC_EVICTION_STRATEGY",
    "tier": "MHC_MEMORY_TIER",
    "host_buffer_ratio": "MHC_CPU_BUFFER_RATIO",
    "max_swap_ops_per_second": "MHC_MAX_SWAP_OPS_PER_SEC",
    "max_bytes_per_second": "MHC_MAX_SWAP_BYTES_PER_SEC",
    "collective_reservation": "MHC_COLLECTIVE_RESERVATION",
}


def memory_knob(field: str, advice: str, now: str = "") -> Knob:
    """A field of the memory manager, with its variable."""
    return Knob(f"memory.{field}", f"{advice}{now}; in the environment {VARIABLES[field]}")


def _knob(facts: RunFacts, field: str, advice: str) -> Knob:
    return memory_knob(field, advice, facts.now(f"memory.{field}"))


def _of_step(facts: RunFacts, key: str) -> np.ndarray:
    """Parts of their steps [rows] that the seconds under ``key`` take, after the first part of the run."""
    late = [row for row in facts.rows if key in row and number(row.get("step")) > 0.2 * facts.last_step]
    seconds = np.array([number(row[key]) for row in late])
    steps = np.array([number(row.get("step_ms")) / 1000 for row in late])
    fine = np.isfinite(seconds) & np.isfinite(steps) & (steps > 0)
    return np.minimum(seconds[fine] / steps[fine], 1.0)


def swap_thrash(facts: RunFacts) -> Symptom | None:
    """Steps wait for their tensors."""
    waiting = _of_step(facts, "memory_stall_seconds")
    if len(waiting) < LEAST_ROWS or float(np.median(waiting)) <= WAITING:
        return None
    evidence = [f"the median step waits {100 * float(np.median(waiting)):.0f} % of its time"]
    for key, text in (("memory_bytes_out", "GiB out"), ("memory_bytes_in", "GiB in"), ("memory_misses", "misses")):
        values = facts.series(key).finite().values
        if len(values):
            typical = float(np.median(values))
            evidence.append(f"{typical / GIB:.2f} {text}" if "GiB" in text else f"{typical:.0f} {text}")
    knobs = [_knob(facts, "budget", "larger: fewer bytes have to move")]
    if facts.setting("memory.policy") in ("lru", "fifo"):
        knobs.append(_knob(facts, "policy", "cost_aware: what is needed next stays"))
    for field in ("max_swap_ops_per_second", "max_bytes_per_second"):
        if number(facts.setting(f"memory.{field}")) > 0:
            knobs.append(_knob(facts, field, "higher, or 0 for no cap: transfers may wait for their turn, not for the link"))
    if facts.setting("memory.tier") == "disk":
        knobs.append(_knob(facts, "tier", "host: memory is faster than a disk"))
    knobs.append(Knob("micro_batch_size", f"half{facts.now('micro_batch_size')}: half as many activations have to move"))
    knobs.append(Knob("activation_checkpointing", "true: computing blocks again can be cheaper than this"))
    return Symptom("swap thrash: steps wait for tensors that were moved out", ", ".join(evidence), tuple(knobs))


def transfer_contention(facts: RunFacts) -> Symptom | None:
    """Transfers and collectives are in each other's way."""
    shared = _of_step(facts, "memory_transfer_contention_seconds")
    if len(shared) < LEAST_ROWS or float(np.median(shared)) <= SHARED:
        return None
    evidence = f"both are under way for {100 * float(np.median(shared)):.0f} % of the median step"
    held = _of_step(facts, "memory_transfer_held_seconds")
    if len(held):
        evidence += f", and transfers stand back for {100 * float(np.median(held)):.0f} %"
    return Symptom(
        "transfers and collectives share the link",
        evidence,
        (
            _knob(
                facts, "collective_reservation", "higher, up to 1: transfers stand back further while a collective is in flight"
            ),
            _knob(facts, "max_bytes_per_second", "a cap below what the link carries"),
            _knob(facts, "max_swap_ops_per_second", "a cap, where many small transfers cut into the collectives"),
            _knob(facts, "budget", "larger: fewer bytes have to move"),
        ),
    )


def host_buffer(facts: RunFacts) -> Symptom | None:
    """The host can't hold what the device sends."""
    budget, tier = facts.setting("memory.budget", ""), facts.setting("memory.tier", "auto")
    host = number(facts.env.get("memory_bytes"))
    device = facts.env.get("device")
    on_cpu = not isinstance(device, dict) or device.get("type", "cpu") == "cpu"
    if budget == "" or tier == "disk" or (on_cpu and tier != "host") or not host > 0:
        return None
    if on_cpu:
        try:
            size = float(budget_bytes("memory.budget", budget, int(host)))
        except InputError:
            return None  # no run has such a budget
    else:
        size = facts.memory_bytes
    ratio = number(facts.setting("memory.host_buffer_ratio", DEFAULT_HOST_BUFFER_RATIO))
    if not (math.isfinite(size) and size > 0 and math.isfinite(ratio)):
        return None
    return host_buffer_symptom(host, ratio, size, facts.now("memory.host_buffer_ratio"))


def host_buffer_symptom(host: float, ratio: float, device: float, now: str = "") -> Symptom | None:
    """The sizing rule as a symptom, for a run or a machine; bytes, except the ratio."""
    told = check_host_buffer(host, ratio, device)
    if told is None:
        return None
    knobs = (
        memory_knob("host_buffer_ratio", host_buffer_advice(host, device), now),
        memory_knob("tier", "disk, where the host has no more memory to give"),
    )
    return Symptom("the host buffer is small for this device", told, knobs)
