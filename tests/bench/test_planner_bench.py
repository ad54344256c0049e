"""``laneway bench planner``: targets on the published rows, any file in the published columns, and what is refused."""

from __future__ import annotations

import csv
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laneway.bench import planner
from laneway.bench.planner_claims import cross_node_bytes, exposed, gradient_sync, sweep
from laneway.bench.planner_published import compare
from laneway.bench.planner_rows import COLUMNS, SIZE, TIME, evaluate, mape, read, recomputation, spearman
from laneway.bench.planner_transfer import transfer
from laneway.cli.bench import run
from laneway.core import InputError

MULTI, SINGLE = planner.published("multi_node"), planner.published("single_node")


@pytest.fixture(scope="module")
def scores() -> dict[str, dict[str, float]]:
    return evaluate(read(MULTI), "multi")[1]


def test_targets_on_the_published_rows(scores: dict[str, dict[str, float]]) -> None:
    assert {size: found["rows"] for size, found in scores.items()} == {"3.6B": 26, "39.1B": 47}
    for found in scores.values():
        assert found["mape"] < planner.MAPE
        assert found["regret"] <= planner.REGRET
    assert scores["3.6B"]["spearman"] >= planner.SPEARMAN
    # Missed: half of the rows with two or four tensor-parallel ranks took longer than their neighbours, without a rule.
    assert scores["39.1B"]["spearman"] > 0.85


def test_ranks_that_fill_a_node_fit_closely() -> None:
    """Eight tensor-parallel ranks: the layouts of the largest models, and the empirical terms do not touch them."""
    rows = [row for row in read(MULTI) if row.tp == 8 and row.size == "39.1B"]
    _, found = evaluate(rows, "multi")
    assert found["39.1B"]["mape"] < 0.03
    assert found["39.1B"]["spearman"] > 0.95


def test_most_rows_lie_in_their_interval() -> None:
    rows, _ = evaluate(read(MULTI), "multi")
    inside = [row["predicted_low_ms"] <= row["measured_ms"] <= row["predicted_high_ms"] for row in rows]
    assert np.mean(inside) > 0.8


def test_single_node_rows() -> None:
    rows, found = evaluate(read(SINGLE)[::20], "single")
    assert np.mean([abs(row["error"]) for row in rows]) < planner.MAPE
    assert len(found) == 8


@pytest.mark.slow
def test_constants_carry_over() -> None:
    """Fitted on one model size or on single nodes, tested on the others."""
    rows = transfer(read(MULTI), read(SINGLE), lambda line: None)
    errors = {(row["fitted_on"], row["tested_on"]): row["mape"] for row in rows if row["interference"]}
    assert errors["3.6B", "39.1B"] < planner.MAPE
    assert errors["39.1B", "3.6B"] < planner.MAPE
    assert errors["single node", "3.6B"] < planner.MAPE
    assert errors["single node", "39.1B"] < planner.MAPE


def test_columns_in_any_order_with_and_without_size(tmp_path: Path, scores: dict[str, dict[str, float]]) -> None:
    with MULTI.open(encoding="utf-8") as file:
        cells = list(csv.DictReader(file))
    names = [*COLUMNS, TIME]
    random.shuffle(names)
    path = tmp_path / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(cells)
    _, found = evaluate(read(path), "rows")
    assert set(found) == {"3.56B", "39.08B"}
    for ours, theirs in zip(found.values(), scores.values(), strict=True):
        assert ours == theirs


def test_command_line_on_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(MULTI.read_text("utf-8").splitlines()[:30]), "utf-8")
    assert run(["planner", "--rows", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == 29
    assert {"mape", "spearman", "regret"} <= set(found["summary"]["3.6B"])
    assert all(row["predicted_ms"] > 0 for row in found["rows"])


@pytest.mark.parametrize(
    ("line", "column", "cell", "told"),
    [
        (3, "hidden size", "many", "hidden size: got 'many'.*line 3"),
        (2, "micro batch", "0", "micro batch: got '0'.*line 2"),
        (4, "# layers", "2.5", "# layers: got '2.5'.*whole number.*line 4"),
        (2, TIME, "-1", "iteration time.*line 2"),
        (2, TIME, "", "iteration time.*line 2"),
        (3, "# GPUs", "63", "# GPUs: got 63.*line 3"),
        (2, "attention heads", "7", "attention heads.*line 2"),
        (2, SIZE, "nan", "Parameters.*line 2"),
    ],
)
def test_malformed_cells(line: int, column: str, cell: str, told: str, tmp_path: Path) -> None:
    with MULTI.open(encoding="utf-8") as file:
        table = list(csv.reader(file))
    table[line - 1][table[0].index(column)] = cell
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(",".join(row) for row in table), "utf-8")
    with pytest.raises(InputError, match=told) as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1 lacks # GPUs"),
        ("# GPUs,micro batch\n1,2", "line 1 lacks global batch"),
        ("{}\n", "line 2"),
        ("{}\n1,2,3\n", "line 2"),
        ("{},# layers\n", "line 1 has # layers more than once"),
        ("a" * 200_000 + ",{}\n", "field limit"),
    ],
)
def test_malformed_files(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text.replace("{}", ",".join((*COLUMNS, TIME))), "utf-8")
    with pytest.raises(InputError, match=told):
        read(path)
    assert run_fails(["planner", "--rows", str(tmp_path / "none.csv")])


