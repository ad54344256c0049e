"""Healthy runs with realistic noise: how often a rule cries out for nothing."""

import csv
import tomllib
from itertools import accumulate
from pathlib import Path

import pytest
from synthetic import healthy

from laneway.doctor import RULES, RunFacts, examine_run
from laneway.recipes import tiny
from laneway.train.settings import to_toml

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
KINDS = [
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
]


def alarms(kind: dict, seeds: range) -> list[tuple[int, str, str]]:
    return [(seed, found.rule, found.evidence) for seed in seeds for found in examine_run(healthy(seed, **kind).facts)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_rule_fires_on_healthy_runs(kind):
    assert alarms(kind, range(15)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_rule_fires_on_many_healthy_runs(kind):
    assert alarms(kind, range(15, 75)) == []


def test_no_rule_fires_while_a_run_is_young():
    run = healthy(3)
    for length in range(0, 600, 7):
        young = healthy(3)
        young.rows = run.rows[:length]
        assert examine_run(young.facts) == [], length


def test_no_rule_fires_on_the_committed_run_at_any_age():
    """A run of the default recipe, as it was measured."""
    with (RESULTS / "tiny_run.csv").open(encoding="utf-8", newline="") as file:
        cells = [{key: float(cell) for key, cell in row.items() if cell} for row in csv.DictReader(file)]
    times = accumulate(row["step_ms"] / 1000 for row in cells)
    rows = [row | {"step": int(row["step"]), "time": time} for row, time in zip(cells, times, strict=True)]
    settings = tomllib.loads(to_toml(tiny()))
    env = {"memory_bytes": 8 << 30, "device": {"type": "cpu"}}
    assert len(rows) == settings["steps"]
    for age in (*range(1, 700, 23), 700):
        assert examine_run(RunFacts(settings, env, rows[:age], [])) == [], age


def test_every_rule_is_reachable_and_named_once():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(set(rule.unless) <= {other.name for other in RULES[: RULES.index(rule)]} for rule in RULES)
    assert all(any(word in rule.threshold for word in ("above", "over", "below", "any", "more")) for rule in RULES)
