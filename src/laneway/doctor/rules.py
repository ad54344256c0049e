"""The rules over a run and the engine that applies them.

A rule is data: a name, a threshold with its reason, and a pure function from the run's facts to what it saw or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laneway.doctor import rules_control, rules_memory, rules_resources, rules_start, rules_streams, rules_training
from laneway.doctor.facts import RunFacts
from laneway.doctor.finding import Finding, Measure, Symptom


@dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
        name: what it is called in the output.
        looks_at: columns of the metrics rows, kinds of events and fields that it reads.
        threshold: the limit and why it lies there.
        knobs: every knob it may name.
        check: the facts to a symptom, None where there is none.
        unless: rules that explain the same curve better: where one of them fires, this one is not asked.
        measure: the figure it watches, whether it fires or not, where one figure says it.
    """

    name: str
    looks_at: str
    threshold: str
    knobs: tuple[str, ...]
    check: Callable[[RunFacts], Symptom | None]
    unless: tuple[str, ...] = ()
    measure: Callable[[RunFacts], Measure | None] | None = None


_LR, _CLIP, _MICRO, _PRECISION = "optimizer.lr", "optimizer.clip_norm", "micro_batch_size", "precision"
_CAP, _RESIDUAL, _STREAMS, _BUDGET = "model.logit_cap", "model.residual", "model.streams", "memory.budget"
_OPERATIONS, _BYTES = "memory.max_swap_ops_per_second", "memory.max_bytes_per_second"

RULES: tuple[Rule, ...] = (
    Rule(
        "unstable-start",
        "`loss`, `grad_norm` and `nonfinite` events of the first part",
        rules_start.UNSTABLE_START,
        (_LR, "optimizer.warmup", _CLIP, _CAP, _RESIDUAL),
        rules_start.unstable_start,
        measure=rules_start.rise,
    ),
    Rule(
        "diverged",
        "`loss`",
        rules_training.DIVERGED,
        (_LR, "optimizer.beta2", _PRECISION),
        rules_training.diverged,
        unless=("unstable-start",),
    ),
    Rule(
        "nonfinite-steps",
        "`loss`, `grad_norm`, `nonfinite` events",
        rules_training.NONFINITE,
        (_LR, _CLIP, _PRECISION),
        rules_training.nonfinite_steps,
    ),
    Rule(
        "slow-convergence",
        "`loss`",
        rules_training.SLOW,
        (_LR, "optimizer.warmup", "steps"),
        rules_training.slow_convergence,
        unless=("unstable-start", "diverged"),
        measure=rules_training.learnt,
    ),
    Rule(
        "overfit",
        "`val_loss`, `loss`",
        rules_training.OVERFIT,
        ("data.path", "steps", "optimizer.weight_decay"),
        rules_training.overfit,
        unless=("diverged",),
    ),
    Rule(
        "streams-collapsed",
        "`collapse`",
        rules_streams.COLLAPSED,
        (_LR, _RESIDUAL, _STREAMS),
        rules_streams.streams_collapsed,
    ),
    Rule(
        "residual-map-frozen",
        "`site_res_entropy`, `res_entropy`",
        rules_streams.FROZEN,
        (_LR, _CAP),
        rules_streams.residual_map_frozen,
        unless=("slow-convergence",),
    ),
    Rule(
        "composite-gain",
        "`gain_forward`, `gain_backward`",
        rules_streams.GAIN,
        (_RESIDUAL, "model.sinkhorn_iterations", _LR),
        rules_streams.composite_gain,
    ),
    Rule(
        "sinkhorn-error",
        "`sinkhorn_error`",
        rules_streams.SINKHORN,
        (_CAP, "model.sinkhorn_iterations", _RESIDUAL),
        rules_streams.sinkhorn_error,
    ),
    Rule(
        "path-outlier",
        "`purify` events",
        rules_control.OUTLIER,
        (_LR, _PRECISION, "data.path"),
        rules_control.path_outlier,
        unless=("unstable-start", "nonfinite-steps"),
    ),
    Rule(
        "memory-overflow",
        "`stop` and `survived` events, `peak_bytes` of all ranks",
        rules_resources.OVERFLOW,
        (_MICRO, "activation_checkpointing", _BUDGET, _PRECISION, _STREAMS),
        rules_resources.memory_overflow,
        measure=rules_resources.memory_share,
    ),
    Rule(
        "memory-growth",
        "`peak_bytes`",
        rules_resources.GROWTH,
        ("probe_every", "compile", "checkpoint_every"),
        rules_resources.memory_growth,
    ),
    Rule(
        "throughput-drop",
        "`tokens_per_s`, `time`",
        rules_resources.THROUGHPUT,
        ("log_every", "compile", "device"),
        rules_resources.throughput_drop,
    ),
    Rule(
        "swap-thrash",
        "`memory_stall_seconds`, `step_ms`",
        rules_memory.THRASH,
        (_BUDGET, "memory.policy", _OPERATIONS, _BYTES, "memory.tier", _MICRO, "activation_checkpointing"),
        rules_memory.swap_thrash,
    ),
    Rule(
        "transfer-contention",
        "`memory_transfer_contention_seconds`, `step_ms`",
        rules_memory.CONTENTION,
        ("memory.collective_reservation", _BYTES, _OPERATIONS, _BUDGET),
        rules_memory.transfer_contention,
    ),
    Rule(
        "host-buffer",
        "`memory.*` fields, memory in `env.json`",
        rules_memory.HOST_BUFFER,
        ("memory.host_buffer_ratio", "memory.tier"),
        rules_memory.host_buffer,
    ),
)


def measures(facts: RunFacts, rules: Sequence[Rule] = RULES) -> dict[str, Measure]:
    """By rule: the figure that it watches, of those that have one and enough rows for it."""
    found = ((rule.name, rule.measure(facts)) for rule in rules if rule.measure is not None)
    return {name: measure for name, measure in found if measure is not None}


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
