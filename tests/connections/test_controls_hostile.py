"""What a hostile reading of the controls found: extreme scales, wide gradients, decisions that ranks must share."""

from __future__ import annotations

import pytest
import torch

from laneway.connections.arbitration import subspace_similarity
from laneway.connections.constraint import CurvatureConstraint
from laneway.connections.schedule import add_scheduler
from laneway.connections.scheduler import ConnectionScheduler
from laneway.connections.transport import LEVELS, move_down
from laneway.core import LanewayError
from laneway.models.gpt import GPT, GPTConfig


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    pass


def gpt() -> GPT:
    return GPT(GPTConfig(context=16, layers=2, heads=2, dim=16, streams=4))


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e30, 3e38])
def test_likeness_does_not_hang_on_the_scale_of_the_streams(scale):
    points = torch.rand(1, 3, 64, 16)
    similarity, both = subspace_similarity(points * scale, 4)
    want, _ = subspace_similarity(points, 4)
    assert both.all()
    assert torch.allclose(similarity, want, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-15, 1e-6, 1e-3, 1e3, 1e6, 1e15])
def test_priorities_do_not_hang_on_the_scale_of_the_streams(scale):
    scheduler = add_scheduler(gpt())[0]
    with torch.no_grad():
        scheduler.query.normal_()
    x = torch.randn(5, 4, 16)
    want = scheduler.priorities(x)
    assert (want - 1).abs().max() > 0.1
    assert torch.allclose(scheduler.priorities(x * scale), want, atol=1e-4)
    assert torch.equal(scheduler.priorities(torch.zeros(5, 4, 16)).isfinite(), torch.ones(5, 2, 4, dtype=torch.bool))


@pytest.mark.parametrize("scale", [1.0, 1e-60, 1e60])
def test_a_wide_gradient_keeps_its_digits_and_its_range(scale):
    gradient = torch.randn(500, dtype=torch.float64) * scale
    quantiles = gradient.abs().quantile(torch.from_numpy(LEVELS)).log().numpy()
    kept = gradient.clone()
    move_down(kept, quantiles, quantiles, 0.9)
    assert torch.equal(kept, gradient), "nothing to move"
    move_down(kept, quantiles, quantiles - 1, 1.0)
    assert torch.allclose(kept, gradient / torch.e, rtol=1e-12, atol=0)


class Gathered:
    """Statistics of two ranks, the other of which is another network; the vectors of both, reduced."""

    def __init__(self) -> None:
        self.ops: dict[str, str] = {}
        self.mine: dict[str, torch.Tensor] = {}
        self.other: Gathered = self

    def add(self, name: str, size: int = 1, op: str = "sum") -> None:
        self.ops[name] = op

    def put(self, name: str, values: float | torch.Tensor) -> None:
        self.mine[name] = torch.as_tensor(values).reshape(-1).clone()

    def get(self, name: str) -> torch.Tensor | None:
        if name not in self.mine:
            return None
        parts = [self.mine[name], self.other.mine[name]]
        return sum(parts) if self.ops[name] == "sum" else torch.stack(parts)


@pytest.mark.parametrize("kind", [CurvatureConstraint, ConnectionScheduler])
@pytest.mark.parametrize("verify", [True, False])
def test_ranks_whose_gates_or_priorities_part_are_found_out(kind, verify):
    controls = [kind(gpt(), verify=verify) for _ in range(2)]
    ranks = [Gathered(), Gathered()]
    for rank, control, other in zip(ranks, controls, reversed(ranks), strict=True):
        rank.other = other
        control.share(rank)

    def begin(step: int) -> None:
        for control in controls:
            control.on_step_begin(step)

    begin(2)
    begin(3)
    buffer = controls[1].gates[0].gate if kind is CurvatureConstraint else controls[1].sites[0].damping
    buffer[0] = 0.5
    begin(4)
    if not verify:
        begin(5)
        return
    with pytest.raises(LanewayError, match="rank 1 decided otherwise"):
        begin(5)
