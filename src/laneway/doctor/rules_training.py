"""Rules over the loss after the start: divergence, skipped steps, slow convergence, overfitting."""

from __future__ import annotations

import math

import numpy as np

from laneway.doctor.facts import RunFacts, Series
from laneway.doctor.finding import Knob, Measure, Symptom
from laneway.doctor.rules_start import clip_knob
from laneway.rundir import number

DIVERGED = (
    "after the first part: the loss ends 0.5 nats (and 5 × the noise of a median) above its lowest stretch; healthy runs at a "
    "constant or falling learning rate do not climb back that far"
)
CLIMB, SHORT_MEMORY = 0.5, 0.95

NONFINITE = "any non-finite loss or gradient after the first part: each is a step of data that was not learnt from"

SLOW = (
    "from scratch: after 100 steps and twice the warm-up still above 0.72 · ln(vocabulary), where not even the tokens' "
    "frequencies are learnt (they alone give about 0.6 for bytes and up to 0.7 for subwords); or half-way through, the loss had "
    "done 20 points less of its fall than a power law through both ends of the fall: a healthy curve falls early and flattens, "
    "one that falls evenly is driven too weakly"
)
UNLEARNT, BEND, LONG_WARMUP = 0.72, 0.2, 0.2

OVERFIT = (
    "the last two validations lie above the best by more than max(0.03 nats, 2 %, 2 × the noise of a training row), while the "
    "training loss went on falling: the validation sequences are the same each time, but the weights wobble from step to step"
)


def diverged(facts: RunFacts) -> Symptom | None:
    """The loss came down and climbed back."""
    loss = facts.series("loss").finite()
    blocks = loss.blocks(20)
    if len(loss) < 40 or facts.last_step <= facts.first_part_end:
        return None
    low = int(blocks.values.argmin())
    climb, sure = blocks.values[-1] - blocks.values[low], 5 * loss.noise() / math.sqrt(len(loss) / 20)
    if climb <= max(CLIMB, sure):
        return None
    return Symptom(
        "the run diverged: the loss climbed back",
        f"loss {blocks.values[low]:.2f} around step {blocks.steps[low]:.0f}, {blocks.values[-1]:.2f} at the end",
        (
            Knob(
                "optimizer.lr",
                f"lower{facts.now('optimizer.lr')}; restart from a checkpoint before the climb",
                facts.scaled("optimizer.lr", 0.5),
            ),
            *_shorter_memory(facts),
            *_more_range(facts),
        ),
    )


def _shorter_memory(facts: RunFacts) -> list[Knob]:
    if number(facts.setting("optimizer.beta2")) <= SHORT_MEMORY:
        return []
    text = f"0.95 or lower{facts.now('optimizer.beta2')}: a long memory of small gradients makes a large step"
    return [Knob("optimizer.beta2", text, f"{SHORT_MEMORY}")]


def _more_range(facts: RunFacts) -> list[Knob]:
    if facts.setting("precision") == "fp32":
        return []
    return [Knob("precision", f"fp32{facts.now('precision')}, to see whether range is the cause", "fp32")]


def nonfinite_steps(facts: RunFacts) -> Symptom | None:
    """Steps that were skipped after the start."""
    late = facts.nonfinite[facts.nonfinite > facts.first_part_end]
    if not len(late):
        return None
    return Symptom(
        f"{len(late)} steps were not finite and were skipped",
        f"the first at step {late[0]:.0f}, the last at step {late[-1]:.0f}, of {facts.last_step:.0f}",
        (
            Knob("optimizer.lr", f"lower{facts.now('optimizer.lr')}", facts.scaled("optimizer.lr", 0.5)),
            clip_knob(facts),
            *_more_range(facts),
        ),
    )


def slow_convergence(facts: RunFacts) -> Symptom | None:
    """The loss comes down too slowly for what was spent."""
    loss = facts.series("loss").finite()
    if len(loss) < 40 or facts.last_step < max(100.0, 2 * facts.warmup_end):
        return None
    unlearnt = _unlearnt(facts, loss)
    evidence = unlearnt or _bent(facts, loss)
    if not evidence:
        return None
    return Symptom("slow convergence", evidence, _faster(facts, 10 if unlearnt else 2))