def test_lines_of_commas_alone_are_no_rows(tmp_path: Path) -> None:
    text = MULTI.read_text("utf-8").splitlines()
    path = tmp_path / "rows.csv"
    path.write_text("\r\n".join([*text[:3], "," * 11, text[3], "", "," * 11, ""]), "utf-8-sig")
    assert [row.line for row in read(path)] == [2, 3, 5]


def test_a_file_in_another_encoding_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(MULTI.read_text("utf-8"), "utf-16")
    with pytest.raises(InputError, match=r"^rows: .*can't be read"):
        read(path)


def run_fails(args: list[str]) -> bool:
    with pytest.raises(InputError, match="a file that exists"):
        run(args)
    return True


def test_a_batch_that_does_not_divide_is_told(tmp_path: Path) -> None:
    text = MULTI.read_text("utf-8").splitlines()
    path = tmp_path / "rows.csv"
    path.write_text(f"{text[0]}\n{text[1].replace(',512,8,', ',500,8,')}\n", "utf-8")
    told: list[str] = []
    evaluate(read(path), "rows.csv", note=told.append)
    assert told == ["rows.csv, line 2: the batch is no multiple of data parallelism × micro-batch; rounded up"]


def test_recomputation_is_told_by_memory() -> None:
    assert set(recomputation(read(MULTI)).values()) == {"full"}
    assert set(recomputation(read(SINGLE)[::40]).values()) == {"none"}


def test_scores_by_hand() -> None:
    """Ties take their mean rank: 1, 2.5, 2.5, 4 against 1, 2, 3, 4."""
    assert spearman([1.0, 2.0, 2.0, 9.0], [1.0, 2.0, 3.0, 4.0]) == pytest.approx(4.5 / (4.5 * 5.0) ** 0.5)
    assert spearman([1.0, 2.0, 3.0], [9.0, 5.0, 1.0]) == pytest.approx(-1.0)
    assert math.isnan(spearman([1.0, 2.0], [1.0, 2.0]))
    assert mape([2.0, 4.0], [1.0, 5.0]) == pytest.approx(0.375)


def test_published_tables_all_rows_shown() -> None:
    rows = compare()
    assert len(rows) == 34
    a100 = [abs(row["error"]) for row in rows if "H100" not in row["name"]]
    assert max(a100) < 0.15
    assert all(row["assumption"] for row in rows)


def by(rows: list[dict[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    return {row[key]: row for row in rows}


def test_bytes_a_parameter_as_worked_out_by_hand() -> None:
    found = {name: row["bytes_per_parameter"] for name, row in by(cross_node_bytes(), "scheme").items()}
    assert found["FSDP over all ranks, fp32 gradients"] == pytest.approx(8.0, rel=0.01)
    assert found["FSDP over all ranks, bf16 gradients"] == pytest.approx(6.0, rel=0.01)
    assert found["all-reduce, ordered ring, fp32"] == pytest.approx(8.0, rel=0.01)
    assert found["HSDP, shard in the node, bf16"] == pytest.approx(4.0, rel=0.01)
    assert found["HSDP, shard in the node, int8"] == pytest.approx(2.06, rel=0.01)


def test_claims() -> None:
    sync = gradient_sync()
    chosen = {row["network"]: row for row in sync if row["scheme"] == "chosen"}
    assert all(row["over_chosen"] >= 1 for row in sync if row["scheme"] != "chosen")
    assert all(row["over_chosen"] >= planner.SYNC_GAIN for row in sync if row["scheme"] == "ring_worst")
    assert len(chosen) == 4
    layouts = by(exposed(), "layout")
    assert layouts["planned"]["exposed_s"] < layouts["flat, overlapped"]["exposed_s"] < layouts["flat, bad order"]["exposed_s"]
    assert layouts["planned"]["memory_gb"] < 80


def test_sweep_keeps_native_where_it_wins() -> None:
    rows = sweep((2**16, 2**28), (0.35, 45.0))
    assert {row["native_kept"] for row in rows} == {0, 1}
    assert all(row["chosen_ms"] <= row["native_ms"] for row in rows)


def test_a_wheel_has_no_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(planner, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "planner.py"))
    with pytest.raises(InputError, match=r"--rows FILE\.csv"):
        planner.PlannerOptions().check()
    planner.PlannerOptions(rows=str(MULTI)).check()


def test_quick_run_has_every_table() -> None:
    report = planner.run(planner.quick(planner.PlannerOptions()))
    assert set(report.tables) == {
        "planner", "planner_scores", "planner_published", "planner_sync", "planner_exposed", "planner_bytes", "planner_sweep"
    }  # fmt: skip
    assert any(line.startswith("miss: spearman") for line in report.notes)
    assert json.dumps(report.as_json(), allow_nan=False)
