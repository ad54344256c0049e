"""Reading runs: names, final figures, tables; everything a run may lack."""

import json
import math

import pytest
from runmaker import add_event, config, make_run, rows

from laneway.core import InputError, LanewayError
from laneway.report import load_runs
from laneway.report.numbers import binary_unit, count, duration, figure, moment, si, size
from laneway.report.runs import flatten
from laneway.report.tables import config_rows, event_rows, final_rows, printable, samples
from laneway.rundir import append_row


def test_final_figures_of_a_finished_run(tmp_path):
    metrics = rows(200)
    make_run(tmp_path / "run", metrics)
    (run,) = load_runs([tmp_path / "run"])
    assert (run.name, run.state) == ("run", "finished")
    assert run.final.steps == 200
    assert run.final.val_loss == metrics[-1]["val_loss"]
    assert run.final.val_bits_per_byte == pytest.approx(run.final.val_loss / math.log(2))
    assert run.final.seconds == pytest.approx(40)
    assert run.final.parameters == 1_053_456
    assert run.final.peak_bytes == max(row["peak_bytes"] for row in metrics)
    assert run.final.loss == pytest.approx(sum(row["loss"] for row in metrics[-5:]) / 5, abs=0.1)


def test_parameters_come_from_the_start_event_first(tmp_path):
    run = make_run(tmp_path / "run", rows(20))
    add_event(run, "resume", 10, parameters=77)
    assert load_runs([run.path])[0].final.parameters == 77


def test_figures_of_an_unfinished_run_come_from_its_rows(tmp_path):
    metrics = rows(150)
    make_run(tmp_path / "run", metrics, finished=False)
    (run,) = load_runs([tmp_path / "run"])
    assert run.state == "not finished"
    assert run.final.val_loss == next(row["val_loss"] for row in reversed(metrics) if "val_loss" in row)
    assert run.final.seconds == pytest.approx(0.2 * 149)


@pytest.mark.parametrize(
    ("last", "state"), [("signal", "stopped"), ("stop", "stopped"), ("resume", "not finished"), ("finish", "finished")]
)
def test_state_follows_the_last_event_that_says(tmp_path, last, state):
    run = make_run(tmp_path / "run", rows(20), finished=False)
    add_event(run, last, 20)
    add_event(run, "checkpoint", 20)
    assert load_runs([run.path])[0].state == state


def test_an_empty_run_has_no_figures(tmp_path):
    make_run(tmp_path / "run", [])
    (run,) = load_runs([tmp_path / "run"])
    assert {v for k, v in run.final.as_json().items() if k != "parameters"} == {None}
    assert not run.has_streams
    assert run.heat("site_collapse") is None


def test_null_and_text_values_are_gaps(tmp_path):
    metrics = rows(40)
    metrics[10]["loss"], metrics[11]["loss"], metrics[12]["loss"] = None, math.nan, "many"
    make_run(tmp_path / "run", metrics)
    curve = load_runs([tmp_path / "run"])[0].curve("loss")
    assert [i for i, y in enumerate(curve.y) if not math.isfinite(y)] == [10, 11, 12]


def test_runs_are_named_by_what_tells_them_apart(tmp_path):
    for parent in ("a", "b"):
        make_run(tmp_path / parent / "run", rows(5))
    names = [run.name for run in load_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"])]
    assert names == ["a/run", "b/run"]


def test_bad_run_lists(tmp_path):
    make_run(tmp_path / "run", rows(5))
    with pytest.raises(InputError, match="one or more run directories"):
        load_runs([])
    with pytest.raises(InputError, match="each run once"):
        load_runs([tmp_path / "run", tmp_path / "x" / ".." / "run"] if (tmp_path / "x").mkdir() is None else [])
    with pytest.raises(InputError, match="there is no such folder"):
        load_runs([tmp_path / "nowhere"])
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match=r"no config\.toml"):
        load_runs([tmp_path / "other"])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.toml", "steps = = 3", "not TOML"),
        ("env.json", "{broken", "not JSON"),
        ("metrics/rank0.jsonl", '{"loss": 3}\n', "without a step"),
        ("metrics/rank0.jsonl", '[1]\n{"step": 1}\n', "line 1: not a JSON row"),
        ("events.jsonl", 'nonsense\n{"kind": "start"}\n', "line 1: not a JSON row"),
    ],
)
def test_broken_files_are_one_line_errors(tmp_path, name, text, words):
    run = make_run(tmp_path / "run", rows(5))
    (run.path / name).write_text(text, "utf-8")
    with pytest.raises(LanewayError, match=words) as caught:
        load_runs([run.path])
    assert "\n" not in str(caught.value)


def test_a_torn_last_row_is_skipped(tmp_path):
    run = make_run(tmp_path / "run", rows(5))
    with run.metrics().open("a") as file:
        file.write('{"step": 6, "lo')
    assert load_runs([run.path])[0].final.steps == 5


