"""The quality bench trains every variant on the same data and pairs what it compares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from laneway.bench import quality
from laneway.core import InputError

TINY = quality.QualityOptions(
    variants=("residual", "mhc", "mhc-uncapped"),
    seeds=2,
    steps=3,
    layers=1,
    dim=16,
    context=16,
    batch_size=2,
    validation_batches=1,
    probe_every=2,
)


@pytest.fixture(autouse=True)
def _text(tmp_path, monkeypatch):
    monkeypatch.setenv("LANEWAY_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANEWAY_CACHE", str(tmp_path_factory.mktemp("text")))
        return quality.run(TINY)


def test_rows_and_summary(report):
    rows = report.tables["quality"]
    assert [(row["seed"], row["variant"]) for row in rows] == [(s, v) for s in (0, 1) for v in TINY.variants]
    assert all(row["gain_forward_max"] >= 1.0 - 1e-4 for row in rows)
    assert len({tuple(row) for row in rows}) == 1
    summary = report.summary["residual"]
    assert summary["val_loss_minus_residual"]["value"] == 0.0
    assert summary["step_time_over_residual"]["value"] == 1.0
    assert summary["step_memory_over_residual"]["value"] == 1.0
    mhc = report.summary["mhc"]
    assert mhc["step_memory_over_residual"]["value"] > 1.0
    mean = sum(row["val_loss"] for row in rows if row["variant"] == "mhc") / 2
    assert mhc["val_loss"]["value"] == pytest.approx(mean)
    assert mhc["val_loss"]["low"] < mean < mhc["val_loss"]["high"]


def test_training_is_the_same_run_as_alone(report):
    """Side by side or alone: the loss of a variant does not depend on its neighbours."""
    together = {row["variant"]: row["val_loss"] for row in report.tables["quality"] if row["seed"] == 0}
    alone = quality.run(replace(TINY, variants=("residual",), seeds=1)).tables["quality"][0]["val_loss"]
    assert together["residual"] == alone


def test_variants_differ_in_the_model_alone():
    a, b = TINY.config("residual", 1), TINY.config("mhc-uncapped", 1)
    assert (a.data, a.optimizer, a.steps, a.seed) == (b.data, b.optimizer, b.steps, b.seed)
    assert (b.model.residual, b.model.logit_cap) == ("mhc", 0.0)


@pytest.mark.parametrize(
    ("change", "field", "part"),
    [
        ({"variants": ("residual", "mch")}, "variants", "did you mean 'mhc'?"),
        ({"variants": ("mhc",)}, "variants", "with residual"),
        ({"seeds": 0}, "seeds", "an integer ≥ 1"),
        ({"steps": -1}, "steps", "an integer ≥ 1"),
        ({"threads": -1}, "threads", "an integer ≥ 0"),
        ({"lr": 0.0}, "optimizer.lr", "a number > 0"),
    ],
)
def test_bad_options(change, field, part):
    with pytest.raises(InputError) as caught:
        quality.run(replace(TINY, **change))
    assert caught.value.field == field
    assert part in str(caught.value)


def test_quick_is_smaller_and_says_so():
    options = quality.quick(quality.QualityOptions())
    assert options.quick
    assert options.steps * options.layers * options.dim < 300 * 8 * 64 / 20


def test_threads_are_those_asked_for_and_are_put_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rows = quality.run(replace(TINY, variants=("residual",), seeds=1, threads=1)).tables["quality"]
        assert rows[0]["threads"] == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert quality.quick(quality.QualityOptions()).threads == 1
