"""Recipes are whole, valid, and stay what their names say."""

import pytest
import torch

from laneway.models.gpt import GPT
from laneway.recipes import DEFAULT, RECIPES
from laneway.train.config import TrainConfig


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_valid_configuration(name):
    config = RECIPES[name]()
    assert isinstance(config, TrainConfig)
    assert config.problems() == []
    assert config == RECIPES[name]()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_with_mhc(name):
    assert RECIPES[name]().model.residual == "mhc"
    assert RECIPES[name]().model.streams == 4


@pytest.mark.parametrize(("name", "ranks"), [("small", 8), ("gpt2-124m", 64)])
def test_larger_recipes_divide_among_many_ranks(name, ranks):
    assert RECIPES[name]().problems(ranks) == []


def test_the_default_needs_no_download_and_no_extra():
    config = RECIPES[DEFAULT]()
    assert (config.data.path, config.data.tokenizer) == ("stdlib", "byte")


def test_every_recipe_has_a_docstring():
    assert all(recipe.__doc__ and len(recipe.__doc__) > 30 for recipe in RECIPES.values())


@pytest.mark.parametrize(("name", "millions"), [("small", 26), ("gpt2-124m", 125)])
def test_sizes(name, millions):
    with torch.device("meta"):
        model = GPT(RECIPES[name]().model)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.05)
