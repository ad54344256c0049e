"""A plan: what was asked, what was chosen, what it is predicted to cost, and why. Applying it needs torch; the plan doesn't."""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from laneway.cluster.architecture import Architecture
from laneway.cluster.costs import Calibration
from laneway.cluster.estimate import Estimate
from laneway.cluster.layout import Layout
from laneway.cluster.topology import Topology
from laneway.core import InputError
from laneway.rundir import replace_file
from laneway.strategy.checkpoints import CheckpointPolicy
from laneway.strategy.checks import check_plan
from laneway.strategy.explain import Alternative, Reason
from laneway.strategy.files import from_plain, to_plain
from laneway.strategy.levels import Collective

if TYPE_CHECKING:
    from torch import nn

    from laneway.strategy.pipelined import PipelinedModel
    from laneway.strategy.wrapped import WrappedModel

VERSION = 1


@dataclass(frozen=True)
class Strategy:
    """How to train a model on a cluster. Made by ``auto_config``; ``print(strategy.explain())`` says why it is as it is.

    Attributes:
        model_size: parameters that were asked for.
        arch, arch_source: the model's shape, and where it comes from.
        topology: the devices and how they are joined.
        seq_len: tokens of a sequence.
        global_batch: sequences of an optimizer step.
        layout: degrees of parallelism, micro-batch, recompute, precision.
        memory: "device", or "host" where the optimizer's state is streamed from the host.
        collectives: each kind of collective of a step, with the levels it crosses and its algorithm.
        checkpoint: when and how checkpoints are written.
        predicted: time, memory, traffic and energy of a step.
        reasons, alternatives: each choice with its number and source, and the plans that were not taken.
        calibration: constants of the prediction; ``scaled_to`` and the comparison with the flat baseline use the same.
    """

    model_size: float
    arch: Architecture
    arch_source: str
    topology: Topology
    seq_len: int
    global_batch: int
    layout: Layout
    memory: str
    collectives: tuple[Collective, ...]
    checkpoint: CheckpointPolicy
    predicted: Estimate
    reasons: tuple[Reason, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def world(self) -> int:
        """Devices of the plan."""
        return self.layout.world

    def estimate(self) -> Estimate:
        """Predicted step time with its interval and parts, MFU, exposed communication, bytes per level, memory, energy."""
        return self.predicted

    def explain(self) -> str:
        """Each choice, its number and the number's source, then the plans that were not taken."""
        from laneway.strategy.words import explained

        return explained(self)

    def wrap_model(self, model: nn.Module, **options: Any) -> WrappedModel | PipelinedModel:
        """Apply the plan to a model, as ``laneway.strategy.wrap.wrap_model`` does with a layout.

        On one process it returns a model that trains. A plain model gets the plan's residual streams, if there are several.
        Where the plan keeps the optimizer's state on the host, that is for ``manage_memory`` to do once there is an
        optimizer; a warning says so.

        Args:
            model: a plain model of the plan's shape.
            options: of ``laneway.strategy.wrap.wrap_model``: ``order``, ``device``, ``streams``, ``memory``, ``schedule``, …

        Raises:
            InputError: the plan can't be applied to this model.
            LanewayError: the number of processes is not the plan's.
        """
        from laneway.strategy.wrap import wrap_model

        if self.memory == "host":
            call = "laneway.manage_memory(model, optimizer, optimizer_state='streamed')"
            logging.getLogger("laneway").warning("the plan keeps the optimizer's state on the host: %s", call)
        if self.arch.streams > 1:
            options.setdefault("streams", self.arch.streams)
        return wrap_model(model, self.layout, topology=self.topology, **options)

    def scaled_to(self, world: int) -> Strategy:
        """The same plan on another number of devices: more or fewer data-parallel ranks, the same batch (and, where that
        asks for it, smaller micro-batches).

        Raises:
            InputError: the devices or the batch don't divide, or the plan no longer fits.
        """
        from laneway.strategy.auto import scaled

        return scaled(self, world)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON or TOML."""
        return {"version": VERSION} | to_plain(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], field: str = "plan") -> Strategy:
        """Undo of ``to_dict``.

        Raises:
            InputError: what is wrong by its dotted name: no such field, no such number, what does not divide or does not fit.
        """
        if not isinstance(data, Mapping) or data.get("version") is True or data.get("version") != VERSION:
            given = data.get("version") if isinstance(data, Mapping) else data
            raise InputError(f"{field}.version", given, f"{VERSION}, as `laneway plan --write` writes it")
        plan = from_plain(cls, {name: value for name, value in data.items() if name != "version"}, field)
        check_plan(plan, field)
        return plan

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON (``.json``) or TOML (any other name), at once or not at all."""
        path = Path(path)
        text = json.dumps(self.to_dict(), indent=1) if path.suffix == ".json" else tomli_w.dumps(self.to_dict())
        if not path.parent.is_dir():
            raise InputError("write", str(path), "a file in an existing folder")
        try:
            replace_file(path, text.encode())
        except OSError as error:
            raise InputError("write", str(path), "a file that can be written", error.strerror) from error
        return path

    @classmethod
    def load(cls, path: str | Path, field: str = "plan") -> Strategy:
        """Read a plan that ``save`` wrote."""
        path = Path(path)
        try:
            text = path.read_text("utf-8")
            data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except OSError as error:
            raise InputError(field, str(path), "a plan that can be read", error.strerror) from error
        except (ValueError, RecursionError) as error:
            raise InputError(field, str(path), "a plan in JSON (.json) or TOML", str(error)) from error
        return cls.from_dict(data, field)
