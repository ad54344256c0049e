"""Rules over the loss: an unstable start, divergence, skipped steps, slow convergence, overfitting."""

from __future__ import annotations

import math

import numpy as np

from laneway.doctor.facts import RunFacts, Series
from laneway.doctor.finding import Knob, Symptom
from laneway.rundir import number

UNSTABLE_START = (
    "in the first part (twice the warm-up or 20 % of the steps): a non-finite step; or the loss 0.5 nats above its start; or 3 "
    "loss rows more than max(0.75 nats, 8 × noise) above the running median; or 2 gradient norms above 10 × theirs. Single "
    "spikes are ordinary at small batches: plain residual networks have them too"
)
ABOVE_START, SPIKE_NATS, SPIKE_NOISE, SPIKE_ROWS, GRAD_FACTOR, GRAD_ROWS = 0.5, 0.75, 8.0, 3, 10.0, 2
# Rows that a running median looks back on, and rows at the very start that have too little before them.
LOOK_BACK, SETTLE = 15, 5
AT_GUESS = 0.25  # nats around a uniform guess

DIVERGED = (
    "after the first part: the loss ends 0.5 nats (and 5 × the noise of a median) above its lowest stretch; healthy runs at a "
    "constant or falling learning rate do not climb back that far"
)
CLIMB = 0.5

NONFINITE = "any non-finite loss or gradient after the first part: each is a step of data that was not learnt from"

SLOW = (
    "from scratch: after 100 steps and twice the warm-up still above 0.8 · ln(vocabulary), where not even the tokens' "
    "frequencies are learnt; or half-way through, the loss had done 20 points less of its fall than a power law through both "
    "ends of the fall: a healthy curve falls early and flattens, one that falls evenly is driven too weakly"
)
UNLEARNT, BEND = 0.8, 0.2

OVERFIT = (
    "the last two validations lie above the best by more than max(0.03 nats, 2 %, 2 × the noise of a training row), while the "
    "training loss went on falling: the validation sequences are the same each time, but the weights wobble from step to step"
)


def _running_median(values: np.ndarray) -> np.ndarray:
    """Median of the ``LOOK_BACK`` values before each one; NaN for the first ``SETTLE``."""
    padded = np.concatenate([np.full(LOOK_BACK, np.nan), values])[:-1] if len(values) else values
    windows = np.lib.stride_tricks.sliding_window_view(padded, LOOK_BACK) if len(values) else np.empty((0, LOOK_BACK))
    median = np.full(len(values), np.nan)
    if len(values) > SETTLE:
        median[SETTLE:] = np.nanmedian(windows[SETTLE:], axis=1)
    return median


def unstable_start(facts: RunFacts) -> Symptom | None:
    """The first part of the run shakes: what HC does at a rate that is fine for the plain network."""
    end = facts.first_part_end
    loss, grad = facts.series("loss").upto(end).finite(), facts.series("grad_norm").upto(end).finite()
    uniform = math.log(max(2.0, number(facts.setting("model.vocab_size"))))
    evidence = [*_nonfinite_start(facts, end), *_above_start(loss, uniform), *_loss_spikes(loss), *_grad_spikes(grad)]
    if not evidence:
        return None
    lr = number(facts.setting("optimizer.lr"))
    lower = f": {0.8 * lr:.3g} to {0.85 * lr:.3g}, if that was {lr:g}" if math.isfinite(lr) else ""
    cap = facts.setting("model.logit_cap")
    knobs = [
        Knob("optimizer.lr", f"15–20 % under what you used for HC or for the plain residual{lower}"),
        Knob("optimizer.warmup", f"twice as long{facts.now('optimizer.warmup')}"),
        Knob("optimizer.clip_norm", f"1.0 or below, 0 is no clipping{facts.now('optimizer.clip_norm')}"),
    ]
    if facts.residual in ("mhc", "") and not cap:
        knobs.insert(1, Knob("model.logit_cap", "8: uncapped H_res logits let the Sinkhorn iteration run out of range"))
    if facts.residual == "hc":
        knobs.append(Knob("model.residual", "mhc: the manifold bounds what HC lets grow"))
    return Symptom(f"unstable start: the first {end:.0f} steps shake", "; ".join(evidence), tuple(knobs))


