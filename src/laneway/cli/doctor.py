"""``laneway doctor [RUN]``: what this machine is and does, or what a run suffers from, and what to change."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tyro

from laneway.cli._parse import parse
from laneway.doctor import RULES, Finding, RunFacts, examine_run, measures
from laneway.doctor.about import run_lines
from laneway.doctor.show import machine_lines, show


def doctor(run: tyro.conf.Positional[Path | None] = None, json: bool = False) -> tuple[Path | None, bool]:
    """Look at this machine, or at a run, and say what to change.

    Args:
        run: A run directory; without one this machine is looked at and its memory tiers are measured (some seconds).
        json: Print one JSON object, with the number of findings as `count`.
    """
    return run, json


def run(args: list[str]) -> int:
    """Entry of the verb. Findings are no failure: the exit code is 0 with and without them."""
    path, as_json = parse(doctor, args, prog="laneway doctor", config=(tyro.conf.FlagCreatePairsOff,))
    return _run(path, as_json) if path is not None else _machine(as_json)


def _run(path: Path, as_json: bool) -> int:
    facts = RunFacts.read(path)
    findings = examine_run(facts)
    if as_json:
        about = {"about": dict(run_lines(path, facts)), "measures": {name: asdict(m) for name, m in measures(facts).items()}}
        _print_json({"run": str(path), "rows": len(facts.rows), "rules": [rule.name for rule in RULES]} | about, findings)
        return 0
    lines = run_lines(path, facts)
    healthy = f"healthy: none of {len(RULES)} rules found anything" if facts.rows else "no metrics rows yet: nothing to examine"
    show(f"laneway doctor {path}", lines, findings, healthy, sys.stdout)
    return 0


def _machine(as_json: bool) -> int:
    from laneway.doctor.advice import MACHINE_RULES, examine_machine
    from laneway.doctor.machine import describe_machine

    machine = describe_machine()
    findings = examine_machine(machine)
    if as_json:
        _print_json({"machine": machine, "rules": [rule.name for rule in MACHINE_RULES]}, findings)
        return 0
    healthy = f"nothing to change: none of {len(MACHINE_RULES)} rules found anything"
    show("laneway doctor", machine_lines(machine), findings, healthy, sys.stdout)
    return 0


def _print_json(head: dict[str, Any], findings: list[Finding]) -> None:
    print(json.dumps({**head, "count": len(findings), "findings": [finding.as_json() for finding in findings]}))
