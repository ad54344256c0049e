"""What the doctor says: a finding, the numbers it rests on, and the knob to turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Knob:
    """Something to change: a field of the configuration (``optimizer.lr``), or a variable or command, and how."""

    name: str
    advice: str


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
        knobs = [{"name": knob.name, "advice": knob.advice} for knob in self.knobs]
        return {
            "rule": self.rule,
            "finding": self.finding,
            "evidence": self.evidence,
            "knobs": knobs,
            "threshold": self.threshold,
        }
