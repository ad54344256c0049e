"""What is kept between steps, without processes: bad input is refused, strays find their way, and nothing is counted twice."""

from __future__ import annotations

import pytest
import torch

from laneway.cluster.drop import GradientDropper, Piece, Pieces, PowerSGD
from laneway.core import InputError

NO_GROUP: object = None  # input is looked at first


def with_residuals(pieces: Pieces, residual: torch.Tensor) -> dict:
    """A saved state with one vector."""
    slot = {
        "pieces": [[p.name, p.start, p.stop, p.numel] for p in pieces.pieces],
        "residual": residual,
        "root": torch.ones(len(pieces.pieces)),
        "observed": 3,
        "last": 7,
        "seen": True,
    }
    return {"step": 7, "slots": [slot], "strays": []}


def test_a_state_comes_back_as_it_was():
    residual, pieces = torch.randn(90, dtype=torch.float64), Pieces.of({"a": 40, "b": 50})
    dropper = GradientDropper(0.5)
    dropper.load_state_dict(with_residuals(pieces, residual))
    again = GradientDropper(0.5)
    again.load_state_dict(dropper.state_dict())
    assert again.step == 7
    assert torch.equal(torch.cat([run for _, run in again.residuals()]), residual)
    assert again.thresholds() == dict.fromkeys(pieces.pieces, 1.0)


def test_released_residuals_go_into_the_gradients_of_their_parameters_once():
    residual, pieces = torch.randn(90, dtype=torch.float64), Pieces.of({"a": 40, "b": 50})
    dropper = GradientDropper(0.5)
    dropper.load_state_dict(with_residuals(pieces, residual))
    dropper.adopt(with_residuals(pieces, 2 * residual))
    bucket = Pieces((Piece("b", 10, 50, 50), Piece("c", 0, 7, 7), Piece("a", 0, 40, 40)))
    flat = torch.zeros(87)
    assert dropper.carry_into(flat, bucket) == 80
    assert torch.equal(flat, torch.cat([2 * residual[50:], torch.zeros(7), 2 * residual[:40]]).float())
    dropper.release()
    flat = torch.zeros(87)
    assert dropper.carry_into(flat, bucket) == 80
    assert torch.equal(flat, torch.cat([residual[50:], torch.zeros(7), residual[:40]]).float())
    assert dropper.carry_into(flat, bucket) == 0
    (first, second) = dropper.residuals()
    assert first[0] == second[0] == Piece("b", 0, 10, 50)
    assert torch.equal(first[1] + second[1], 3 * residual[40:50])


def test_residuals_wait_while_a_gradient_is_not_finite():
    dropper, pieces = GradientDropper(0.5), Pieces.of({"a": 64})
    dropper.adopt(with_residuals(pieces, torch.ones(64, dtype=torch.float64)))
    spoiled = torch.full((64,), torch.inf)
    assert dropper.carry_into(spoiled, pieces) == 0
    flat = torch.zeros(64, dtype=torch.bfloat16)
    assert dropper.carry_into(flat, pieces) == 64
    assert (flat == 1).all()


def test_without_feedback_nothing_is_taken_over():
    dropper, pieces = GradientDropper(0.5, feedback=False), Pieces.of({"a": 64})
    dropper.load_state_dict(with_residuals(pieces, torch.ones(64, dtype=torch.float64)))
    dropper.adopt(with_residuals(pieces, torch.ones(64, dtype=torch.float64)))
    assert dropper.residuals() == []


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: GradientDropper(1), "drop"),
        (lambda: GradientDropper(0.5, wire="fp16"), "wire"),
        (lambda: GradientDropper(0.5, unit="rows"), "unit"),
        (lambda: GradientDropper(0.5, residual="bf16"), "residual"),
        (lambda: GradientDropper(0.5, smoothing=1.0), "smoothing"),
        (lambda: GradientDropper(0.5, sample=3), "sample"),
        (lambda: GradientDropper(0.5, warmup=-1), "warmup"),
        (lambda: GradientDropper().all_reduce(torch.zeros(4).double(), NO_GROUP, "a"), "tensor"),
        (lambda: GradientDropper().all_reduce(torch.zeros(2, 2), NO_GROUP, "a"), "tensor"),
        (lambda: GradientDropper().all_reduce(torch.zeros(8)[::2], NO_GROUP, "a"), "tensor"),
        (lambda: GradientDropper().all_reduce(torch.zeros(4), NO_GROUP, None), "key"),
        (lambda: GradientDropper().all_reduce(torch.zeros(4), NO_GROUP, Pieces.of({"a": 5})), "key"),
        (lambda: GradientDropper().all_reduce(torch.zeros(4), NO_GROUP, (Pieces.of({"a": 9}), 4, 9)), "key"),
        (lambda: GradientDropper().all_reduce(torch.zeros(4), NO_GROUP, "a", drop=1.5), "drop"),
        (lambda: GradientDropper().all_reduce(torch.zeros(4), NO_GROUP, "a", wire="int4"), "wire"),
        (lambda: GradientDropper().carry_into(torch.zeros(4), Pieces.of({"a": 5})), "key"),
        (lambda: GradientDropper().load_state_dict({"step": 1}), "state"),
        (lambda: GradientDropper().load_state_dict(with_residuals(Pieces.of({"a": 5}), torch.ones(4))), "state.slots.0.residual"),
        (lambda: PowerSGD(torch.nn.Linear(2, 2)), "model"),
    ],
)
def test_bad_input_names_the_field(call, field):
    with pytest.raises(InputError) as error:
        call()
    assert error.value.field == field
