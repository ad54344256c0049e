"""What the runs of ``laneway bench stability`` come to: a row a cell, and of each mechanism whether it earned its keep."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from laneway.bench.rows import Row
from laneway.bench.stability_conditions import CONDITIONS
from laneway.bench.stability_variants import RESIDUALS, VARIANTS
from laneway.bench.stats import Interval, holm, mean_interval, sign_flip, spread, wilson

COPIED = ("variant", "condition", "layers", "dim", "context", "batch_size", "steps", "lr", "streams_dtype", "fault")
LEVEL = 0.05  # of the tests of one mechanism against one other, over all conditions together


def cells_of(runs: Sequence[Row]) -> list[Row]:
    """One row a variant and condition."""
    cells: list[Row] = []
    for condition in CONDITIONS:
        for variant in VARIANTS:
            own = _cell(runs, variant, condition)
            if own:
                cells.append(_cell_row(own, runs))
    return cells


def verdicts_of(runs: Sequence[Row]) -> list[Row]:
    """One row a mechanism and what it is held against: plain mHC, then its simplest control.

    Of each condition that both went through, the validation losses are compared seed by seed, over runs that did not diverge,
    with a test of flipped signs; Holm's procedure keeps the chance of any false difference among them under ``LEVEL``. Runs that
    diverged are counted in all of these conditions, with losses to compare or without.
    """
    rows = []
    for variant, about in VARIANTS.items():
        others = [] if variant in RESIDUALS else list(dict.fromkeys(("mhc", about.against)))
        for other in others:
            paired = {name: _paired(_cell(runs, variant, name), _cell(runs, other, name)) for name in CONDITIONS}
            paired = {name: differences for name, differences in paired.items() if len(differences) > 1}
            if paired:
                rows.append(_verdict(variant, other, paired, runs))
    return rows


def _verdict(variant: str, other: str, paired: dict[str, list[float]], runs: Sequence[Row]) -> Row:
    real = holm([sign_flip(differences) for differences in paired.values()], LEVEL)
    means = {name: statistics.fmean(differences) for name, differences in paired.items()}
    better = [name for name, found in zip(paired, real, strict=True) if found and means[name] < 0]
    worse = [name for name, found in zip(paired, real, strict=True) if found and means[name] > 0]
    fewest = len(paired) * 2 ** (1 - max(map(len, paired.values())))  # the smallest p that so few signs can have, corrected
    none = "neutral" if fewest <= LEVEL else "too few runs"
    words = {(False, False): none, (True, False): "helps", (False, True): "hurts", (True, True): "depends"}
    shared = [name for name in CONDITIONS if _cell(runs, variant, name) and _cell(runs, other, name)]  # also where none survived
    diverged = {who: sum(row["diverged"] for name in shared for row in _cell(runs, who, name)) for who in (variant, other)}
    return {
        "variant": variant,
        "against": other,
        "conditions": len(paired),
        "pairs": sum(map(len, paired.values())),
        "better": " ".join(better),
        "worse": " ".join(worse),
        "verdict": words[bool(better), bool(worse)],
        "difference_mean": statistics.fmean(means.values()),
        "difference_best": min(means.values()),
        "difference_worst": max(means.values()),
        "diverged": diverged[variant],
        "against_diverged": diverged[other],
    }


def _cell(runs: Sequence[Row], variant: str, condition: str) -> list[Row]:
    return [row for row in runs if row["variant"] == variant and row["condition"] == condition]


def _paired(own: Sequence[Row], others: Sequence[Row]) -> list[float]:
    """Validation loss less the other's, for each seed whose runs both survived."""
    losses = {row["seed"]: row["val_loss"] for row in others if not row["diverged"]}
    return [row["val_loss"] - losses[row["seed"]] for row in own if not row["diverged"] and row["seed"] in losses]


def _cell_row(own: list[Row], runs: Sequence[Row]) -> Row:
    first, alive = own[0], [row for row in own if not row["diverged"]]
    variant, condition = str(first["variant"]), str(first["condition"])
    losses = [row["val_loss"] for row in alive]
    excess = [row["val_excess"] for row in alive if row["val_excess"] is not None]
    recovered = [row["recovery_steps"] for row in alive if row["recovery_steps"] is not None]
    paired = _paired(own, _cell(runs, "mhc", condition))
    against = VARIANTS[variant].against
    return {
        **{key: first[key] for key in COPIED},
        "runs": len(own),
        "diverged": len(own) - len(alive),
        **wilson(len(own) - len(alive), len(own)).columns("diverged_share"),
        "nonfinite_runs": sum(row["nonfinite_steps"] > 0 for row in own),
        **{
            f"gain_{way}_{kind.__name__}": kind([row[f"gain_{way}_max"] or math.nan for row in own])
            for way in ("forward", "backward")
            for kind in (statistics.median, max)
        },
        **_mean(losses).columns("val_loss"),
        "val_loss_sd": spread(losses),
        **_mean(paired).columns("val_loss_minus_mhc"),
        "paired": len(paired),
        "against": against,
        **_mean(_paired(own, _cell(runs, against, condition))).columns("val_loss_minus_against"),
        **_mean(excess).columns("val_excess"),
        "recovered": len(recovered) if first["fault"] else None,
        "recovery_steps_median": statistics.median(recovered) if recovered else None,
        "purified_steps": statistics.fmean(row["purified_steps"] for row in own),
        "cpu_s": sum(row["cpu_s"] for row in own),
    }


def _mean(values: Sequence[float]) -> Interval:
    return mean_interval(values) if values else Interval.exact(math.nan)
