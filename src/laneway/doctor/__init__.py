"""Looks at a run, or at this machine, and says what to change: finding, evidence, knob.

facts.py    a run as the rules see it         rules.py      the rules and the engine
about.py    where a run stands                finding.py    what the doctor says
rules_start.py, rules_training.py, rules_streams.py, rules_control.py, rules_resources.py, rules_memory.py
            what each rule looks for, and its threshold
machine.py  what this machine is              bandwidth.py  what its memory tiers do, measured
activity.py how busy its kernel is with memory, sampled
advice.py   findings about the machine        show.py       for a terminal or a pipe
"""

from laneway.doctor.facts import RunFacts
from laneway.doctor.finding import Finding, Knob, Measure
from laneway.doctor.rules import RULES, Rule, examine_run, measures

__all__ = ["RULES", "Finding", "Knob", "Measure", "Rule", "RunFacts", "examine_run", "measures"]
