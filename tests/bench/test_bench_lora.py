"""The bench of fine-tunes with mistakes: what a row says, and that mistakes are mistakes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laneway.bench import lora
from laneway.bench.lora_cases import BROKEN, HEALTHY, HELD_OUT
from laneway.bench.lora_run import Case, Outcome
from laneway.cli import main
from laneway.connections.consistency import Finding
from laneway.core import InputError

TINY = replace(
    lora.quick(lora.LoRAOptions()), steps=2, pretrain=2, layers=1, dim=16, cases=("b-not-zero", "scale-flipped", "labels-shifted")
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    import os

    before = os.environ.get("LANEWAY_CACHE")
    os.environ["LANEWAY_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    try:
        yield lora.run(TINY)
    finally:
        os.environ.pop("LANEWAY_CACHE") if before is None else os.environ.update(LANEWAY_CACHE=before)


def test_rows_name_the_case_its_kind_and_what_caught_it(report):
    rows = {(row["case"], row["seed"]): row for row in report.tables["lora"]}
    assert rows["b-not-zero", 0]["measure"] == "start"
    assert rows["b-not-zero", 0]["layer"] == "blocks.0.attention.qkv"
    assert rows["scale-flipped", 0]["measure"] in ("base", None)  # after two steps of pretraining the maps hardly depend on x
    assert rows["labels-shifted", 0]["kind"] == "held out"
    assert {row["kind"] for row in rows.values()} == {"healthy", "development", "held out"}
    assert len({tuple(row) for row in rows.values()}) == 1


def test_healthy_runs_raise_no_alarm_and_count_apart(report):
    healthy = [row for row in report.tables["lora"] if row["kind"] == "healthy"]
    assert [(row["case"], row["seed"]) for row in healthy] == [("default", 0), ("default", 1)]
    assert report.summary["healthy"]["alarms"] == 0
    assert report.summary["with a mistake"]["runs"] == 3
    assert [row["group"] for row in report.tables["lora_summary"]] == ["with a mistake", "development", "held out", "healthy"]


def test_fractions_are_counts_over_runs():
    base = {"shown": 1, "check_ms": 2.0, "step_ms": 4.0, "steps": 1, "layers": 1, "dim": 1, "threads": 1, "quick": 0}
    kinds = [("development", "earlier", 1), ("development", "missed", 0), ("held out", "same", 1), ("healthy", "missed", 0)]
    found = lora.summarise([base | {"kind": kind, "order": order, "caught": caught} for kind, order, caught in kinds])
    assert found["with a mistake"]["alarm_fraction"] == pytest.approx(2 / 3)
    assert found["development"]["earlier_fraction"] == 0.5
    assert found["held out"]["same"] == 1
    assert (found["healthy"]["runs"], found["healthy"]["alarms"], found["healthy"]["missed"]) == (1, 0, None)
    assert found["healthy"]["check_over_step"] == 0.5


@pytest.mark.parametrize(
    ("caught", "shown", "order"),
    [(None, 3, "missed"), (None, None, "missed"), (0, None, "earlier"), (0, 1, "earlier"), (5, 5, "same"), (10, 5, "later")],
)
def test_order_of_check_and_loss(caught, shown, order):
    assert lora._order(caught, shown) == order


def outcome(losses: dict[int, float], crash=None, findings=()) -> Outcome:
    return Outcome(losses, list(findings), crash, {}, 1.0, 1.0, None)


def test_a_loss_shows_where_it_leaves_the_healthy_runs_spread():
    desk = lora._Desk.__new__(lora._Desk)
    desk.losses = {"default": [{0: 2.0, 1: 1.9 + d, 5: 1.5 + d} for d in (-0.01, 0.0, 0.01)]}
    case = Case("x", "x")
    assert desk.bound("default", 5) == pytest.approx(1.53)
    assert desk.shown(case, outcome({0: 2.0, 1: 1.92, 5: 1.52}), None) is None
    assert desk.shown(case, outcome({0: 2.0, 1: 1.92, 5: 1.54}), None) == 5
    assert desk.shown(case, outcome({0: 2.0, 1: float("nan"), 5: 1.54}), None) == 1
    assert desk.shown(case, outcome({0: 2.0}, crash=(1, "TypeError")), None) == 1


def test_cases_are_many_apart_and_judged_by_healthy_ones():
    names = [case.name for case in [*HEALTHY, *BROKEN, *HELD_OUT]]
    assert len(set(names)) == len(names)
    assert len(BROKEN) >= 20
    assert len(HELD_OUT) >= 10
    assert len(HEALTHY) >= 5
    healthy = {case.name for case in HEALTHY}
    for case in [*HEALTHY, *BROKEN, *HELD_OUT]:
        assert case.like in healthy
        assert not case.resumes or case.resumes in healthy


@pytest.mark.parametrize(
    ("change", "field", "part"),
    [
        ({"cases": ("b-not-zer",)}, "cases", "did you mean 'b-not-zero'?"),
        ({"cases": ("default",)}, "cases", "one of scaling-x100"),
        ({"seeds": 1}, "seeds", "an integer ≥ 2"),
        ({"steps": 0}, "steps", "an integer ≥ 1"),
        ({"threads": -1}, "threads", "an integer ≥ 0"),
    ],
)
def test_bad_options(change, field, part):
    with pytest.raises(InputError) as caught:
        lora.run(replace(TINY, **change))
    assert caught.value.field == field
    assert part in str(caught.value)


def test_a_finding_reads_as_a_sentence():
    text = str(Finding(3, "blocks.0.ffn.out", "contribution", 2.5, "at most 1 of the base's output"))
    assert text == "step 3: blocks.0.ffn.out: contribution: 2.5; accepted: at most 1 of the base's output"


@pytest.mark.parametrize(
    ("words", "part"), [(["--cases", "nan-bach"], "did you mean 'nan-batch'?"), (["--seeds", "1"], "seeds: got 1")]
)
def test_bad_flags_are_one_line_and_exit_2(words, part, capfd):
    assert main(["bench", "lora", *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert part in err
