"""Lists of the bench verbs: with commas, with spaces, with both."""

from __future__ import annotations

import inspect
import typing

import pytest

from laneway.bench.collectives import ALL as COLLECTIVES
from laneway.bench.netlab.errors import Unavailable
from laneway.cli._parse import parse
from laneway.cli.bench import COMMANDS
from laneway.cli.train import read_request
from laneway.core import LanewayError

# Of the options whose defaults are fewer than two.
GIVEN = {
    ("layer", "shape"): ("16x8", "32x16"),
    ("memory", "totals"): (0.5, 0.25),
    ("memory", "virtual"): (100.0, 50.5),
    ("stability", "variants"): ("residual", "mhc"),
    ("stability", "conditions"): ("persistent", "fp16"),
    ("symptoms", "recipes"): ("slow-convergence", "unstable-start"),
    ("controls", "controls"): ("scheduler", "curvature"),
    ("controls", "sizes"): ("512x128", "64x32"),
    ("controls", "settings"): ("off", "curvature"),
    ("hf", "dtype"): ("bf16", "fp32"),
    ("lora", "cases"): ("target-head", "scaling-x100"),
    ("scheduling", "experiment"): ("computing", "preparing"),
    ("adaptation", "steps"): (9, 8, 10),
    ("collectives", "variants"): tuple(COLLECTIVES)[1::-1],
    ("dropping", "variants"): ("dense fp32", "-40% fp32, no feedback"),
}
LISTS = {
    verb: [name for name, hint in typing.get_type_hints(command).items() if typing.get_origin(hint) is tuple]
    for verb, command in COMMANDS.items()
}
WITH_LISTS = [verb for verb, names in LISTS.items() if names]


def values_of(verb: str, name: str) -> list[str]:
    found = GIVEN.get((verb, name)) or inspect.signature(COMMANDS[verb]).parameters[name].default[1::-1]
    return [str(value) for value in found]


def options(verb: str, *words: str) -> object:
    try:
        return parse(COMMANDS[verb], words, prog=f"laneway bench {verb}").options
    except Unavailable as absent:
        pytest.skip(str(absent))


@pytest.mark.parametrize("verb", WITH_LISTS)
def test_commas_and_spaces_give_the_same_options(verb):
    given = [(f"--{name.replace('_', '-')}", values_of(verb, name)) for name in LISTS[verb]]
    spaces = options(verb, *(word for flag, values in given for word in (flag, *values)))
    assert spaces == options(verb, *(word for flag, values in given for word in (flag, ",".join(values))))
    assert spaces == options(verb, *(word for flag, values in given for word in (flag, *(f"{value}," for value in values))))
    usual = options(verb)
    for flag, values in given:
        assert options(verb, flag, ",".join(values)) != usual, "as if it had not been given"


@pytest.mark.parametrize("verb", WITH_LISTS)
def test_one_that_is_wrong_is_named(verb):
    for name in LISTS[verb]:
        words = [*values_of(verb, name)[:-1], "zz"]
        with pytest.raises(LanewayError, match=r"got 'zz'; accepted: ") as caught:
            options(verb, "--" + name.replace("_", "-"), ",".join(words))
        assert name[:4] in str(caught.value).replace("-", "_")


def test_no_list_is_a_text():
    for command in COMMANDS.values():
        for parameter in inspect.signature(command).parameters.values():
            assert not isinstance(parameter.default, str) or "," not in parameter.default
        assert "comma-sep" not in (command.__doc__ or "")


def test_none_where_one_is_needed():
    for words in (["hf", "--models", ""], ["layer", "--threads"], ["adaptation", "--steps", "9,9"]):
        with pytest.raises(LanewayError, match=r"accepted: (a list with one or more|one or more|3 integers)"):
            options(*words)


def test_names_with_commas_and_dashes():
    names = ("-40% fp32, no feedback", "dense fp32", "-40% bf16", "blocks 10% bf16")
    for words in (list(names), [",".join(names)], [f"{name}," for name in names]):
        assert options("dropping", "--variants", *words).variants == names


def test_a_list_in_the_configuration_of_a_run():
    for words in (["0.2", "0.3", "0.5", "1"], ["0.2,0.3, 0.5,1"]):
        assert read_request(["tiny", "--control.priorities", *words]).settings.control.priorities == (0.2, 0.3, 0.5, 1.0)