def _nonfinite_start(facts: RunFacts, end: float) -> list[str]:
    early = facts.nonfinite[facts.nonfinite <= end]
    return [f"{len(early)} non-finite steps, the first at step {early[0]:.0f}"] if len(early) else []


def _above_start(loss: Series, uniform: float) -> list[str]:
    """The loss over its start: that of the first step, taken before any update, where it is a uniform guess's and so without
    noise; else the median of the first three.
    """
    if len(loss) < SETTLE + 5:
        return []
    start = float(np.median(loss.values[:3]))
    if abs(loss.values[0] - uniform) < AT_GUESS:
        start = float(loss.values[0])
    medians = np.median(np.lib.stride_tricks.sliding_window_view(loss.values[3:], 5), axis=1)
    worst = int(medians.argmax())
    if medians[worst] - start <= ABOVE_START:
        return []
    return [f"loss {medians[worst]:.2f} around step {loss.steps[worst + 5]:.0f}, from {start:.2f} at the start"]


def _loss_spikes(loss: Series) -> list[str]:
    excess = loss.values - _running_median(loss.values)
    limit = max(SPIKE_NATS, SPIKE_NOISE * loss.noise())
    spikes = np.flatnonzero(excess > limit)
    if len(spikes) < SPIKE_ROWS:
        return []
    worst = spikes[excess[spikes].argmax()]
    return [
        f"{len(spikes)} loss rows more than {limit:.2f} above the running median, "
        f"{excess[worst]:.2f} at step {loss.steps[worst]:.0f}"
    ]


def _grad_spikes(grad: Series) -> list[str]:
    ratio = grad.values / np.maximum(_running_median(grad.values), 1e-30)
    spikes = np.flatnonzero(ratio > GRAD_FACTOR)
    if len(spikes) < GRAD_ROWS:
        return []
    worst = spikes[ratio[spikes].argmax()]
    return [
        f"{len(spikes)} gradient norms above {GRAD_FACTOR:.0f} × the running median, "
        f"{ratio[worst]:.0f} × at step {grad.steps[worst]:.0f}"
    ]


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
            ),
            Knob("optimizer.beta2", "0.95 or lower: a long memory of small gradients makes the next large one a large step"),
            Knob("precision", "fp32, if the run was in bf16"),
        ),
    )


def nonfinite_steps(facts: RunFacts) -> Symptom | None:
    """Steps that were skipped after the start."""
    late = facts.nonfinite[facts.nonfinite > facts.first_part_end]
    if not len(late):
        return None
    return Symptom(
        f"{len(late)} steps were not finite and were skipped",
        f"the first at step {late[0]:.0f}, the last at step {late[-1]:.0f}, of {facts.last_step:.0f}",
        (
            Knob("optimizer.lr", f"lower{facts.now('optimizer.lr')}"),
            Knob("optimizer.clip_norm", f"1.0 or below{facts.now('optimizer.clip_norm')}"),
            Knob("precision", f"fp32{facts.now('precision')}, to see whether range is the cause"),
        ),
    )


def slow_convergence(facts: RunFacts) -> Symptom | None:
    """The loss comes down too slowly for what was spent."""
    loss = facts.series("loss").finite()
    if len(loss) < 40 or facts.last_step < max(100.0, 2 * facts.warmup_end):
        return None
    evidence = _unlearnt(facts, loss) or _bent(facts, loss)
    if not evidence:
        return None
    return Symptom(
        "slow convergence",
        evidence,
        (
            Knob("optimizer.lr", f"two to three times as much{facts.now('optimizer.lr')}"),
            Knob("optimizer.warmup", "shorter: the rate spends its steps below its peak"),
            Knob("steps", "more, if the rate can't be raised: the loss was still falling evenly"),
        ),
    )


def _unlearnt(facts: RunFacts, loss: Series) -> str:
    uniform = math.log(max(2.0, number(facts.setting("model.vocab_size"))))  # NaN stays out: max(2, nan) is 2
    blocks = loss.blocks(20)
    if uniform < 1 or loss.values[0] < UNLEARNT * uniform or blocks.values[-1] <= UNLEARNT * uniform:
        return ""
    after = f"loss {blocks.values[-1]:.2f} after {facts.last_step:.0f} steps"
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
