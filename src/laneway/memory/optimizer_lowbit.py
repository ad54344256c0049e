"""An optimizer whose moments are held in 8 or 4 bits between its steps, and are what they were only while it updates with them.

The optimizer is the user's own AdamW, Adam or SGD, its step torch's own, fused or not; what differs from it is the rounding of
the moments after each step. Opt-in: a run with it is another run than one without.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from laneway.core import InputError, LanewayError
from laneway.memory.lowbit_moments import CODES, SCALES, Format
from laneway.memory.optimizer_state import StreamedOptimizerState
from laneway.memory.tier import Tier

SIGNED = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False, "momentum_buffer": True}
BITS = (8, 4)
LEAST = 4096  # elements: smaller moments stay as they are, as in the published optimizers
OPTIMIZERS = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


class LowBitOptimizerState(StreamedOptimizerState):
    """Holds an optimizer's moments in 8 or 4 bits, on the device or in a tier.

    A moment ``exp_avg`` of at least 4096 elements becomes ``exp_avg_codes`` (uint8) and ``exp_avg_scales`` (fp32) in the
    optimizer's state and in its ``state_dict``, which is exact: a run that is resumed from it goes on bit for bit. A state dict
    with whole moments loads too, and is rounded. At most one chunk of moments is decoded at a time. ``close`` decodes all.

    Codes and scales: ``lowbit_moments`` (8 bits: arXiv 2110.02861, 4 bits: arXiv 2309.01507).

    Args:
        optimizer: ``AdamW``, ``Adam`` or ``SGD`` of torch over plain parameters.
        bits: 8 or 4.
        tier: where codes and scales live between steps; None: on the device.
        chunk_bytes: bytes of state, decoded, that are updated at a time.

    Raises:
        InputError: another optimizer, parameters that FSDP2 or another DTensor layout shards, or bits that are neither.
    """

    def __init__(self, optimizer: Optimizer, bits: int, *, tier: Tier | None = None, chunk_bytes: int = 16 << 20) -> None:
        super().__init__(optimizer, tier, chunk_bytes=chunk_bytes, moments=Moments(optimizer, bits))

    @property
    def nbytes(self) -> int:
        """Bytes of the optimizer's state between steps, codes and scales included, wherever they are; scalars don't count."""
        values = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor) and v.dim() > 0)

    @property
    def resident(self) -> int:
        """Bytes of state on the device now; scalars and what is decoded in a step don't count."""
        return self.nbytes if self.tier is None else super().resident

    @property
    def peak(self) -> int:
        """The most there ever were."""
        return self.nbytes if self.tier is None else super().peak


class Moments:
    """What ``StreamedOptimizerState`` asks of moments that are held otherwise than the optimizer wants them."""

    def __init__(self, optimizer: Optimizer, bits: int) -> None:
        if bits not in BITS or isinstance(bits, bool):
            raise InputError("bits", bits, "8 or 4")
        if not isinstance(optimizer, OPTIMIZERS):
            raise InputError("optimizer", type(optimizer).__name__, "AdamW, Adam or SGD of torch, for moments of few bits")
        for parameter in _parameters(optimizer):
            if isinstance(parameter, DTensor):
                raise InputError(
                    "optimizer", "parameters sharded as DTensor (FSDP2)", "plain parameters, for moments of few bits"
                )
        self.optimizer, self.bits = optimizer, bits

    def decoded_bytes(self, parameter: Tensor) -> int:
        """What a parameter's moments take while they are decoded."""
        if parameter.numel() < LEAST:
            return 0
        known = sum(
            name.removesuffix(CODES) in SIGNED for name in self.optimizer.state.get(parameter, ()) if name.endswith(CODES)
        )
        return (known or 2) * parameter.numel() * parameter.element_size()

    @contextmanager
    def decoded(self, parameters: Sequence[Tensor]) -> Generator[None]:
        """Within, the optimizer's state of these is as it expects. Where its step fails, the codes are as before."""
        held = {p: dict(self.optimizer.state[p]) for p in parameters if p in self.optimizer.state}
        try:
            for parameter in held:
                self.decode(parameter)
            yield
        except BaseException:
            for parameter, before in held.items():
                if any(name.endswith(CODES) for name in before):
                    self.optimizer.state[parameter] = before
            raise
        for parameter in parameters:
            self.encode(parameter, held.pop(parameter, {}))

    def decode(self, parameter: Tensor) -> None:
        """Moments in place of codes and scales."""
        state = self.optimizer.state[parameter]
        found: dict[str, Any] = {}
        for name, value in state.items():
            if name.endswith(CODES):
                moment = name.removesuffix(CODES)
                found[moment] = torch.empty_like(parameter, requires_grad=False)
                self._format(parameter, moment).decode(value, state[moment + SCALES], found[moment])
            elif not name.endswith(SCALES):
                found[name] = value
        self.optimizer.state[parameter] = found

    def encode(self, parameter: Tensor, room: dict[str, Any]) -> None:
        """Codes and scales in place of moments, written into those in ``room`` where it has them."""
        if parameter in self.optimizer.state:
            self.optimizer.state[parameter] = self._encoded(parameter, self.optimizer.state[parameter], room)

    def loaded(self, parameter: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Entries of a state dict as they are to be held."""
        return self._encoded(parameter, values, {})

    def _encoded(self, parameter: Tensor, entries: dict[str, Any], room: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in entries.items():
            if name not in SIGNED or not isinstance(value, Tensor) or value.shape != parameter.shape or value.numel() < LEAST:
                found[name] = value
                continue
            form = self._format(parameter, name)
            codes, scales = room.get(name + CODES), room.get(name + SCALES)
            if codes is None or scales is None:
                codes, scales = form.empty(value.device)
            form.encode(value, codes, scales)
            found |= {name + CODES: codes, name + SCALES: scales}
        return found

    def check(self, state_dict: dict[str, Any]) -> None:
        """Raise LanewayError where a state dict's codes are of other bits."""
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, parameter in zip(saved, _parameters(self.optimizer), strict=False):
            entry = state_dict["state"].get(key, {})
            for name in [name for name in entry if name.endswith(CODES)]:
                if entry[name].numel() != self._format(parameter, name.removesuffix(CODES)).code_bytes:
                    raise LanewayError(f"{name}: the state dict's moments are not of {self.bits} bits, or of another shape")

    def _format(self, parameter: Tensor, moment: str) -> Format:
        return Format(self.bits, SIGNED[moment], parameter.shape)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
