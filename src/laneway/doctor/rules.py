"""The rules over a run and the engine that applies them.

A rule is data: a name, a threshold with its reason, and a pure function from the run's facts to what it saw or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laneway.doctor import rules_memory, rules_resources, rules_streams, rules_training
from laneway.doctor.facts import RunFacts
from laneway.doctor.finding import Finding, Symptom


@dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
        name: what it is called in the output.
        threshold: the limit and why it lies there.
        check: the facts to a symptom, None where there is none.
        unless: rules that explain the same curve better: where one of them fires, this one is not asked.
    """

    name: str
    threshold: str
    check: Callable[[RunFacts], Symptom | None]
    unless: tuple[str, ...] = ()


RULES: tuple[Rule, ...] = (
    Rule("unstable-start", rules_training.UNSTABLE_START, rules_training.unstable_start),
    Rule("diverged", rules_training.DIVERGED, rules_training.diverged, unless=("unstable-start",)),
    Rule("nonfinite-steps", rules_training.NONFINITE, rules_training.nonfinite_steps),
    Rule(
        "slow-convergence",
        rules_training.SLOW,
        rules_training.slow_convergence,
        unless=("unstable-start", "diverged"),
    ),
    Rule("overfit", rules_training.OVERFIT, rules_training.overfit, unless=("diverged",)),
    Rule("streams-collapsed", rules_streams.COLLAPSED, rules_streams.streams_collapsed),
    Rule("residual-map-frozen", rules_streams.FROZEN, rules_streams.residual_map_frozen),
    Rule("composite-gain", rules_streams.GAIN, rules_streams.composite_gain),
    Rule("sinkhorn-error", rules_streams.SINKHORN, rules_streams.sinkhorn_error),
    Rule("memory-overflow", rules_resources.OVERFLOW, rules_resources.memory_overflow),
    Rule("memory-growth", rules_resources.GROWTH, rules_resources.memory_growth),
    Rule("throughput-drop", rules_resources.THROUGHPUT, rules_resources.throughput_drop),
    Rule("swap-thrash", rules_memory.THRASH, rules_memory.swap_thrash),
    Rule("transfer-contention", rules_memory.CONTENTION, rules_memory.transfer_contention),
    Rule("host-buffer", rules_memory.HOST_BUFFER, rules_memory.host_buffer),
)


def examine_run(facts: RunFacts, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Apply the rules in their order; a healthy run gives an empty list."""
    found: list[Finding] = []
    for rule in rules:
        if any(finding.rule in rule.unless for finding in found):
            continue
        symptom = rule.check(facts)
        if symptom is not None:
            found.append(Finding.of(rule.name, rule.threshold, symptom))
    return found
