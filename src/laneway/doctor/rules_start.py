"""The rule over the first part of a run: an unstable start."""

from __future__ import annotations

import math

import numpy as np

from laneway.doctor.facts import RunFacts, Series
from laneway.doctor.finding import Knob, Measure, Symptom
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


def _running_median(values: np.ndarray) -> np.ndarray:
    """Median of the ``LOOK_BACK`` values before each one; NaN for the first ``SETTLE``."""
    padded = np.concatenate([np.full(LOOK_BACK, np.nan), values])[:-1] if len(values) else values
    windows = np.lib.stride_tricks.sliding_window_view(padded, LOOK_BACK) if len(values) else np.empty((0, LOOK_BACK))
    median = np.full(len(values), np.nan)
    if len(values) > SETTLE:
        median[SETTLE:] = np.nanmedian(windows[SETTLE:], axis=1)
    return median


def rise(facts: RunFacts) -> Measure | None:
    """How far the loss climbs over its start in the first part; None while there is too little of it."""
    found = _rise(facts.series("loss").upto(facts.first_part_end).finite(), _uniform(facts))
    return None if found is None else Measure("rise of the loss over its start, nats", found[0] - found[1], ABOVE_START)


def unstable_start(facts: RunFacts) -> Symptom | None:
    """The first part of the run shakes: what HC does at a rate that is fine for the plain network."""
    end = facts.first_part_end
    loss, grad = facts.series("loss").upto(end).finite(), facts.series("grad_norm").upto(end).finite()
    nonfinite, above = _nonfinite_start(facts, end), _above_start(loss, _uniform(facts))
    spikes = [*_loss_spikes(loss), *_grad_spikes(grad)]
    evidence = [*nonfinite, *above, *spikes]
    if not evidence:
        return None
    lr, warmup = number(facts.setting("optimizer.lr")), number(facts.setting("optimizer.warmup"))
    knobs = [_lr(lr, wild=bool(nonfinite or above)), _warmup(warmup)]
    if nonfinite or spikes:
        knobs.append(clip_knob(facts))
    if facts.residual in ("mhc", "") and not facts.setting("model.logit_cap"):
        knobs.insert(1, Knob("model.logit_cap", "8: uncapped H_res logits let the Sinkhorn iteration run out of range", "8"))
    if facts.residual == "hc":
        knobs.append(Knob("model.residual", "mhc: the manifold bounds what HC lets grow", "mhc"))
    return Symptom(f"unstable start: the first {end:.0f} steps shake", "; ".join(evidence), tuple(knobs))


def _uniform(facts: RunFacts) -> float:
    return math.log(max(2.0, number(facts.setting("model.vocab_size"))))


def _lr(lr: float, wild: bool) -> Knob:
    """A loss that leaves its start is driven by steps far too large; one that only spikes, by steps a little too large."""
    if wild:
        now = f" (now {lr:g})" if math.isfinite(lr) else ""
        text = f"a tenth{now}, then up again while the start stays calm"
        return Knob("optimizer.lr", text, f"{0.1 * lr:.3g}" if lr > 0 else "")
    text = "15–20 % under what you used for HC or for the plain residual"
    if not lr > 0:
        return Knob("optimizer.lr", text)
    return Knob("optimizer.lr", f"{text}: {0.8 * lr:.3g} to {0.85 * lr:.3g}, if that was {lr:g}", f"{0.8 * lr:.3g}")


def _warmup(warmup: float) -> Knob:
    if warmup == 0:
        return Knob("optimizer.warmup", "a tenth of the steps (now 0)", "0.1")
    if not 0 < warmup <= 0.5:
        return Knob("optimizer.warmup", "twice as long")
    return Knob("optimizer.warmup", f"twice as long (now {warmup:g})", f"{2 * warmup:.3g}")


def clip_knob(facts: RunFacts) -> Knob:
    """Against single large gradients. A loss that climbs evenly hardly feels it: Adam divides by the gradients' own size."""
    clip = number(facts.setting("optimizer.clip_norm"))
    if not math.isfinite(clip):
        return Knob("optimizer.clip_norm", "1.0 or below")
    if clip == 0 or clip > 1:
        return Knob("optimizer.clip_norm", f"1.0 or below (now {clip:g}{', no clipping' if clip == 0 else ''})", "1.0")
    return Knob("optimizer.clip_norm", f"half (now {clip:g})", f"{clip / 2:.3g}")


def _nonfinite_start(facts: RunFacts, end: float) -> list[str]:
    early = facts.nonfinite[facts.nonfinite <= end]
    return [f"{len(early)} non-finite steps, the first at step {early[0]:.0f}"] if len(early) else []


def _rise(loss: Series, uniform: float) -> tuple[float, float, float] | None:
    """The highest median of 5 rows, the start, and the step: the start is the loss of the first step, taken before any update,
    where it is a uniform guess's and so without noise; else the median of the first three.
    """
    if len(loss) < SETTLE + 5:
        return None
    start = float(np.median(loss.values[:3]))
    if abs(loss.values[0] - uniform) < AT_GUESS:
        start = float(loss.values[0])
    medians = np.median(np.lib.stride_tricks.sliding_window_view(loss.values[3:], 5), axis=1)
    worst = int(medians.argmax())
    return float(medians[worst]), start, float(loss.steps[worst + 5])


def _above_start(loss: Series, uniform: float) -> list[str]:
    found = _rise(loss, uniform)
    if found is None or found[0] - found[1] <= ABOVE_START:
        return []
    worst, start, step = found
    return [f"loss {worst:.2f} around step {step:.0f}, from {start:.2f} at the start"]


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
