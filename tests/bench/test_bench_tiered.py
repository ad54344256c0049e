"""``laneway bench memory`` on a very small network: its rows, and what must hold in them."""

from __future__ import annotations

import pytest

from laneway.bench import tiered
from laneway.bench.tiered_models import Size
from laneway.core import InputError

SMALL = Size(layers=3, dim=32, heads=2, vocabulary=64, length=64, batch=8)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    options = tiered.MemoryOptions(
        models=("llama",), dtype=("fp32",), budgets=(0.75,), peers=("checkpoint", "torch_save"), virtual=(20.0,),
        folder=str(tmp_path_factory.mktemp("tier")), seconds=1.0, spikes=(2.0,), size=SMALL,
    )  # fmt: skip
    options.check()
    return tiered.run(options)


def test_every_way_has_the_gradients_of_plain_training(report):
    rows = report.tables["memory"]
    assert [row["variant"] for row in rows] == ["none", "checkpoint", "torch_save", "managed 0.75"]
    assert all(row["exact"] == 1 for row in rows)
    assert all(row["rounds"] >= 5 for row in rows)
    assert rows[0]["wall_over_none"] == 1.0


def test_the_managed_peak_is_within_its_budget(report):
    managed = report.tables["memory"][-1]
    assert managed["peak_ratio"] <= 0.78
    assert managed["moved"] + managed["recomputed"] + managed["checkpointed"] > 0
    assert managed["beta"] > 0


def test_a_modelled_link_is_followed_with_the_same_bits(report):
    rows = report.tables["memory_virtual"]
    assert [row["variant"] for row in rows] == ["move only", "mixed"]
    assert all(row["exact"] == 1 for row in rows)
    assert rows[0]["recomputed"] == rows[0]["checkpointed"] == 0


def test_a_spike_ends_plain_training_and_not_the_managed_step(report):
    (row,) = report.tables["memory_spike"]
    assert row["demand_over_limit"] > 1
    assert (row["plain_survived"], row["managed_survived"], row["exact"]) == (0, 1, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("models", ("bert",)),
        ("dtype", ("fp8",)),
        ("peers", ("none",)),
        ("budgets", (1.2,)),
        ("virtual", (0.0,)),
        ("spikes", (5.0,)),
    ],
)
def test_wrong_options_are_named(field, value):
    with pytest.raises(InputError, match=field):
        tiered.MemoryOptions(**{field: value}).check()
