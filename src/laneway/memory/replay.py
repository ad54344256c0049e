"""The simulated device: a trace under a byte budget, with a policy and a link, on a deterministic virtual clock.

Every transfer, wait and recomputation takes virtual time; nothing else does. An entry is in fast memory, on its way, in slow
memory or dropped. An eviction keeps its bytes until the slow memory has them; a dropped entry gives them back at once and is
computed again, out of its inputs, at its next use. What is checked at every event: never more bytes than the budget, no read of
what is not there or not written yet, no use after the free.

On demand only, an entry is brought in when it is used. With a prefetch window, what is expected within it is brought in while the
link is idle, in the order of its expected use, and only at the cost of entries expected later. With write-behind, where the step
before held more than the budget, the idle link copies entries that would go next, so that their eviction is free.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from laneway.core import InputError, LanewayError, choice
from laneway.memory.device import Counters, Device, Options
from laneway.memory.link import Link
from laneway.memory.policies import POLICIES, VARIANTS, Policy
from laneway.memory.trace import Trace


@dataclass(frozen=True)
class Outcome:
    """What a replay cost, over the steps that are counted."""

    seconds: float
    """Virtual time: compute + stall + recompute."""
    compute_seconds: float
    stall_seconds: float
    """Waiting for the link."""
    recompute_seconds: float
    bytes_out: int
    bytes_in: int
    evictions: int
    recomputations: int
    peak_bytes: int
    """Most bytes in fast memory at once, managed or not, over all steps."""
    variant: str = ""
    """Which of its variants the policy chose."""

    @property
    def overhead(self) -> float:
        """Time over that of the compute alone, minus one."""
        return (self.stall_seconds + self.recompute_seconds) / self.compute_seconds if self.compute_seconds else 0.0


def replay(
    trace: Trace,
    budget: int,
    policy: str | Policy,
    link: Link,
    *,
    prefetch: float = 0.0,
    write_behind: bool = False,
    warmup: int = 0,
) -> Outcome:
    """Replay ``trace`` within ``budget`` bytes.

    Args:
        trace: the events.
        budget: bytes of fast memory, for entries and other bytes together.
        policy: name of a policy, or one.
        link: to the slow memory, which has room for everything.
        prefetch: window in seconds of compute; 0 brings in on demand only.
        write_behind: copy out what would go next while the link is idle.
        warmup: steps that are not counted. A policy with variants (``VARIANTS``) tries each of them, at their end, on the steps
            seen so far once more, and goes on with the fastest; with no warm-up it keeps to its first.

    Raises:
        LanewayError: an operation does not fit into the budget.
        InputError: an argument is out of range.
    """
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise InputError("budget", budget, "bytes ≥ 1")
    if not 0 <= prefetch < float("inf"):
        raise InputError("prefetch", prefetch, "seconds ≥ 0")
    if warmup not in range(len(trace.steps)):
        raise InputError("warmup", warmup, f"steps from 0 to {len(trace.steps) - 1}")
    variants = _variants(policy)
    name, current = next(iter(variants.items()))
    device = Device(trace, Options(budget, link, prefetch, write_behind), current)
    for step in range(warmup):
        device.run_step(step)
    if warmup and len(variants) > 1:
        name = _rehearse(trace.until(warmup), variants, device.options)
        device.policy = variants[name]
    before = device.counted()
    for step in range(warmup, len(trace.steps)):
        device.run_step(step)
    return _outcome(before, device.counted(), device.peak, name if len(variants) > 1 else "")


def _variants(policy: str | Policy) -> dict[str, Policy]:
    if not isinstance(policy, str):
        return {"": policy}
    choice("policy", policy, POLICIES)
    return VARIANTS.get(policy, {"": POLICIES[policy]})


def _rehearse(seen: Trace, variants: dict[str, Policy], options: Options) -> str:
    """The variant that is fastest where the steps seen so far come again; of equally fast ones that which moves the fewest bytes.

    The first step, in which nothing could be predicted, does not come again, unless it is the only one.
    """
    first = min(1, len(seen.steps) - 1)
    future = seen.again(first)
    ready = Device(future, options, next(iter(variants.values())))
    for step in range(len(seen.steps)):
        ready.run_step(step)
    before = ready.counted()
    tried: dict[str, tuple[float, int]] = {}
    for name, policy in variants.items():
        device = ready.copy()
        device.policy = policy
        try:
            for step in range(len(seen.steps), len(future.steps)):
                device.run_step(step)
        except LanewayError:
            continue
        after = device.counted()
        moved = after.bytes_in + after.bytes_out - before.bytes_in - before.bytes_out
        tried[name] = (after.seconds - before.seconds, moved)
    return min(tried, key=tried.__getitem__) if tried else next(iter(variants))


def _outcome(before: Counters, after: Counters, peak: int, variant: str) -> Outcome:
    spent = {name: value - getattr(before, name) for name, value in asdict(after).items()}
    return Outcome(**spent, peak_bytes=peak, variant=variant)
