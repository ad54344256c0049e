"""Rules over the streams: collapse, frozen maps, composite gain, Sinkhorn error."""

from __future__ import annotations

import numpy as np

from laneway.doctor.facts import RunFacts
from laneway.doctor.finding import Knob, Symptom
from laneway.rundir import number

COLLAPSED = (
    "mean cosine between the streams above 0.999 at the last probe, after the warm-up and 50 steps: then the streams carry one "
    "direction. Uniform maps are a dead start: all streams get the same gradient for ever"
)
COLLAPSE, FROM_STEP = 0.999, 50.0

FROZEN = (
    "no site's entropy of H_res moved by more than max(1e-4 nats, 2 %) between the first and any later probe, over 100 steps and "
    "twice the warm-up: the maps are where they started"
)
MOVED_NATS, MOVED_PART = 1e-4, 0.02
# Residuals whose H_res is learnt and holds probabilities, so that its entropy says how much it mixes.
MIXING = ("mhc", "mhc-lite", "kronecker")

GAIN = (
    "composite gain above 10: the whole depth multiplies the streams by that much. mHC keeps it below about 3, HC reaches "
    "thousands (arXiv 2512.24880, figure 3), and in 16-bit floats such streams overflow"
)
GAIN_LIMIT = 10.0
USUAL_CAP, USUAL_ITERATIONS = 8.0, 20

SINKHORN = (
    "Sinkhorn error (largest |log column sum| of an H_res) above 0.1: 20 iterations with logits capped at 8 stay below 0.1, so "
    "the iteration has not converged"
)
SINKHORN_LIMIT = 0.1
# Residuals for which no such constraint is meant to hold.
UNCONSTRAINED = ("hc", "orthogonal", "residual", "identity")


def streams_collapsed(facts: RunFacts) -> Symptom | None:
    """All streams say the same."""
    collapse = facts.series("collapse").finite()
    if not len(collapse) or facts.setting("model.streams", 2) == 1 or facts.residual == "residual":
        return None
    if collapse.steps[-1] < max(FROM_STEP, facts.warmup_end) or collapse.values[-1] <= COLLAPSE:
        return None
    return Symptom(
        "the streams collapsed: a dead start, the width of the residual is not used",
        f"mean cosine {collapse.values[-1]:.5f} at step {collapse.steps[-1]:.0f}, {collapse.values.min():.5f} at its lowest",
        (
            Knob("optimizer.lr", f"raise{facts.now('optimizer.lr')}: the maps move with it", facts.scaled("optimizer.lr", 2)),
            Knob("model.residual", f"another manifold{facts.now('model.residual')}, to see whether the maps are the cause"),
            Knob("model.streams", "1, if the streams stay alike: it costs less and computes the same", "1"),
        ),
    )


def residual_map_frozen(facts: RunFacts) -> Symptom | None:
    """H_res never left its start."""
    steps, entropy = facts.sites("site_res_entropy")
    if not len(steps):
        series = facts.series("res_entropy").finite()
        steps, entropy = series.steps, series.values[:, None]
    if facts.residual not in MIXING or len(steps) < 3 or facts.setting("model.streams", 2) == 1:
        return None
    if steps[-1] - steps[0] < max(100.0, 2 * facts.warmup_end) or not np.isfinite(entropy).all():
        return None
    moved = np.abs(entropy - entropy[0])
    if (moved > np.maximum(MOVED_NATS, MOVED_PART * np.abs(entropy[0]))).any():
        return None
    cap = number(facts.setting("model.logit_cap"))
    knobs = [Knob("optimizer.lr", f"raise{facts.now('optimizer.lr')}", facts.scaled("optimizer.lr", 2))]
    if not (cap == 0 or cap >= USUAL_CAP):
        knobs.append(Knob("model.logit_cap", f"8{facts.now('model.logit_cap')}: a low cap holds the logits where they are", "8"))
    return Symptom(
        "H_res never moved off its start",
        f"over {len(steps)} probes up to step {steps[-1]:.0f} no site's H_res changed its entropy by over {moved.max():.1e} nats",
        tuple(knobs),
    )


def composite_gain(facts: RunFacts) -> Symptom | None:
    """The product of all H_res amplifies."""
    worst: list[tuple[float, float, str]] = []
    for direction in ("forward", "backward"):
        gain = facts.series(f"gain_{direction}").finite()
        if len(gain):
            at = int(gain.values.argmax())
            worst.append((float(gain.values[at]), float(gain.steps[at]), direction))
    value, step, direction = max(worst, default=(0.0, 0.0, ""))
    if value <= GAIN_LIMIT:
        return None
    lower = f"15–20 % lower{facts.now('optimizer.lr')}: gain grows with it"
    knobs = [Knob("optimizer.lr", lower, facts.scaled("optimizer.lr", 0.8))]
    if facts.residual == "hc":
        knobs.insert(0, Knob("model.residual", "mhc: H_res on the manifold of doubly stochastic matrices", "mhc"))
    elif facts.residual in ("mhc", ""):
        knobs.insert(0, _more_iterations(facts))
        knobs.insert(1, Knob("model.residual", "mhc-lite: exactly doubly stochastic at any logits", "mhc-lite"))
    return Symptom(
        f"the streams are amplified: composite gain {value:.3g}",
        f"{direction} gain {value:.3g} at step {step:.0f}{_place(facts, direction)}",
        tuple(knobs),
    )


def _place(facts: RunFacts, direction: str) -> str:
    """The site with the largest gain, where sites were recorded."""
    _, gain = facts.sites(f"site_gain_{direction}")
    if not np.isfinite(gain).any():
        return ""
    return f", largest at site {np.nanmax(np.where(np.isfinite(gain), gain, -np.inf), axis=0).argmax()} of {gain.shape[1]}"


def _more_iterations(facts: RunFacts) -> Knob:
    """20, as usual, or twice as many where there are that many."""
    now = number(facts.setting("model.sinkhorn_iterations"))
    value = "" if not now > 0 else "20" if now < USUAL_ITERATIONS else f"{2 * now:.0f}"
    return Knob("model.sinkhorn_iterations", f"more{facts.now('model.sinkhorn_iterations')}", value)


def _lower_cap(facts: RunFacts) -> Knob:
    cap = number(facts.setting("model.logit_cap"))
    value = f"{cap / 2:.3g}" if 0 < cap <= USUAL_CAP else "8"
    text = f"{value}{facts.now('model.logit_cap')}{', uncapped' if cap == 0 else ''}: smaller logits converge faster"
    return Knob("model.logit_cap", text, value)


def sinkhorn_error(facts: RunFacts) -> Symptom | None:
    """The Sinkhorn iteration stops before it converges."""
    error = facts.series("sinkhorn_error").finite()
    if not len(error) or facts.residual in UNCONSTRAINED:
        return None
    at = int(error.values.argmax())
    if error.values[at] <= SINKHORN_LIMIT:
        return None
    return Symptom(
        f"the Sinkhorn iteration does not converge: error {error.values[at]:.2g}",
        f"largest |log column sum| {error.values[at]:.2g} at step {error.steps[at]:.0f}, "
        f"{error.values[-1]:.2g} at the last probe",
        (
            _lower_cap(facts),
            _more_iterations(facts),
            Knob("model.residual", "mhc-lite (Birkhoff mixture): exactly doubly stochastic without an iteration", "mhc-lite"),
        ),
    )