def _faster(facts: RunFacts, factor: int) -> tuple[Knob, ...]:
    """Where nothing is learnt the rate is off by far, where the curve only bends too little by less."""
    lr, warmup = number(facts.setting("optimizer.lr")), number(facts.setting("optimizer.warmup"))
    now = facts.now("optimizer.lr")
    text = f"ten times as much{now}, and again while this is found" if factor == 10 else f"two to three times as much{now}"
    knobs = [Knob("optimizer.lr", text, f"{factor * lr:.3g}" if lr > 0 else "")]
    if warmup > LONG_WARMUP:
        share = f"{100 * warmup:.0f} % of the steps are below its peak"
        knobs.append(Knob("optimizer.warmup", f"shorter{facts.now('optimizer.warmup')}: {share}", "0.05"))
    return (*knobs, Knob("steps", f"more{facts.now('steps')}, if the rate can't be raised: the loss was still falling"))


def learnt(facts: RunFacts) -> Measure | None:
    """What is left of a uniform guess's loss at the end of the run so far; None for a run that began below it, or too short."""
    loss, uniform = facts.series("loss").finite(), _uniform(facts)
    if len(loss) < 40 or uniform < 1 or loss.values[0] < UNLEARNT * uniform:
        return None
    return Measure("loss at the end over ln(vocabulary)", float(loss.blocks(20).values[-1] / uniform), UNLEARNT)


def _uniform(facts: RunFacts) -> float:
    return math.log(max(2.0, number(facts.setting("model.vocab_size"))))  # NaN stays out: max(2, nan) is 2


def _unlearnt(facts: RunFacts, loss: Series) -> str:
    measure, uniform = learnt(facts), _uniform(facts)
    if measure is None or measure.value <= measure.limit:
        return ""
    after = f"loss {measure.value * uniform:.2f} after {facts.last_step:.0f} steps"
    return f"{after}, from {loss.values[0]:.2f}; a uniform guess has {uniform:.2f}"


def _bent(facts: RunFacts, loss: Series) -> str:
    """The middle of the curve against the power law a·t^−b through its ends (after the warm-up)."""
    fall = loss.after(max(facts.warmup_end, 0.05 * facts.last_step)).blocks(20)
    if len(fall) < 10:
        return ""
    (t0, t1), (first, last) = fall.steps[[0, -1]], fall.values[[0, -1]]
    drop = first - last
    sure = 8 * loss.noise() / math.sqrt(len(loss) / 20)
    if drop < max(0.1, sure) or last <= 0:
        return ""
    exponent = math.log(first / last) / math.log(t1 / t0)
    middle = slice(len(fall) // 2 - 2, len(fall) // 2 + 3)
    law = first * (fall.steps[middle] / t0) ** -exponent
    done, expected = ((first - values.mean()) / drop for values in (fall.values[middle], law))
    if expected - done <= BEND:
        return ""
    return (
        f"by step {fall.steps[len(fall) // 2]:.0f} the loss had done {100 * done:.0f} % of its fall "
        f"from {first:.2f} to {last:.2f}; a power law through both has {100 * expected:.0f} % by then"
    )


def overfit(facts: RunFacts) -> Symptom | None:
    """Validation climbs while training falls."""
    val, loss = facts.series("val_loss").finite(), facts.series("loss").finite()
    if len(val) < 4 or len(loss) < 20:
        return None
    best = int(val.values.argmin())
    limit = val.values[best] + max(0.03, 0.02 * val.values[best], 2 * loss.noise())
    if best >= len(val) - 2 or min(val.values[-2:]) <= limit:
        return None
    blocks = loss.blocks(20)
    then = float(np.interp(val.steps[best], blocks.steps, blocks.values))
    if blocks.values[-1] > then - 0.02:
        return None
    return Symptom(
        "validation left training: the run overfits",
        f"validation {val.values[best]:.3f} at step {val.steps[best]:.0f}, {val.values[-1]:.3f} at the end; "
        f"training {then:.3f} and {blocks.values[-1]:.3f}",
        (
            Knob("data.path", "more text: the run reads its text too often"),
            Knob("steps", f"stop near {val.steps[best]:.0f}"),
            Knob("optimizer.weight_decay", f"more{facts.now('optimizer.weight_decay')}"),
        ),
    )