def test_per_site_lists_of_another_depth_are_left_out(tmp_path):
    run = make_run(tmp_path / "run", rows(60, sites=6))
    append_row(run.metrics(), {"step": 61, "site_collapse": [0.5, 0.5]})
    heat = load_runs([run.path])[0].heat("site_collapse")
    assert heat.values.shape == (1, 2), "the last row says how deep the network is"


def test_differences_of_configurations(tmp_path):
    make_run(tmp_path / "a", rows(5), config(lr=3e-3))
    make_run(tmp_path / "b", rows(5), config(lr=1e-3) + "floor = 0.1\n")
    differing, equal = config_rows(load_runs([tmp_path / "a", tmp_path / "b"]))
    assert dict(differing) == {"optimizer.lr": ["0.003", "0.001"], "optimizer.floor": ["–", "0.1"]}
    assert dict(equal)["model.residual"] == ["mhc", "mhc"]


def test_flatten_names_by_dots_and_keeps_types_readable():
    tree = {"a": {"b": {"c": True}}, "l": [1, "x"], "s": "t"}
    assert list(flatten(tree)) == [("a.b.c", "true"), ("l", '[1, "x"]'), ("s", "t")]


def test_the_lowest_validation_loss_is_marked(tmp_path):
    make_run(tmp_path / "a", rows(100, floor=1.0))
    make_run(tmp_path / "b", rows(100, floor=2.0))
    table = dict(final_rows(load_runs([tmp_path / "a", tmp_path / "b"])))
    assert [cell.best for cell in table["Validation loss"]] == [True, False]
    assert not any(cell.best for cell in table["Steps"])
    single = dict(final_rows(load_runs([tmp_path / "a"])))
    assert not single["Validation loss"][0].best


def test_events_tell_step_time_and_details(tmp_path):
    run = make_run(tmp_path / "run", rows(200))
    add_event(run, "notice", 150, message="a torn checkpoint\u2028was skipped", count=2)
    found, left_out = event_rows(load_runs([run.path])[0])
    assert left_out == 0
    assert [row.kind for row in found] == ["start", "checkpoint", "checkpoint", "finish", "notice"], (
        "samples have their own place"
    )
    assert (found[-1].step, found[-1].since) == ("150", "30.0\u202fs")
    assert found[-1].detail == "a torn checkpoint\u2028was skipped, count 2"


def test_many_events_are_cut_in_the_middle(tmp_path):
    run = make_run(tmp_path / "run", rows(20), finished=False)
    for step in range(500):
        add_event(run, "nonfinite", step)
    found, left_out = event_rows(load_runs([run.path])[0])
    assert (len(found), left_out) == (200, 301)
    assert (found[0].kind, found[-1].step) == ("start", "499")


def test_odd_events_do_not_break_the_table(tmp_path):
    run = make_run(tmp_path / "run", rows(5))
    append_row(run.events, {"step": "x", "time": None, "detail": {"a": [1]}})
    last = event_rows(load_runs([run.path])[0])[0][-1]
    assert (last.step, last.since, last.kind) == ("–", "–", "–")
    assert last.detail == 'detail {"a": [1]}'


def test_samples_split_off_the_prompt_and_are_cut(tmp_path):
    run = make_run(tmp_path / "run", rows(5))
    add_event(run, "sample", 5, prompt="def ", text="def main():" + "x" * 5000)
    (sample,) = samples(load_runs([run.path])[0], limit=1)
    assert (sample.prompt, sample.text[:7], len(sample.text), sample.cut) == ("def ", "main():", 4000, True)


def test_printable_text():
    assert printable("a\tb\nc\x00\x1b[0m\ud800\x85é") == "a\tb\nc\ufffd\ufffd[0m\ufffd\ufffdé"


def test_figures_as_a_person_reads_them():
    assert [figure(v) for v in (1.23456, 0.012345, 123456.7, 1e9, math.nan, 0, -2.5)] == [
        "1.235", "0.0123", "123\u202f457", "1.000e+09", "–", "0", "−2.500",
    ]  # fmt: skip
    assert [si(v, "B") for v in (1234, 0.5, 2.5e9, math.inf)] == ["1.23\u202fk\u202fB", "0.500\u202fB", "2.50\u202fG\u202fB", "–"]
    assert (count(1234567), size(1536), size(3 << 30), size(math.nan)) == (
        "1\u202f234\u202f567",
        "1.5\u202fKiB",
        "3\u202fGiB",
        "–",
    )
    assert binary_unit(10) == (1.0, "B")
    assert [duration(v) for v in (3.21, 59.97, 187, 9999, math.nan)] == [
        "3.2\u202fs", "1\u202fmin 00\u202fs", "3\u202fmin 07\u202fs", "2\u202fh 46\u202fmin", "–",
    ]  # fmt: skip
    assert (moment(1.7e9), moment(math.nan), moment(-5)) == ("2023-11-14 22:13:20 UTC", "–", "–")


def test_json_figures_are_valid_json(tmp_path):
    make_run(tmp_path / "run", [{"step": 1, "loss": math.nan}])
    text = json.dumps(load_runs([tmp_path / "run"])[0].final.as_json(), allow_nan=False)
    assert json.loads(text)["loss"] is None
