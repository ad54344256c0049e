"""The controls that a run's configuration asks for, as extensions of its loop, in the order in which they act."""

from __future__ import annotations

from torch import nn

from laneway.connections.constraint import CurvatureConstraint, Measurement
from laneway.connections.control import attach
from laneway.connections.gates import ConstantStrength, FixedGate
from laneway.connections.guard import PathNormGuard, Tell
from laneway.connections.purify import GradientPurifier
from laneway.connections.schedule import FixedPriorities, add_scheduler
from laneway.connections.scheduler import ConnectionScheduler
from laneway.connections.tuning import AutoStrength
from laneway.core import Extension
from laneway.models.gpt import GPT
from laneway.train.control_config import ControlConfig
from laneway.train.parallel import Parallel


def with_control(model: GPT, config: ControlConfig) -> GPT:
    """The model with the parts of its controls that are its own: parameters and constants, so before all that wraps it."""
    if config.scheduler:
        add_scheduler(model, config.schedule)
    if config.priorities:
        attach(model, lambda site, place: FixedPriorities(config.priorities))
    if config.write_strength != 1:
        attach(model, lambda site, place: ConstantStrength(site.streams, config.write_strength))
    return model


def build_controls(config: ControlConfig, parallel: Parallel, steps: int, tell: Tell) -> list[Extension]:
    """What is on in ``config``; nothing where everything is off.

    Args:
        config: the run's ``control`` section, checked.
        parallel: the model, made by ``with_control`` and wrapped as it is trained.
        steps: of the run.
        tell: writes an event of the run: ``tell(kind, **fields)``.

    Raises:
        InputError: the model has nothing that a control could act on.
    """
    found: list[Extension] = []
    if config.scheduler:
        found.append(ConnectionScheduler(parallel.model, verify=config.verify_ranks))
    if config.constrains:
        found.append(_constraint(config, parallel, steps))
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


def _constraint(config: ControlConfig, parallel: Parallel, steps: int) -> CurvatureConstraint:
    measurement = Measurement(
        config.curvature_every, config.curvature_sample, config.curvature_neighbours, config.curvature_projection
    )
    if isinstance(config.curvature, str):
        return CurvatureConstraint(parallel.model, AutoStrength(), measurement=measurement, verify=config.verify_ranks)
    final = config.curvature_final
    length = None if final is None else max(steps, 1)
    return CurvatureConstraint(
        parallel.model, config.curvature, final=final, steps=length, measurement=measurement, verify=config.verify_ranks
    )


def expect_gates(config: ControlConfig, model: nn.Module) -> None:
    """Make room in a fresh model for the gates that a run of this configuration saves with its weights."""
    if config.constrains:
        attach(model, lambda site, place: FixedGate(site.streams).to(site.base.device))
