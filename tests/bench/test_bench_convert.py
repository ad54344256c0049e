"""The conversion bench: one pretrained model, three ways to go on, the same batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from laneway.bench import convert as bench
from laneway.connections.parameters import connections
from laneway.core import InputError

pytest.importorskip("transformers", minversion="5.24", reason="needs transformers 5.24")
TINY = bench.ConvertOptions(
    seeds=2, pretrain_steps=3, steps=3, layers=2, dim=16, context=16, batch_size=2, validation_batches=2, lr_maps=3e-2
)


@pytest.fixture(autouse=True)
def _text(tmp_path, monkeypatch):
    monkeypatch.setenv("LANEWAY_CACHE", str(tmp_path))


def test_rows_and_summary():
    report = bench.run(TINY)
    rows = report.tables["convert"]
    assert [(row["seed"], row["variant"]) for row in rows] == [(seed, name) for seed in (0, 1) for name in bench.VARIANTS]
    assert len({tuple(row) for row in rows}) == 1
    for row in rows:
        assert row["val_loss"] != row["val_loss_before"], "every variant trains"
        plain = next(other for other in rows if other["seed"] == row["seed"])
        assert row["val_loss_before"] == pytest.approx(plain["val_loss_before"], abs=1e-5), "all begin as one function"
    summary = report.summary
    assert summary["plain"]["val_loss_minus_plain"]["value"] == 0.0
    assert summary["plain"]["step_time_over_plain"]["value"] == 1.0
    mean = sum(row["val_loss"] - row["val_loss_before"] for row in rows if row["variant"] == "mhc_all") / 2
    assert summary["mhc_all"]["val_loss_minus_before"]["value"] == pytest.approx(mean)


def test_what_trains_in_each_variant():
    torch.manual_seed(0)
    base = bench.llama(TINY)
    runs = {name: bench.variant_of(base, name, TINY) for name in bench.VARIANTS}
    sizes = {name: (len(run.trainable), len(list(run.model.parameters()))) for name, run in runs.items()}
    maps = sum(len(list(module.parameters())) for module in connections(runs["mhc_all"].model))
    assert sizes["plain"][0] == sizes["plain"][1]
    assert sizes["mhc_maps"] == (maps, sizes["plain"][1] + maps)
    assert sizes["mhc_all"] == (sizes["plain"][1] + maps,) * 2
    assert [run.config.lr for run in runs.values()] == [TINY.lr, TINY.lr_maps, TINY.lr]
    assert not connections(base), "the pretrained model itself stays plain"


def test_a_seed_gives_the_same_losses_again():
    alone = replace(TINY, seeds=1)
    first, second = ([row["val_loss"] for row in bench.run(alone).tables["convert"]] for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seeds": 0}, "seeds"),
        ({"streams": 1}, "streams"),
        ({"dim": 20}, "dim"),
        ({"lr_maps": 0.0}, "lr_maps"),
        ({"steps": 0}, "steps"),
    ],
)
def test_bad_options(change, field):
    with pytest.raises(InputError) as caught:
        bench.run(replace(TINY, **change))
    assert caught.value.field == field


def test_quick_is_smaller_and_says_so():
    options = bench.quick(bench.ConvertOptions())
    assert options.quick
    assert options.steps * options.layers * options.dim < 100 * 4 * 64 / 10
