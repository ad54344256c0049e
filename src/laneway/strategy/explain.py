"""Why a plan is as it is: for each choice, what the best plan with another choice would cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from laneway.strategy.search import Candidate

SOURCE = "cost model"
COUNT = 5  # alternatives that are told


@dataclass(frozen=True)
class Reason:
    """One choice of a plan.

    Attributes:
        choice: the dial, by its usual name.
        value: what was chosen.
        number: the number that speaks for it, with its unit in words.
        source: where that number comes from.
    """

    choice: str
    value: str
    number: str
    source: str


@dataclass(frozen=True)
class Alternative:
    """A plan that was not taken: its main dials, predicted seconds and bytes, and why the other one is better."""

    layout: str
    seconds: float
    bytes_per_device: float
    slower: float
    reason: str


DIALS: dict[str, Callable[[Candidate], object]] = {
    "tensor parallel": lambda c: c.layout.tp,
    "context parallel": lambda c: c.layout.cp,
    "pipeline parallel": lambda c: c.layout.pp,
    "expert parallel": lambda c: c.layout.ep,
    "data parallel, sharded": lambda c: c.layout.dp_shard,
    "data parallel, replicated": lambda c: c.layout.dp_replicate,
    "micro-batch": lambda c: c.layout.micro_batch,
    "pipeline chunks": lambda c: c.layout.chunks,
    "recompute": lambda c: c.layout.recompute,
    "optimizer state": lambda c: "host" if c.offload else "device",
}


def reasons(candidates: list[Candidate]) -> list[Reason]:
    """For each dial of the first candidate: its value, and what the best plan with another value would cost."""
    best = candidates[0]
    found = []
    for name, dial in DIALS.items():
        other = next((c for c in candidates if dial(c) != dial(best)), None)
        if other is None:
            number = "no other value that is searched divides and fits"
        else:
            number = f"{dial(other)} would cost {ratio(best, other) - 1:+.1%} of step time; {difference(best, other)}"
        found.append(Reason(name, str(dial(best)), number, SOURCE))
    return found


def alternatives(candidates: list[Candidate]) -> list[Alternative]:
    """The best plan of each other (tp, cp, pp, ep, recompute, host), fastest first."""
    best, seen, found = candidates[0], {_kind(candidates[0])}, []
    for candidate in candidates:
        if _kind(candidate) in seen:
            continue
        seen.add(_kind(candidate))
        estimate = candidate.estimate
        slower = ratio(best, candidate) - 1
        told = Alternative(
            told_layout(candidate), estimate.seconds.value, estimate.memory.total, slower, difference(best, candidate)
        )
        found.append(told)
        if len(found) == COUNT:
            break
    return found


def ratio(best: Candidate, other: Candidate) -> float:
    """Step time of the other over that of the best."""
    return other.estimate.seconds.value / best.estimate.seconds.value


def difference(best: Candidate, other: Candidate) -> str:
    """The part of the step in which the other loses most."""
    ours, theirs = best.estimate.breakdown, other.estimate.breakdown
    lost = {part: theirs.get(part, 0.0) - ours.get(part, 0.0) for part in {*ours, *theirs}}
    part = max(sorted(lost), key=lambda name: lost[name])
    if lost[part] <= 0:
        return "no part of the step is slower: equal"
    return f"{part} {theirs.get(part, 0.0):.3g} s instead of {ours.get(part, 0.0):.3g} s"


def told_layout(candidate: Candidate) -> str:
    """The main dials in one line."""
    it = candidate.layout
    parts = {"tp": it.tp, "cp": it.cp, "pp": it.pp, "ep": it.ep, "dp_shard": it.dp_shard, "dp_replicate": it.dp_replicate}
    text = " ".join(f"{name}={value}" for name, value in parts.items() if value > 1) or "one device"
    text += f" micro_batch={it.micro_batch} recompute={it.recompute}"
    return text + (" optimizer=host" if candidate.offload else "")


def _kind(candidate: Candidate) -> tuple[object, ...]:
    it = candidate.layout
    return it.tp, it.cp, it.pp, it.ep, it.recompute, candidate.offload
