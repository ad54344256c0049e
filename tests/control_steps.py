"""Every control on a model with sites: put on, two steps, taken off."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from laneway.connections.constraint import Measurement
from laneway.connections.control import controlled_sites
from laneway.connections.controls import build

PLAIN = ("constant", "priorities")


def options(name: str, streams: int) -> dict:
    """Of a control that looks in every step."""
    if name == "priorities":
        return {"shares": [2.0, *[1.0] * (streams - 1)]}
    if name.startswith("scheduler"):
        return {"every": 1, "sample": 16, "directions": 2, "features": 6}
    if name.startswith("curvature"):
        measured = Measurement(every=1, sample=24, neighbours=5)
        return {"measurement": measured} | ({} if name == "curvature-auto" else {"strength": 0.9})
    return {}


def flat(value: object) -> list[float]:
    """All numbers in nested lists."""
    return [number for part in value for number in flat(part)] if isinstance(value, list) else [value]  # type: ignore[list-item]


def steps_and_removal(model: nn.Module, name: str, output: Callable[[], Tensor], loss: Callable[[], Tensor]) -> None:
    """Two steps with a control, finite in all they make; then the model as before, bit for bit."""
    sites, state = controlled_sites(model), {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        before = output()
    control = build(name, model, **options(name, sites[0].streams))
    assert all(site.control is not None for site in sites)
    with torch.no_grad():
        assert torch.equal(output(), before) is (name not in PLAIN)  # others begin as nothing
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in (1, 2):
        control.on_step_begin(step)
        optimizer.zero_grad()
        found = loss()
        found.backward()
        control.on_backward_end(step)
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        row = {"loss": found.item(), "grad_norm": 1.0}
        control.on_step_end(step, row)
        assert math.isfinite(row["loss"])
    if name.startswith(("scheduler", "curvature")):
        key = "similarity" if name.startswith("scheduler") else "curvature"
        assert [len(site) for site in row[key]] == [site.streams for site in sites]
        assert all(map(math.isfinite, flat(row[key])))
        assert sum(flat(row[key])) > 0
    control.remove()
    assert all(site.control is None for site in sites)
    model.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(output(), before)
