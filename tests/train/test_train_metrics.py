"""Rows are JSON that any reader takes, and the clock counts steps alone."""

import json
import math
import time

import torch

from laneway.rundir import read_rows
from laneway.train.metrics import MetricsWriter, StepClock, peak_bytes, plain


def strict(text: str) -> object:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_rows_hold_no_nan(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics" / "rank0.jsonl")
    writer.write(3, {"loss": math.nan, "gain": math.inf, "site": [1.0, -math.inf], "lr": 1e-3, "tensor": torch.tensor([1, 2])})
    row = strict(writer.rows.path.read_text("utf-8"))
    assert isinstance(row, dict)
    assert row["time"] > 1e9
    del row["time"]
    assert row == {"step": 3, "loss": None, "gain": None, "site": [1.0, None], "lr": 1e-3, "tensor": [1, 2]}


def test_rows_are_appended(tmp_path):
    for step in (1, 2):
        MetricsWriter(tmp_path / "rank0.jsonl").write(step, {"loss": 1.0})
    assert [row["step"] for row in read_rows(tmp_path / "rank0.jsonl")] == [1, 2]


def test_plain_leaves_numbers_alone():
    assert plain(3) == 3
    assert plain(0.1) == 0.1
    assert plain("x") == "x"
    assert plain(torch.tensor(2.0)) == 2.0
    assert plain(float("nan")) is None


def test_the_clock_counts_only_steps():
    clock = StepClock()
    for _ in range(2):
        with clock.step():
            time.sleep(0.02)
            clock.count(100)
        time.sleep(0.2)
    figures = clock.take()
    assert 20 <= figures["step_ms"] < 100
    assert figures["tokens_per_s"] == 100 / (figures["step_ms"] / 1000)
    assert clock.take() == {}


def test_peak_bytes_on_the_cpu_is_the_process():
    before = peak_bytes(torch.device("cpu"))
    assert 2**25 < before < 2**40  # at least the interpreter with torch, and in bytes
    block = bytearray(before)  # as much again
    block[::4096] = b"x" * len(block[::4096])
    assert peak_bytes(torch.device("cpu")) >= before + len(block) // 2
