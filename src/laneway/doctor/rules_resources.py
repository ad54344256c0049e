"""Rules over memory and speed."""

from __future__ import annotations

import json
import math
import re

import numpy as np

from laneway.core import ASKED_MEMORY
from laneway.doctor.facts import RunFacts
from laneway.doctor.finding import Knob, Measure, Symptom
from laneway.rundir import number

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
    "the median rate of the last fifth is below 70 % of that near the begin, for more than a minute: medians don't see single "
    "slow steps, and what others do on a shared machine passes"
)
SLOWER, LASTING = 0.7, 60.0  # seconds

GIB = 2.0**30


def _memory_knobs(facts: RunFacts) -> tuple[Knob, ...]:
    knobs = [_micro_batch(facts)]
    if facts.setting("activation_checkpointing") is not True:
        text = "on: keep the input of each block only and compute the rest again"
        knobs.append(Knob("activation_checkpointing", text, "true"))
    if facts.setting("memory.budget", "") == "":
        knobs.append(Knob("memory.budget", "auto: what does not fit is moved out, and back in time", "auto"))
    if facts.setting("precision") != "bf16":
        knobs.append(Knob("precision", f"bf16{facts.now('precision')}: activations take half", "bf16"))
    if facts.setting("model.streams") != 1 and facts.residual != "residual":
        knobs.append(Knob("model.streams", f"fewer{facts.now('model.streams')}: stream memory is proportional to them"))
    return tuple(knob for knob in knobs if knob is not None)


def _micro_batch(facts: RunFacts) -> Knob | None:
    """The largest divisor of a rank's share that is at most half of what one pass takes now; None where that is one sequence."""
    why = "the gradient stays the same, the activations halve"
    batch, ranks = number(facts.setting("batch_size")), number(facts.env.get("world_size", 1))
    given = number(facts.setting("micro_batch_size"))
    if not (batch >= 1 and ranks >= 1):
        return Knob("micro_batch_size", f"half{facts.now('micro_batch_size')}: {why}")
    share = int(batch // ranks)
    now = int(given) if given >= 1 else share
    if now < 2:
        return None
    half = next(size for size in range(now // 2, 0, -1) if share % size == 0)
    told = f"{now}" if given >= 1 else f"the whole share of {share}"
    return Knob("micro_batch_size", f"half (now {told}): {why}", f"{half}")


def memory_share(facts: RunFacts) -> Measure | None:
    """The largest peak of any rank over the memory there is."""
    peak, total = facts.largest_peak, facts.memory_bytes
    return Measure("peak over the memory", peak[0] / total, OCCUPIED) if peak and total > 0 else None


def memory_overflow(facts: RunFacts) -> Symptom | None:
    """Memory ran out, or nearly."""
    share, evidence = memory_share(facts), []
    failures = [event for event in facts.events if _is_out_of_memory(event)]
    survived = [event for event in facts.events if event.get("kind") == "survived"]
    if survived:
        evidence.append(f"memory was missing in {len(survived)} steps, the first {survived[0].get('step', '?')}: redone in less")
    if failures:
        evidence.append(f"{len(failures)} out-of-memory events, the first at step {_failure(failures[0])}")
    if share is not None and share.value > share.limit:
        peak, rank = facts.largest_peak or (0.0, 0)
        where = f" on rank {rank}" if rank else ""
        total = facts.memory_bytes / GIB
        evidence.append(f"peak {peak / GIB:.2f} GiB of {total:.2f} GiB ({100 * share.value:.0f} %){where}")
    if not evidence:
        return None
    return Symptom("memory overflow", "; ".join(evidence), _memory_knobs(facts))


def _failure(event: dict) -> str:
    """Step, rank where it was not the first, what was asked for, and the peak until then."""
    told = [f"{event.get('step', '?')}"]
    if number(event.get("rank")) > 0:
        told.append(f"on rank {event['rank']}")
    asked = ASKED_MEMORY.search(" ".join(str(event.get(key)) for key in ("reason", "message", "error")))
    if asked:
        told.append(f"for {asked[1]} {asked[2]} more")
    if number(event.get("peak_bytes")) > 0:
        told.append(f"at a peak of {number(event['peak_bytes']) / GIB:.2f} GiB")
    return " ".join(told)


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
    times = facts.series("time").finite()
    if len(times) and times.values[-1] - float(np.interp(blocks.steps[slow], times.steps, times.values)) < LASTING:
        return None
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
