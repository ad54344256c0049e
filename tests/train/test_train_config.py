"""Every field that can be wrong is refused with its own name, and all problems are told at once."""

import dataclasses

import pytest

from laneway.core import InputError, collect
from laneway.train.config import CADENCE, LAYOUT, TrainConfig
from laneway.train.settings import flatten


def fields_of(problems: list[InputError]) -> list[str]:
    return [problem.field for problem in problems]


def test_the_default_is_fine():
    assert TrainConfig().problems() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", -1),
        ("batch_size", 0),
        ("micro_batch_size", 0),
        ("micro_batch_size", 3),
        ("micro_batch_size", 16),
        ("seed", -1),
        ("precision", "fp64"),
        ("parallel", "tensor"),
        ("log_every", 0),
        ("probe_every", -1),
        ("validate_every", -1),
        ("validation_batches", 0),
        ("checkpoint_every", -1),
        ("keep_checkpoints", 0),
        ("sample_tokens", -1),
        ("max_nonfinite", 0),
        ("max_failed_checkpoints", -1),
        ("model.streams", 0),
        ("model.dim", -4),
        ("model.residual", "mch"),
        ("optimizer.lr", 0.0),
        ("optimizer.lr", float("nan")),
        ("optimizer.lr", float("inf")),
        ("optimizer.warmup", 1.0),
        ("optimizer.floor", 1.5),
        ("optimizer.beta1", 1.0),
        ("optimizer.beta2", -0.1),
        ("optimizer.eps", 0.0),
        ("optimizer.weight_decay", -0.1),
        ("optimizer.clip_norm", -1.0),
        ("control.curvature", 1.5),
        ("control.curvature", float("nan")),
        ("control.curvature", "automatic"),
        ("control.curvature_final", -0.1),
        ("control.curvature_every", 0),
        ("control.curvature_sample", 12),
        ("control.curvature_neighbours", 1),
        ("control.curvature_projection", 33),
        ("control.curvature_projection", 0),
        ("control.purify_every", -1),
        ("control.purify_screen", "later"),
        ("control.purify_sample", 3),
        ("control.norm_guard", 1.0),
        ("control.norm_guard", -2.0),
        ("control.norm_guard", float("inf")),
        ("control.norm_guard", "high"),
    ],
)
def test_a_wrong_value_is_named(config, change, field, value):
    group, _, name = field.rpartition(".")
    wrong = change(**({group: {name: value}} if group else {name: value}))
    assert fields_of(wrong.problems()) == [field]
    with pytest.raises(InputError, match=field.replace(".", r"\.")):
        wrong.check()


def test_a_strength_that_chooses_itself_has_no_schedule(change):
    assert change(control={"curvature": "auto"}).problems() == []
    assert fields_of(change(control={"curvature": "auto", "curvature_final": 0.5}).problems()) == ["control.curvature_final"]


@pytest.mark.parametrize("model", [{"streams": 1}, {"residual": "residual"}])
@pytest.mark.parametrize("control", [{"curvature": 0.5}, {"curvature": "auto"}, {"curvature_final": 0.5}, {"scheduler": True}])
def test_one_stream_has_nothing_to_control(change, model, control):
    [problem] = change(model=model, control=control).problems()
    assert problem.field == f"control.{next(iter(control))}"
    assert change(model=model, control={"purify_every": 6}).problems() == []


def test_a_projection_is_no_wider_than_the_streams(change):
    [problem] = change(control={"curvature": 0.5, "curvature_projection": 17}).problems()
    assert str(problem).startswith("control.curvature_projection: got 17; accepted: an integer from 1 to 16")
    assert change(control={"curvature": 0.5, "curvature_projection": 16}).problems() == []


def test_one_thing_corrects_gradients(change):
    assert fields_of(change(control={"norm_guard": 3.0, "purify_every": 6}).problems()) == ["control.norm_guard"]


def test_all_problems_are_listed_at_once(change):
    wrong = change(steps=-1, precision="half", model={"streams": 0}, optimizer={"lr": -1.0})
    assert fields_of(wrong.problems()) == ["model.streams", "optimizer.lr", "steps", "precision"]


def test_a_near_miss_gets_a_suggestion(change):
    (problem,) = change(model={"residual": "mch"}).problems()
    assert "did you mean 'mhc'?" in str(problem)


def test_missing_text_is_a_problem_of_its_field(change):
    assert fields_of(change(data={"path": "no/such/file.txt"}).problems()) == ["data.path"]
    assert fields_of(change(data={"tokenizer": "bite"}).problems()) == ["data.tokenizer"]


@pytest.mark.parametrize(
    ("ranks", "micro", "wrong"), [(1, None, None), (2, 4, None), (3, None, "batch_size"), (4, 4, "micro_batch_size")]
)
def test_the_batch_divides_among_ranks_and_micro_batches(change, ranks, micro, wrong):
    assert fields_of(change(micro_batch_size=micro).problems(ranks)) == ([wrong] if wrong else [])


def test_micro_batch_is_the_share_of_a_rank_unless_it_is_given(change):
    assert change(micro_batch_size=None).micro_batch(2) == 4
    assert change(micro_batch_size=2).micro_batch(2) == 2


def test_what_a_resume_may_change_are_fields():
    assert set(flatten(TrainConfig())) >= CADENCE | LAYOUT
    assert not CADENCE & LAYOUT


def test_configurations_are_values(config):
    assert config == dataclasses.replace(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3


def test_collect_keeps_what_is_no_input_error():
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        collect([broken])
