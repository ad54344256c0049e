"""The table ``memory``: steps of all variants in turns, with their peaks, and what the managed ones predicted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from laneway.bench.rows import Row
from laneway.bench.stats import quartiles
from laneway.bench.tiered_subject import Subject
from laneway.bench.tiered_variants import Variant, exact
from laneway.bench.timer import Samples, interleave, ratio
from laneway.memory.residency import Choice

BOOKS = ("stall_share", "recompute_share", "bytes_out", "bytes_in", "misses", "peak_error", "time_error_points", "moved",
         "recomputed", "checkpointed")  # fmt: skip


def step_rows(subject: Subject, variants: Sequence[Variant], seconds: float, say: Callable[[str], None]) -> list[Row]:
    """All variants, timed in turns; the first is plain training."""
    beta = subject.beta
    subject.active = subject.plain
    subject.wanted = subject.gradients()
    same = {variant.name: exact(variant, subject, subject.wanted) for variant in variants}
    subject.wanted, peaks = [], {}
    for variant in variants:
        variant.step(subject)
        peaks[variant.name] = subject.peak(lambda v=variant: v.step(subject))  # type: ignore[misc]
        say(f"  {variant.name}: peak {peaks[variant.name] / subject.plain_peak:.3f} of plain, exact {same[variant.name]}")
    first = {v.name: v.manager.counted for v in variants if v.manager is not None}
    process: dict[str, list[float]] = {variant.name: [] for variant in variants}
    works = {variant.name: lambda v=variant: _timed(v, subject, process[v.name]) for variant in variants}  # type: ignore[misc]
    samples = interleave(works, seconds=seconds, warmup=1, min_rounds=5, clocks=(time.perf_counter, time.thread_time))
    base = samples[variants[0].name]
    rows = []
    for variant in variants:
        own = samples[variant.name]
        whole = Samples(own.wall_s, process[variant.name][-len(own.wall_s) :])
        whole_base = Samples(base.wall_s, process[variants[0].name][-len(base.wall_s) :])
        peak = peaks[variant.name]
        row: Row = subject.about() | {"variant": variant.name, "budget_share": variant.share, "exact": int(same[variant.name])}
        row |= {"peak_bytes": peak, "peak_ratio": peak / subject.plain_peak, "rounds": len(own.wall_s)}
        row |= {"wall_ms": 1000 * quartiles(own.wall_s)[1], **ratio(own, base).columns("wall_over_none")}
        row |= ratio(own, base, "cpu").columns("main_cpu_over_none")
        row |= ratio(whole, whole_base, "cpu").columns("process_cpu_over_none")
        rows.append(row | {"beta": beta} | _books(variant, base, row["wall_over_none"] - 1.0, first.get(variant.name, 0)))
    return rows


def _timed(variant: Variant, subject: Subject, process: list[float]) -> None:
    start = time.process_time()
    variant.step(subject)
    process.append(time.process_time() - start)


def _books(variant: Variant, base: Samples, overhead: float, first: int) -> Row:
    """What the manager noted, and how far its plan was from the peak and the ``overhead``; for the others just the remark."""
    manager = variant.manager
    if manager is None:
        return dict.fromkeys(BOOKS) | {"reason": variant.remark or None}
    manager.end_pass()
    plan, new = list(manager.plans.values())[-1], manager.since(first)
    last, step = new[-1], quartiles(base.wall_s)[1]
    stall = quartiles([report.account.stall for report in new])[1] / step
    again = quartiles([report.account.recompute for report in new])[1] / step
    predicted = plan.overhead * plan.unmanaged.seconds / step
    values = (
        stall, again, last.account.bytes_out, last.account.bytes_in, last.account.misses,
        last.peak / last.predicted - 1.0 if last.predicted else None, 100 * (overhead - predicted),
        plan.count(Choice.MOVE)[0], plan.count(Choice.RECOMPUTE)[0], len(plan.blocks),
    )  # fmt: skip
    why = "; ".join(part for part in (variant.remark, plan.reason) if part)
    return dict(zip(BOOKS, values, strict=True)) | {"reason": why}
