"""Healthy runs with realistic noise: how often a rule cries out for nothing."""

import pytest
from synthetic import healthy

from laneway.doctor import RULES, examine_run

SEEDS = 60


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"noise": 0.15},
        {"noise": 0.25, "spikes": 0.01},
        {"steps": 120},
        {"steps": 2000, "log_every": 10},
        {"residual": "residual"},
        {"residual": "mhc-lite"},
        {"residual": "orthogonal"},
        {"exponent": 0.35, "floor": 0.0, "noise": 0.03},
        {"exponent": 1.0, "floor": 2.0},
    ],
    ids=str,
)
def test_no_rule_fires_on_healthy_runs(kind):
    alarms = [
        (seed, finding.rule, finding.evidence) for seed in range(SEEDS) for finding in examine_run(healthy(seed, **kind).facts)
    ]
    assert alarms == []


def test_no_rule_fires_while_a_run_is_young():
    run = healthy(3)
    for length in range(0, 600, 7):
        young = healthy(3)
        young.rows = run.rows[:length]
        assert examine_run(young.facts) == [], length


def test_every_rule_is_reachable_and_named_once():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(set(rule.unless) <= {other.name for other in RULES[: RULES.index(rule)]} for rule in RULES)
    assert all(any(word in rule.threshold for word in ("above", "over", "below", "any", "more")) for rule in RULES)
