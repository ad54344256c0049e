"""The controls that a run's configuration asks for, as extensions of its loop, in the order in which they act."""

from __future__ import annotations

from laneway.connections.guard import PathNormGuard, Tell
from laneway.connections.purify import GradientPurifier
from laneway.core import Extension
from laneway.train.control_config import ControlConfig
from laneway.train.parallel import Parallel


def build_controls(config: ControlConfig, parallel: Parallel, tell: Tell) -> list[Extension]:
    """What is on in ``config``; nothing where everything is off.

    Args:
        config: the run's ``control`` section, checked.
        parallel: the model, wrapped as it is trained.
        tell: writes an event of the run: ``tell(kind, **fields)``.

    Raises:
        InputError: the model has nothing that a control could act on.
    """
    found: list[Extension] = []
    if config.norm_guard:
        found.append(PathNormGuard(parallel.model, config.norm_guard, tell=tell, verify=config.verify_ranks))
    if config.purify_every:
        found.append(
            GradientPurifier(
                parallel.model,
                config.purify_every,
                sample=config.purify_sample,
                screen=config.purify_screen,
                tell=tell,
                verify=config.verify_ranks,
            )
        )
    return found
