"""TOML in and out: what is written reads back equal, and what does not fit is named with its dotted path."""

import dataclasses
import tomllib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.core import InputError
from laneway.data.text import TextDataConfig
from laneway.models.gpt import GPTConfig
from laneway.recipes import RECIPES
from laneway.train.config import OptimizerConfig, TrainConfig
from laneway.train.control_config import ControlConfig
from laneway.train.settings import differences, flatten, merge, read_toml, to_toml


def test_later_values_win_and_others_stay():
    merged, problems = merge(TrainConfig(), {"steps": 7, "model": {"dim": 64}})
    assert not problems
    assert (merged.steps, merged.model.dim) == (7, 64)
    assert merged == dataclasses.replace(TrainConfig(), steps=7, model=GPTConfig(dim=64))


def test_an_integer_is_a_number_and_a_list_a_tuple():
    merged, problems = merge(TrainConfig(), {"optimizer": {"lr": 1}, "data": {"suffixes": [".md"]}})
    assert not problems
    assert merged.optimizer.lr == 1.0
    assert isinstance(merged.optimizer.lr, float)
    assert merged.data.suffixes == (".md",)


@pytest.mark.parametrize(
    ("mapping", "field", "words"),
    [
        ({"stepz": 3}, "stepz", "did you mean 'steps'?"),
        ({"optimizr": {"lr": 1.0}}, "optimizr", "did you mean 'optimizer'?"),
        ({"model": {"streems": 2}}, "model.streems", "did you mean 'streams'?"),
        ({"model": 3}, "model", r"a table [model]"),
        ({"steps": 1.5}, "steps", "an integer"),
        ({"steps": True}, "steps", "an integer"),
        ({"steps": "ten"}, "steps", "an integer"),
        ({"compile": 1}, "compile", "true or false"),
        ({"precision": 16}, "precision", "a text"),
        ({"optimizer": {"lr": "1e-3"}}, "optimizer.lr", "a number"),
        ({"optimizer": {"lr": True}}, "optimizer.lr", "a number"),
        ({"micro_batch_size": 1.0}, "micro_batch_size", "an integer"),
        ({"model": {"logit_cap": "off"}}, "model.logit_cap", "a number"),
        ({"data": {"suffixes": [1]}}, "data.suffixes[0]", "a text"),
        ({"data": {"suffixes": ".md"}}, "data.suffixes", "a list"),
        ({"data": {"validation_fraction": 2}}, "data.validation_fraction", "between 0 and 1"),
    ],
)
def test_what_does_not_fit_is_named(mapping, field, words):
    merged, (problem,) = merge(TrainConfig(), mapping)
    assert problem.field == field
    assert words in str(problem)
    assert merged == TrainConfig()


def test_every_problem_is_found_and_the_rest_is_taken():
    merged, problems = merge(TrainConfig(), {"stepz": 1, "seed": 5, "model": {"dim": "wide", "heads": 2}, "data": {"verify": 3}})
    assert [problem.field for problem in problems] == ["stepz", "model.dim", "data.verify"]
    assert (merged.seed, merged.model.heads) == (5, 2)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_recipes_survive_toml(recipe):
    merged, problems = merge(TrainConfig(), tomllib.loads(to_toml(recipe())))
    assert not problems
    assert merged == recipe()


@given(
    steps=st.integers(0, 10**6),
    lr=st.floats(1e-9, 1e3),
    prompt=st.text(st.characters(exclude_categories=["Cs"])),
    micro=st.none() | st.integers(1, 64),
    suffixes=st.lists(st.sampled_from([".txt", ".md", ".rst"])),
)
def test_any_configuration_survives_toml(steps, lr, prompt, micro, suffixes):
    data = TextDataConfig(suffixes=tuple(suffixes))
    config = TrainConfig(steps=steps, optimizer=OptimizerConfig(lr=lr), sample_prompt=prompt, micro_batch_size=micro, data=data)
    merged, problems = merge(TrainConfig(), tomllib.loads(to_toml(config)))
    assert not problems
    assert merged == config


def test_none_is_left_out():
    assert "micro_batch_size" not in to_toml(TrainConfig())


def test_differences_are_named_with_both_values():
    other, _ = merge(TrainConfig(), {"steps": 3, "model": {"dim": 8}})
    assert differences(TrainConfig(), other) == {"model.dim": (128, 8), "steps": (1000, 3)}
    assert differences(other, other) == {}


def test_flatten_has_every_leaf():
    flat = flatten(TrainConfig())
    assert flat["optimizer.lr"] == OptimizerConfig().lr
    assert not any(dataclasses.is_dataclass(value) for value in flat.values())


@pytest.mark.parametrize(
    ("content", "words"), [(None, "No such file"), (b"a = = 1", "TOML"), (b"\xff\xfe", "TOML"), (b"[model\n", "TOML")]
)
def test_unreadable_files_are_refused(tmp_path, content, words):
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_toml(path)


def test_a_folder_is_no_config(tmp_path):
    with pytest.raises(InputError, match="config"):
        read_toml(tmp_path)


def test_numbers_of_other_libraries_and_lists_are_written_as_they_are_read():
    optimizer = OptimizerConfig(lr=np.float32(0.25), eps=Fraction(1, 2**20), clip_norm=np.int64(2))
    config = TrainConfig(optimizer=optimizer, control=ControlConfig(priorities=[1, np.float32(2), 3, 4]))
    assert config.problems() == []
    back, problems = merge(TrainConfig(), tomllib.loads(to_toml(config)))
    assert problems == []
    assert differences(config, back) == {} == differences(back, config)
    assert back.optimizer == OptimizerConfig(lr=0.25, eps=2.0**-20, clip_norm=2.0)


def test_an_integer_that_no_float_holds_is_named():
    _, problems = merge(TrainConfig(), tomllib.loads(f"[optimizer]\nlr = {10**400}"))
    assert [problem.field for problem in problems] == ["optimizer.lr"]
    assert [problem.field for problem in TrainConfig(optimizer=OptimizerConfig(lr=-(10**400))).problems()] == ["optimizer.lr"]
