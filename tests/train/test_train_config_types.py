"""Every field of a run's configuration, given from Python with another type: one error, by the field's name."""

from __future__ import annotations

import typing
from dataclasses import fields, is_dataclass, replace

import pytest

from laneway.connections.schedule import Schedule
from laneway.core import InputError
from laneway.data.text import TextDataConfig
from laneway.train.config import TrainConfig
from laneway.train.control_config import ControlConfig

SECTIONS = {field.name: getattr(TrainConfig(), field.name) for field in fields(TrainConfig) if field.name != "data"}
SECTIONS = {name: part for name, part in SECTIONS.items() if is_dataclass(part)} | {
    "": TrainConfig(data=TextDataConfig(path=__file__))
}
WRONG = {"bool": ("yes", "no", "", 1, 0, None, 1.0), "int": (True, False, 2.0, "3", None), "float": (True, "0.5", None, [1.0])}


def declared(config):
    """(field, its plain types) of the fields that are numbers or switches."""
    for field in fields(config):
        options = typing.get_type_hints(type(config))[field.name]
        if typing.get_origin(options) is tuple:
            continue
        names = {option.__name__ for option in typing.get_args(options) or (options,) if isinstance(option, type)}
        if names & WRONG.keys():
            yield field.name, names


@pytest.mark.parametrize("section", SECTIONS, ids=[name or "train" for name in SECTIONS])
def test_another_type_is_one_error_by_its_name(section):
    config, prefix = SECTIONS[section], f"{section}." if section else ""
    tried = 0
    for name, types in declared(config):
        allowed = ("str" in types, "NoneType" in types)
        for value in {repr(v): v for kind in types & WRONG.keys() for v in WRONG[kind]}.values():
            if (isinstance(value, str) and allowed[0]) or (value is None and allowed[1]):
                continue
            if any(type(value).__name__ == kind for kind in types) or (type(value) is int and "float" in types):
                continue
            tried += 1
            [error] = replace(config, **{name: value}).problems()
            assert (error.field, error.given) == (f"{prefix}{name}", value)
            assert error.accepted
    assert tried >= 6


def test_a_section_and_a_run_name_it_alike_and_go_on_with_the_rest():
    control = ControlConfig(scheduler="yes", verify_ranks="no", curvature_every=2.0, purify_sample=8)
    names = [f"control.{name}" for name in ("curvature_every", "scheduler", "verify_ranks", "purify_sample")]
    assert [error.field for error in control.problems()] == names
    assert [error.field for error in TrainConfig(control=control).problems()] == names
    assert str(control.problems()[1]) == "control.scheduler: got 'yes'; accepted: true or false"


@pytest.mark.parametrize("value", [5, "abc", None, (1.0, "x"), (1.0, True)])
def test_a_list_of_numbers_holds_numbers(value):
    [error] = ControlConfig(priorities=value).problems()
    assert error.field.startswith("control.priorities")


def test_what_is_no_section_is_named():
    assert [error.field for error in TrainConfig(control={"scheduler": True}).problems()] == ["control"]


@pytest.mark.parametrize("name", ["verify", "rebuild"])
def test_switches_of_the_data_and_of_a_schedule(name):
    with pytest.raises(InputError, match=f"data.{name}: got 'no'; accepted: true or false"):
        TextDataConfig(**{name: "no"})
    for switch in ("reads", "keep_total"):
        assert [error.field for error in Schedule(**{switch: "no"}).problems((4,), (16,))] == [switch]


@pytest.mark.parametrize(("dim", "fine"), [(2, False), (4, False), (6, True), (16, True)])
def test_streams_that_are_too_narrow_for_the_scheduler_are_told_of_by_a_field_that_there_is(dim, fine):
    config = TrainConfig(control=ControlConfig(scheduler=True))
    config = replace(config, model=replace(config.model, dim=dim, heads=1))
    found = config.problems()
    assert [error.field for error in found] == ([] if fine else ["control.scheduler_damping"])
    if not fine:
        assert str(dim) in found[0].accepted
        assert replace(config, control=ControlConfig(scheduler=True, scheduler_damping=0.0)).problems() == []
