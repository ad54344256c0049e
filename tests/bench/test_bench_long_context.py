"""Loss by position of models that read further than they were trained, and the residual given a variant's time."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from laneway.bench import long_context, quality
from laneway.core import InputError
from laneway.train.ranks import ranks_of_run
from laneway.train.step import token_loss
from laneway.train.workbench import build

TINY = long_context.LongContextOptions(
    variants=("residual", "mhc"),
    seeds=2,
    steps=2,
    layers=1,
    dim=16,
    context=32,
    read_to=128,
    batch_size=2,
    sequences=2,
    threads=1,
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANEWAY_CACHE", str(tmp_path_factory.mktemp("text")))
        yield


def test_stretches_cover_every_position_once():
    for context, read_to in ((512, 4096), (32, 128), (100, 1000), (64, 64)):
        parts = long_context.stretches(context, read_to)
        assert parts[0][0] == 0
        assert parts[-1][1] == read_to
        assert all(before[1] == after[0] for before, after in pairwise(parts))
        assert context in [stop for _, stop in parts]


def test_rows_by_stretch(cache):
    report = long_context.run(TINY)
    rows = report.tables["quality_context"]
    assert [(r["variant"], r["seed"], r["to_position"]) for r in rows] == [
        (v, s, p) for s in (0, 1) for v in ("residual", "mhc") for p in (32, 64, 128)
    ]
    assert all(r["perplexity"] == pytest.approx(math.exp(r["loss"])) for r in rows)
    assert report.summary["residual to 128"]["loss_minus_residual"]["value"] == 0.0
    mhc = [r["loss"] for r in rows if (r["variant"], r["to_position"]) == ("mhc", 64)]
    assert report.summary["mhc to 64"]["loss"]["value"] == pytest.approx(sum(mhc) / 2)


def test_the_longer_model_is_the_trained_one(cache):
    """Within the trained length its losses are the trained model's own."""
    with ranks_of_run("cpu") as ranks:
        bench = build(TINY.training.config("mhc", 0), ranks)
    loss = long_context.loss_by_position(bench, 128, 1)
    assert loss.shape == (128,)
    inputs = torch.tensor([bench.corpus.validation[0:32].tolist()])
    targets = torch.tensor([bench.corpus.validation[1:33].tolist()])
    with torch.no_grad():
        own = token_loss(bench.parallel.model(inputs), targets, reduction="none")
    assert torch.allclose(loss[:32].float(), own, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "field"), [({"read_to": 16}, "read_to"), ({"variants": ("mhc",)}, "variants"), ({"sequences": 0}, "sequences")]
)
def test_bad_input(changes, field):
    with pytest.raises(InputError, match=field):
        replace(TINY, **changes).check()


def test_the_residual_gets_the_time_of_each_variant(cache):
    options = quality.QualityOptions(
        variants=("residual", "mhc"), seeds=2, steps=4, layers=1, dim=16, context=16, batch_size=2, validation_batches=1,
        threads=1, equal_time=True,
    )  # fmt: skip
    report = quality.run(options)
    rows = report.tables["quality_time"]
    assert [(r["variant"], r["seed"]) for r in rows] == [("mhc", 0), ("mhc", 1)]
    losses = {(r["variant"], r["seed"]): r["val_loss"] for r in report.tables["quality"]}
    for row in rows:
        assert row["residual_steps"] == max(1, round(4 * row["step_time_over_residual"]))
        assert row["val_loss"] == losses["mhc", row["seed"]]
        assert row["val_loss_minus_residual"] == pytest.approx(row["val_loss"] - row["residual_val_loss"])
        longer = replace(options, steps=row["residual_steps"], variants=("residual",), equal_time=False, seeds=1)
        if row["seed"] == 0:
            assert quality.run(longer).tables["quality"][0]["val_loss"] == row["residual_val_loss"]
    assert report.summary["mhc at equal time"]["val_loss_minus_residual"]["value"] == pytest.approx(
        sum(r["val_loss_minus_residual"] for r in rows) / 2
    )
