"""The rule over what corrects gradients: purification and the guard of norms."""

from __future__ import annotations

from laneway.doctor.facts import RunFacts
from laneway.doctor.finding import Knob, Symptom
from laneway.rundir import number

OUTLIER = (
    "a path whose gradient was corrected 10 or more times in a row or in all, or was not finite: outliers of single batches are "
    "what purification is for, one that stays has a cause that it only hides"
)
STAYS = 10


def path_outlier(facts: RunFacts) -> Symptom | None:
    """The gradients of a path are wrong again and again."""
    told = [event for event in facts.events if event.get("kind") == "purify"]
    often: dict[str, int] = {}
    for event in told:
        path, in_a_row = str(event.get("path")), number(event.get("in_a_row"))
        often[path] = max(often.get(path, 0) + 1, int(in_a_row) if in_a_row > 0 else 0)
    broken = sorted({str(event.get("path")) for event in told if "correction" in event and event["correction"] is None})
    worst = max(often, key=lambda path: often[path], default="")
    evidence = []
    if often.get(worst, 0) >= STAYS:
        first = next(event.get("step", "?") for event in told if str(event.get("path")) == worst)
        evidence.append(f"{worst} was corrected {often[worst]} times or more, first at step {first}")
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        evidence.append(f"the gradient of {broken[0]}{more} was not finite")
    if not evidence:
        return None
    return Symptom(
        "the gradient of a path is an outlier again and again",
        "; ".join(evidence),
        (
            Knob("optimizer.lr", f"lower{facts.now('optimizer.lr')}, if it began with a climb of the loss"),
            Knob("precision", f"fp32{facts.now('precision')}, to see whether range is the cause"),
            Knob("data.path", "look at the batches from that step on: one source may be damaged"),
        ),
    )
