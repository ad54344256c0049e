"""What the doctor says: a finding, the numbers it rests on, and the knob to turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Knob:
    """Something to change: a field of the configuration (``optimizer.lr``), or a variable or command, and how."""

    name: str
    advice: str
    value: str = ""
    """What the advice comes to in this run, where it is a field of the configuration and that can be said; else empty."""

    @property
    def flag(self) -> str:
        """The knob at ``value`` as an argument of ``laneway train``; empty without one."""
        argument = f"--{self.name.replace('_', '-')}"
        return argument if self.value == "true" else f"{argument} {self.value}" if self.value else ""

    @property
    def words(self) -> str:
        """Advice and flag."""
        return f"{self.advice}: {self.flag}" if self.flag else self.advice


@dataclass(frozen=True)
class Measure:
    """A figure that a rule watches, found or not. ``what``: its name and unit; above ``limit`` the rule fires."""

    what: str
    value: float
    limit: float


@dataclass(frozen=True)
class Symptom:
    """What a rule saw."""

    finding: str
    evidence: str
    knobs: tuple[Knob, ...]


@dataclass(frozen=True)
class Finding:
    """A symptom with the rule that found it and that rule's threshold."""

    rule: str
    finding: str
    evidence: str
    knobs: tuple[Knob, ...]
    threshold: str

    @classmethod
    def of(cls, rule: str, threshold: str, symptom: Symptom) -> Finding:
        """A rule's symptom."""
        return cls(rule, symptom.finding, symptom.evidence, symptom.knobs, threshold)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        knobs = [{"name": knob.name, "advice": knob.advice, "flag": knob.flag} for knob in self.knobs]
        return {
            "rule": self.rule,
            "finding": self.finding,
            "evidence": self.evidence,
            "knobs": knobs,
            "threshold": self.threshold,
        }
