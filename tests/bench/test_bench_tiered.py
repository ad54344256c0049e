"""``laneway bench memory`` on a very small network: its rows, and what must hold in them."""

from __future__ import annotations

import pytest

from laneway.bench import tiered
from laneway.bench.table import COLUMNS
from laneway.bench.tiered_limits import WAYS
from laneway.bench.tiered_models import MODELS, Size
from laneway.bench.tiered_subject import Subject
from laneway.bench.tiered_variants import at_equal_peak
from laneway.core import InputError
from laneway.memory.counting import CountingAllocator

SMALL = Size(layers=3, dim=48, heads=6, vocabulary=64, length=64, batch=8)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    options = tiered.MemoryOptions(
        models=("llama",), dtype=("fp32",), tables=("steps", "virtual", "spikes", "solver"), budgets=(0.75,),
        peers=("checkpoint", "torch_save"), equal_peak=("checkpoint",), states=("8bit", "streamed-8bit"), totals=(0.7,),
        virtual=(20.0,), folder=str(tmp_path_factory.mktemp("tier")), seconds=1.0, spikes=(2.0,), size=SMALL,
    )  # fmt: skip
    options.check()
    return tiered.run(options)


def test_every_way_has_the_gradients_of_plain_training(report):
    rows = report.tables["memory"]
    assert [row["variant"] for row in rows] == [
        "none", "checkpoint", "torch_save", "checkpoint to 0.75", "managed 0.75", "8bit", "managed 0.7 8bit",
        "managed 0.7 streamed-8bit",
    ]  # fmt: skip
    assert all(row["exact"] == 1 for row in rows)
    assert all(row["rounds"] >= 5 for row in rows)
    assert rows[0]["wall_over_none"] == 1.0


def test_every_table_has_its_columns_and_beta(report):
    for name, rows in report.tables.items():
        assert rows
        assert all(set(COLUMNS[name]) <= set(row) for row in rows)
        assert all(list(row) == list(rows[0]) for row in rows)
        assert all(row["beta"] > 0 for row in rows)


def test_the_managed_peak_is_within_its_budget(report):
    rows = {row["variant"]: row for row in report.tables["memory"]}
    managed = rows["managed 0.75"]
    assert managed["peak_ratio"] <= 0.78
    assert managed["moved"] + managed["recomputed"] + managed["checkpointed"] > 0
    assert abs(managed["peak_error"]) < 0.2
    assert managed["time_error_points"] is not None
    assert rows["managed 0.7 streamed-8bit"]["peak_ratio"] <= 0.73
    assert "rounds the moments" in rows["8bit"]["reason"]


def test_a_dial_is_turned_only_so_far(report):
    rows = {row["variant"]: row for row in report.tables["memory"]}
    assert rows["checkpoint"]["peak_ratio"] <= rows["checkpoint to 0.75"]["peak_ratio"] <= 0.75
    assert rows["checkpoint to 0.75"]["reason"] in ("1 of 3 blocks", "2 of 3 blocks")


def test_a_modelled_link_is_followed_with_the_same_bits(report):
    rows = report.tables["memory_virtual"]
    assert [row["variant"] for row in rows] == ["move only", "mixed"]
    assert all(row["exact"] == 1 for row in rows)
    assert rows[0]["recomputed"] == rows[0]["checkpointed"] == 0


def test_a_spike_ends_plain_training_and_not_the_managed_step(report):
    (row,) = report.tables["memory_spike"]
    assert row["demand_over_limit"] > 1
    assert (row["plain_survived"], row["managed_survived"]) == (0, 1)
    assert row["exact"] == 1 or row["splits"] > 0
    assert row["gradient_error"] < 1e-5


def test_both_solvers_plan_the_same_pass(report):
    rows = report.tables["memory_solver"]
    if not rows:
        assert any("scipy" in note for note in report.notes)
        return
    assert [row["solver"] for row in rows] == ["greedy", "milp"] * 2
    assert all(row["predicted_peak_ratio"] <= 0.76 for row in rows if row["feasible"])
    assert rows[0]["beta"] == rows[1]["beta"] != rows[2]["beta"]


@pytest.mark.slow
def test_the_largest_batches(tmp_path):
    size = Size(layers=2, dim=64, heads=2, vocabulary=64, length=128, batch=8)
    options = tiered.MemoryOptions(models=("gpt",), dtype=("fp32",), tables=("batches",), folder=str(tmp_path), size=size)
    rows = {row["variant"]: row for row in tiered.run(options).tables["memory_batch"]}
    assert list(rows) == list(WAYS)
    assert rows["none"]["batch"] >= 2
    assert rows["managed streamed"]["batch"] > rows["none"]["batch"]
    assert all(row["tokens_per_s"] > 0 for row in rows.values())


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it itself
@pytest.mark.parametrize("model", MODELS)
def test_the_dial_of_torch_compile(model, tmp_path):
    allocator = CountingAllocator.installed() or CountingAllocator.install(caching=True)
    said: list[str] = []
    with Subject(model, "fp32", Size(4, 64, 2, 64, 64, 8), str(tmp_path), allocator) as subject:
        found = list(at_equal_peak(subject, ("compile",), (0.9,), said.append))
        assert [variant.name for variant in found] == ["compile", "compile to 0.9"], said
        peaks = [subject.peak(lambda v=variant: v.step(subject)) for variant in found]
    assert peaks[1] <= 0.9 * subject.plain_peak
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("models", ("bert",)),
        ("dtype", ("fp8",)),
        ("tables", ("memory",)),
        ("peers", ("none",)),
        ("equal_peak", ("selective",)),
        ("states", ("2bit",)),
        ("budgets", (1.2,)),
        ("totals", (0.0,)),
        ("virtual", (0.0,)),
        ("spikes", (7.0,)),
    ],
)
def test_wrong_options_are_named(field, value):
    with pytest.raises(InputError, match=field):
        tiered.MemoryOptions(**{field: value}).check()


def test_sizes_have_names():
    assert tiered.sized("full") == tiered.MemoryOptions().size
    with pytest.raises(InputError, match="size"):
        tiered.sized("huge")
