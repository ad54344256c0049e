"""``laneway bench symptoms``: a run that goes wrong is found, its knob turned, and the next run is found well."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import pytest

from laneway.bench import symptoms
from laneway.bench.symptoms import SymptomOptions, summarise, turned
from laneway.core import InputError
from laneway.data.text import TextDataConfig
from laneway.doctor import Knob
from laneway.recipes import RECIPES
from laneway.train.config import TrainConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def small(name: str) -> TrainConfig:
    config = RECIPES[name]()
    model = replace(config.model, layers=1, heads=1, dim=16, context=16, residual="residual", streams=1)
    return replace(config, model=model, steps=60, batch_size=2, probe_every=0, validation_batches=1)


def test_a_course_ends_where_the_symptom_is_gone(text_file, tmp_path):
    data = TextDataConfig(path=str(text_file), cache=str(text_file.parent / "cache"))
    told: list[str] = []
    report = symptoms.run(SymptomOptions({"unstable-start": small("unstable-start")}, seeds=2, data=data), told.append)
    rows = report.tables["symptoms"]
    assert len(told) == 1
    for seed in (0, 1):
        course = [row for row in rows if row["seed"] == seed]
        assert [row["turn"] for row in course] == list(range(len(course)))
        assert [row["found"] for row in course] == [1] * (len(course) - 1) + [0]
        assert [row["knob"] for row in course[:2]] == ["", "--optimizer.lr 0.1"]
        for row in course:
            assert (row["value"] > row["limit"]) == (row["evidence"].startswith("loss")) == bool(row["found"])
            assert math.isfinite(row["val_loss"])
            assert row["completed"] == 1
    assert report.summary["unstable-start"]["found"] == report.summary["unstable-start"]["gone"] == 2
    (path,) = report.save(tmp_path)
    with path.open(encoding="utf-8", newline="") as file:
        saved = list(csv.DictReader(file))
    assert [(row["recipe"], row["turn"]) for row in saved] == [(row["recipe"], str(row["turn"])) for row in rows]


def test_knobs_turn_fields_of_every_kind():
    config = RECIPES["tiny"]()
    assert turned(config, Knob("optimizer.lr", "", "0.01")).optimizer.lr == 0.01
    assert turned(config, Knob("micro_batch_size", "", "4")).micro_batch_size == 4
    assert turned(config, Knob("model.residual", "", "mhc-lite")).model.residual == "mhc-lite"
    assert turned(config, Knob("activation_checkpointing", "", "true")).activation_checkpointing is True
    assert turned(config, Knob("memory.budget", "", "auto")).memory.budget == "auto"
    with pytest.raises(InputError, match="micro_batch_size"):
        turned(config, Knob("micro_batch_size", "", "3"))
    with pytest.raises(InputError, match="nobody"):
        turned(config, Knob("optimizer.nobody", "", "3"))


def test_the_summary_counts_seeds():
    def row(seed: int, turn: int, found: int, loss: float | None) -> dict:
        return {"recipe": "a", "seed": seed, "turn": turn, "found": found, "knob": "--x 1" if turn else "", "val_loss": loss}

    rows = [row(0, 0, 1, None), row(0, 1, 0, 2.0), row(1, 0, 1, 5.0), row(1, 1, 1, 4.0), row(2, 0, 0, 3.0)]
    assert summarise(rows)["a"] == {
        "seeds": 3, "found": 2, "gone": 2, "turns": 1, "knobs": ["--x 1"], "val_loss_before": 4.0, "val_loss_after": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipes": {}}, "recipes"),
        ({"recipes": {"tiny": RECIPES["tiny"]()}}, "recipes"),
        ({"seeds": 0}, "seeds"),
        ({"turns": 0}, "turns"),
    ],
)
def test_options_are_checked(change, words):
    with pytest.raises(InputError, match=words):
        replace(SymptomOptions({"unstable-start": small("unstable-start")}), **change).check()
