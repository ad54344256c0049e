"""Controls in a step: from its begin to the end of the backward pass no number goes to the host, whatever is on."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from laneway.bench.control_ranks import SETTINGS
from laneway.core import SharesStatistics
from laneway.models.gpt import GPT, GPTConfig
from laneway.train.config import TrainConfig
from laneway.train.control_config import ControlConfig
from laneway.train.controls import build_controls, with_control
from laneway.train.packed import SharedStatistics
from laneway.train.parallel import parallelise
from laneway.train.ranks import Ranks

CONFIG = GPTConfig(vocab_size=32, context=16, layers=3, heads=2, dim=8, streams=3)
STEPS = 13  # whole rounds of every control's measurements and checks
NEVER_WAITS = ("curvature", "scheduler")  # nor in what they compute from the gradients


class HostReads(TorchDispatchMode):
    """Fails where the value of a tensor is asked for (item, bool, float, a branch on it), and says who asked."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name() != "aten::_local_scalar_dense", "a number goes to the host"
        return func(*args, **(kwargs or {}))


def test_the_mode_sees_what_it_forbids():
    for asks in (lambda t: t.item(), bool, float, int):
        with HostReads(), pytest.raises(AssertionError, match="goes to the host"):
            asks(torch.ones(()))


@pytest.mark.parametrize("name", [*sorted(SETTINGS.keys() - {"off", "again", "all"}), "auto"])
def test_no_number_goes_to_the_host_within_a_step(name):
    config = ControlConfig(**({"curvature": "auto"} if name == "auto" else SETTINGS[name]))
    torch.manual_seed(0)
    ranks = Ranks(0, 0, 1, torch.device("cpu"))
    parallel = parallelise(with_control(GPT(CONFIG), config), TrainConfig(model=CONFIG, control=config), ranks)
    shared = SharedStatistics("cpu")
    controls = build_controls(config, parallel, STEPS, lambda kind, **fields: None)
    for control in controls:
        if isinstance(control, SharesStatistics):
            control.share(shared)
    shared.seal()
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, 32, (2, 17))
        with HostReads():
            for control in controls:
                control.on_step_begin(step)
            loss = torch.nn.functional.cross_entropy(parallel.call(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            if name in NEVER_WAITS:
                controls[0].on_backward_end(step)
        if name not in NEVER_WAITS:
            for control in controls:
                control.on_backward_end(step)
        shared.start()
        shared.finish()
        for control in controls:
            control.on_step_end(step, {"loss": loss.item(), "grad_norm": 1.0})
        parallel.model.zero_grad()
