"""Plans for chosen links: ``memory_virtual``, followed on a clock of CPU time and modelled waits; ``memory_solver``, on paper."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence

from laneway.bench.rows import Row
from laneway.bench.stats import quartiles
from laneway.bench.tiered_subject import CPU, Subject
from laneway.bench.tiered_variants import Variant, exact
from laneway.memory.clock import ComputeClock
from laneway.memory.config import MemoryConfig
from laneway.memory.manager import MemoryManager
from laneway.memory.plan import make_plan
from laneway.memory.residency import Choice
from laneway.memory.simulate import Link
from laneway.memory.simulated import SimulatedTier

PASSES = 3


def virtual_rows(subject: Subject, bandwidths: Sequence[float], shares: Sequence[float], say: Callable[[str], None]) -> list[Row]:
    """For each bandwidth (MB/s) and budget a plan that only moves and one that may compute again, each followed."""
    found = []
    for bandwidth in bandwidths:
        for share in shares:
            for recompute in (False, True):
                found.append(_virtual(subject, bandwidth, share, recompute))
                row = found[-1]
                say(
                    f"  {bandwidth:g} MB/s, β {row['beta']:.1f}, {row['variant']}, budget {share}: overhead {row['overhead']:.3f}"
                )
    return found


def _virtual(subject: Subject, bandwidth: float, share: float, recompute: bool) -> Row:
    clock = ComputeClock()
    tier = SimulatedTier(clock, 1 << 40, bandwidth * 1e6, bandwidth * 1e6, latency=1e-4, copying=clock.aside)
    config = MemoryConfig(budget=str(int(share * subject.plain_peak)), collective_reservation=0.0)
    manager = MemoryManager(subject.model, config, tier, subject.meter, CPU, clock=clock, recompute=recompute)
    variant = Variant("virtual", share, lambda: manager, subject.plain, manager)
    subject.active = subject.plain
    subject.wanted = subject.gradients()
    same = exact(variant, subject, subject.wanted)
    subject.wanted = []
    variant.step(subject)
    before = manager.counted
    for _ in range(PASSES):
        variant.step(subject)
    plan = list(manager.plans.values())[-1]
    reports = manager.since(before)
    again = sum(plan.profile.blocks[number].seconds for number in plan.blocks)  # checkpointed blocks are not in the books
    spent = [report.account.stall + report.account.recompute + again for report in reports]
    tier.close()
    return subject.about() | {
        "bandwidth_mb_s": bandwidth, "beta": plan.beta, "budget_share": share,
        "variant": "mixed" if recompute else "move only", "exact": int(same),
        "peak_ratio": max(report.peak for report in reports) / subject.plain_peak, "feasible": int(plan.feasible),
        "predicted_overhead": plan.overhead, "overhead": quartiles(spent)[1] / plan.unmanaged.seconds,
        "moved": plan.count(Choice.MOVE)[0], "recomputed": plan.count(Choice.RECOMPUTE)[0], "checkpointed": len(plan.blocks),
    }  # fmt: skip


def solver_rows(subject: Subject, bandwidths: Sequence[float], shares: Sequence[float], say: Callable[[str], None]) -> list[Row]:
    """One recorded pass, planned by the greedy search and by the integer program: predicted times and peaks of both.

    The links are the measured one and those of ``bandwidths`` (MB/s). The program needs scipy; without it that is said.
    """
    if importlib.util.find_spec("scipy") is None or subject.recorded is None:
        say("  solver: left out, scipy is not installed" if subject.recorded else "  solver: left out, nothing to plan")
        return []
    profile, measured = subject.recorded
    found = []
    for link in (measured, *(Link(bandwidth * 1e6, bandwidth * 1e6) for bandwidth in bandwidths)):
        for share in shares:
            for solver in ("greedy", "milp"):
                start = time.perf_counter()
                plan = make_plan(profile, share * subject.plain_peak, link, solver=solver)
                seconds = time.perf_counter() - start
                found.append(subject.about() | {
                    "bandwidth_mb_s": link.write_bandwidth / 1e6, "beta": plan.beta, "budget_share": share, "solver": solver,
                    "feasible": int(plan.feasible), "predicted_peak_ratio": plan.predicted.peak / subject.plain_peak,
                    "predicted_overhead": plan.overhead, "moved": plan.count(Choice.MOVE)[0],
                    "recomputed": plan.count(Choice.RECOMPUTE)[0], "checkpointed": len(plan.blocks), "tried": plan.tried,
                    "planning_seconds": seconds,
                })  # fmt: skip
                say(f"  {solver}, β {plan.beta:.2f}, budget {share:g}: predicted overhead {plan.overhead:.4f}, {seconds:.1f} s")
    return found
