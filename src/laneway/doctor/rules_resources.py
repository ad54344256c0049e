"""Rules over memory and speed."""

from __future__ import annotations

import json
import math
import re

import numpy as np

from laneway.doctor.facts import RunFacts
from laneway.doctor.finding import Knob, Symptom

OVERFLOW = (
    "an out-of-memory event, a step that was redone in less memory, or a peak above 90 % of the memory: fragments and other "
    "processes take the rest, and the next longer batch does not fit"
)
OCCUPIED = 0.9
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|\boom\b", re.IGNORECASE)

GROWTH = (
    "after the first 30 % of the run, the peak rises by more than 10 % and in at least 7 of 9 equal stretches, fast enough to "
    "fill the memory within 20 times the run so far: a working peak is reached in the first steps and stays"
)
RISE, RISING, HORIZON = 0.1, 7, 20.0

THROUGHPUT = (
    "the median rate of the last fifth is below 70 % of that near the begin: medians don't see single slow steps, and a shared "
    "machine varies by less"
)
SLOWER = 0.7

GIB = 2.0**30


def _memory_knobs(facts: RunFacts) -> tuple[Knob, ...]:
    return (
        Knob("micro_batch_size", f"half{facts.now('micro_batch_size')}: the gradient stays the same, the activations halve"),
        Knob("activation_checkpointing", "true: keep the input of each block only and compute the rest again"),
        Knob("precision", f"bf16{facts.now('precision')}: activations take half"),
        Knob("model.streams", f"fewer{facts.now('model.streams')}: stream memory is proportional to them"),
    )


def memory_overflow(facts: RunFacts) -> Symptom | None:
    """Memory ran out, or nearly."""
    peak, total = facts.series("peak_bytes").finite(), facts.memory_bytes
    evidence = []
    failures = [event for event in facts.events if _is_out_of_memory(event)]
    survived = [event for event in facts.events if event.get("kind") == "survived"]
    if survived:
        evidence.append(f"memory was missing in {len(survived)} steps, the first {survived[0].get('step', '?')}: redone in less")
    if failures:
        evidence.append(f"{len(failures)} out-of-memory events, the first at step {failures[0].get('step', '?')}")
    if len(peak) and math.isfinite(total) and peak.values.max() > OCCUPIED * total:
        share = 100 * peak.values.max() / total
        evidence.append(f"peak {peak.values.max() / GIB:.2f} GiB of {total / GIB:.2f} GiB ({share:.0f} %)")
    if not evidence:
        return None
    return Symptom("memory overflow", "; ".join(evidence), _memory_knobs(facts))


def _is_out_of_memory(event: dict) -> bool:
    """By its kind, or by its message; generated text is no evidence."""
    if event.get("kind") in ("sample", "start", "finish"):
        return False
    return bool(OUT_OF_MEMORY.search(json.dumps({key: event.get(key) for key in ("kind", "message", "error", "reason")})))


def memory_growth(facts: RunFacts) -> Symptom | None:
    """The peak keeps rising: a leak."""
    peak = facts.series("peak_bytes").finite()
    late = peak.after(0.3 * facts.last_step)
    if len(late) < 20:
        return None
    points = late.values[np.linspace(0, len(late) - 1, 10).round().astype(int)]
    rises = int((np.diff(points) > 0.002 * points[0]).sum())
    if points[0] <= 0 or points[-1] < (1 + RISE) * points[0] or rises < RISING:
        return None
    rate = (late.values[-1] - late.values[0]) / (late.steps[-1] - late.steps[0])
    left = facts.memory_bytes - late.values[-1]
    if left > HORIZON * facts.last_step * rate:
        return None
    until = (
        f"; at this rate memory is full {left / rate:,.0f} steps after the last row" if math.isfinite(left) and left > 0 else ""
    )
    return Symptom(
        "memory keeps growing: something is not freed",
        f"peak {points[0] / GIB:.2f} GiB at step {late.steps[0]:.0f}, {points[-1] / GIB:.2f} GiB at step {late.steps[-1]:.0f}, "
        f"{rate / 2**20:.2f} MiB a step{until}",
        (
            Knob(
                "probe_every",
                f"0{facts.now('probe_every')}, to see whether what looks into the run holds on to it",
            ),
            Knob("compile", f"false{facts.now('compile')}, to see whether recompilation is the cause"),
            Knob("checkpoint_every", "small enough that a run that is killed loses little"),
        ),
    )


def throughput_drop(facts: RunFacts) -> Symptom | None:
    """The run became slower."""
    rate = facts.series("tokens_per_s").finite()
    if len(rate) < 40:
        return None
    blocks = rate.blocks(10)
    before, after = float(np.median(blocks.values[1:4])), float(np.median(blocks.values[-2:]))
    if after >= SLOWER * before:
        return None
    slow = int(np.flatnonzero(blocks.values < SLOWER * before)[0])
    return Symptom(
        f"throughput dropped to {100 * after / before:.0f} %",
        f"{before:,.0f} tokens/s near the begin, {after:,.0f} at the end; "
        f"below {100 * SLOWER:.0f} % from about step {blocks.steps[slow]:.0f}",
        (
            Knob("log_every", f"more{facts.now('log_every')}, if the disk is slow"),
            Knob("compile", f"false{facts.now('compile')}: changing shapes recompile"),
            Knob("device", "look at other processes, heat and swap: `laneway doctor` without a run measures this machine now"),
        ),
    )
