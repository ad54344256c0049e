"""The rule over what corrects gradients: purification."""

from __future__ import annotations

from laneway.doctor.facts import RunFacts
from laneway.doctor.finding import Knob, Symptom
from laneway.rundir import number

OUTLIER = (
    "a path that purification corrected in 10 or more checks in a row, or whose gradient was not finite: outliers of single "
    "batches are what it is for, one that stays has a cause that it only hides"
)
STAYS = 10


def path_outlier(facts: RunFacts) -> Symptom | None:
    """The gradients of a path are wrong again and again."""
    told = [event for event in facts.events if event.get("kind") == "purify"]
    in_a_row: dict[str, int] = {}
    for event in told:
        count = number(event.get("in_a_row"))  # the guard of norms tells of every step alone: its events have none
        if count > 0:
            in_a_row[str(event.get("path"))] = max(in_a_row.get(str(event.get("path")), 0), int(count))
    broken = sorted({str(event.get("path")) for event in told if "correction" in event and event["correction"] is None})
    worst = max(in_a_row, key=lambda path: in_a_row[path], default="")
    evidence = []
    if in_a_row.get(worst, 0) >= STAYS:
        first = next(event.get("step", "?") for event in told if str(event.get("path")) == worst)
        evidence.append(f"{worst} was corrected in {in_a_row[worst]} checks in a row or more, first at step {first}")
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
