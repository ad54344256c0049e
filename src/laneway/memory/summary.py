"""What the manager did, as plain data: ``memory.json`` of a run, and the fields that it adds to a metrics row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from laneway.memory.gradients import ParkedGradients
from laneway.memory.manager import MemoryManager, PassReport
from laneway.memory.parameters import StreamedParameters
from laneway.memory.plan import Plan
from laneway.memory.residency import Choice
from laneway.memory.stack import StackedTier
from laneway.memory.tier import Tier

SHOWN_PLANS = 4
SHOWN_PASSES = 2000


def metrics_of(passes: Sequence[PassReport]) -> dict[str, float]:
    """Sums over these passes and their highest peak; ``memory_peak_error``: (observed − predicted) / predicted where planned."""
    if not passes:
        return {}
    accounts = [report.account for report in passes]
    found: dict[str, float] = {
        "memory_peak_bytes": max(report.peak for report in passes),
        "memory_stall_seconds": sum(account.stall for account in accounts),
        "memory_recompute_seconds": sum(account.recompute for account in accounts),
        "memory_bytes_out": sum(account.bytes_out for account in accounts),
        "memory_bytes_in": sum(account.bytes_in for account in accounts),
        "memory_misses": sum(account.misses for account in accounts),
    }
    errors = [report.peak / report.predicted - 1.0 for report in passes if report.way == "planned" and report.predicted]
    if errors:
        found["memory_peak_error"] = max(errors, key=abs)
    coded = [report.coding_error for report in passes if report.coding_error is not None]
    if coded:
        found["memory_coding_seconds"] = sum(account.coding for account in accounts)
        found["memory_coding_error"] = sum(mean for mean, _ in coded) / len(coded)
        found["memory_coding_error_max"] = max(most for _, most in coded)
    return found


def summary(manager: MemoryManager) -> dict[str, Any]:
    """What the report shows of a run's memory: budget, tier, the plans used last, and the passes. Bytes and seconds."""
    used = list(manager.plans.items())[-SHOWN_PLANS:]
    return {
        "budget": manager.budget,
        "capacity": manager.meter.capacity(),
        "policy": manager.config.policy,
        "saved_tensors": manager.config.saved_tensors,
        "tier": _tier(manager.tier),
        "tiers": [_tier(tier) for tier in (manager.tier.tiers if isinstance(manager.tier, StackedTier) else (manager.tier,))],
        "gradients": _part(manager.gradients),
        "parameters": _part(manager.parameters),
        "replanned": manager.replanned,
        "plans": [_plan(f"{signature.batch} × {signature.length}", plan) for signature, plan in used],
        "passes": [_pass(number, report) for number, report in enumerate(manager.passes)][-SHOWN_PASSES:],
    }  # fmt: skip


def _part(part: ParkedGradients | StreamedParameters | None) -> dict[str, int] | None:
    """Bytes of gradients or parameters on the device now, and the most there were; None where they don't move."""
    return None if part is None else {"resident": part.resident, "peak": part.peak}


def _tier(tier: Tier) -> dict[str, Any]:
    write, read = tier.bandwidth()
    return {
        "name": tier.name, "capacity": tier.capacity, "used": tier.used, "peak": tier.peak,
        "write_bandwidth": write, "read_bandwidth": read, **asdict(tier.traffic),
    }  # fmt: skip


def _plan(shape: str, plan: Plan) -> dict[str, Any]:
    lives = plan.profile.lifetimes()
    entries = [
        {"name": entry.name, "nbytes": entry.nbytes, "choice": choice.value, "save": save, "use": use, "free": free}
        for entry, choice, (save, use, free) in zip(plan.profile.entries, plan.choices, lives, strict=True)
    ]
    counts = {}
    for choice in Choice:
        number, nbytes = plan.count(choice)
        counts[choice.value] = {"entries": number, "nbytes": nbytes}
    return {
        "shape": shape, "reason": plan.reason, "feasible": plan.feasible, "overhead": plan.overhead, "beta": plan.beta,
        "budget": plan.budget, "predicted_peak": plan.predicted.peak, "unmanaged_peak": plan.unmanaged.peak, "counts": counts,
        "checkpointed_blocks": [plan.profile.blocks[number].name for number in plan.blocks], "entries": entries,
        "trace": [list(point) for point in plan.predicted.trace],
        "unmanaged_trace": [list(point) for point in plan.unmanaged.trace],
    }  # fmt: skip


def _pass(number: int, report: PassReport) -> dict[str, Any]:
    account = report.account
    return {
        "pass": number, "shape": f"{report.signature.batch} × {report.signature.length}", "way": report.way, "peak": report.peak,
        "predicted": report.predicted, "static": report.static, "seconds": report.seconds, "stall": account.stall,
        "recompute": account.recompute, "bytes_out": account.bytes_out, "bytes_in": account.bytes_in, "misses": account.misses,
        "coding": account.coding, "coding_error": report.coding_error,
    }  # fmt: skip
