"""Errors, choices and the extension protocol."""

from __future__ import annotations

import pickle

import pytest

from laneway.core import Extension, InputError, LanewayError, choice, choices, nearest, positive_int


def test_input_error_names_field_value_and_what_is_accepted():
    error = InputError("model.streams", 0, "an integer ≥ 1", "did you mean 4?")
    assert str(error) == "model.streams: got 0; accepted: an integer ≥ 1; did you mean 4?"
    assert "\n" not in str(error)
    assert isinstance(error, ValueError)
    assert error.exit_code == 2
    assert LanewayError("x").exit_code == 1


def test_input_error_survives_pickling_between_processes():
    error = pickle.loads(pickle.dumps(InputError("a", [1], "b", "c")))
    assert (error.field, error.given, error.accepted, error.hint) == ("a", [1], "b", "c")


def test_choice_suggests_the_nearest():
    assert choice("f", "mhc", ["hc", "mhc"]) == "mhc"
    with pytest.raises(InputError, match="did you mean 'sinkhorn'"):
        choice("f", "Sinkhron", ["identity", "sinkhorn"])
    with pytest.raises(InputError) as caught:
        choice("f", "zzzz", ["identity", "sinkhorn"])
    assert "did you mean" not in str(caught.value)
    with pytest.raises(InputError):
        choice("f", None, ["none"])


@pytest.mark.parametrize("given", [0, -1, True, 2.0, "3", None])
def test_positive_int_refuses(given):
    with pytest.raises(InputError):
        positive_int("n", given)


def test_positive_int_accepts_from_its_bound():
    assert positive_int("n", 0, at_least=0) == 0
    assert positive_int("n", 7) == 7


def test_nearest():
    assert nearest("tran", ["train", "report"]) == "train"
    assert nearest("xyz", ["train", "report"]) is None


def test_extension_is_a_structural_protocol():
    class Whole:
        def on_step_begin(self, step): ...
        def on_backward_end(self, step): ...
        def on_step_end(self, step, metrics): ...
        def state_dict(self):
            return {}

        def load_state_dict(self, state): ...

    class Part:
        def on_step_begin(self, step): ...

    assert isinstance(Whole(), Extension)
    assert not isinstance(Part(), Extension)


@pytest.mark.parametrize("given", ["abc", "a", "", (), ("a", "d"), ["a", 1]])
def test_choices_are_one_or_more_of_the_options(given):
    assert choices("field", (name for name in "ba"), "abc") == ("b", "a")
    with pytest.raises(InputError, match=r"^field: got .*; accepted: .*one( or more)? of a, b, c"):
        choices("field", given, "abc")
