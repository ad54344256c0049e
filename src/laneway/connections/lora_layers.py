"""Layers with a low-rank adapter (LoRA; Hu et al., arXiv 2106.09685): W + (α / r) B A, with A [r, in] and B [out, r].

An adapted layer stays the object it was: its class becomes ``LoRALinear`` (or ``LoRAConnection`` for a site's map projection
``fn``), and the two factors are its child ``lora``. So hooks, tied parameters and the names of the base's tensors in a state
dict are untouched; new names only are added, ``….lora.A``, ``….lora.B`` and ``….lora.alpha``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneway.connections.layer import HyperConnection
from laneway.connections.parameters import WIDE


class LoRA(nn.Module):
    """The two factors of one adapted matrix [out, in]: A kaiming-uniform, B zero, so that B A = 0 at first (§ 4.1).

    They are fp32 (float64 for a float64 base) and stay so under ``.to(bfloat16)``: bf16 has 8 bits, and an update of a
    thousandth of a weight would be lost in it.
    """

    def __init__(self, base: Tensor, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        out, width = base.shape
        options: dict[str, Any] = {"device": base.device, "dtype": base.dtype if base.dtype in WIDE else torch.float32}
        self.A, self.B = nn.Parameter(torch.empty(rank, width, **options)), nn.Parameter(torch.zeros(out, rank, **options))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))  # as the paper's code: uniform in ±1/√in
        self.alpha: Tensor
        self.register_buffer("alpha", torch.tensor(float(alpha), dtype=torch.float64))  # saved with the factors it belongs to
        self.scaling = alpha / rank
        self.dropout = nn.Dropout(dropout)
        self.enabled, self.merged = True, False

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return f"rank={self.A.shape[0]}, scaling={self.scaling:g}, merged={self.merged}"

    def delta(self) -> Tensor:
        """(α / r) B A [out, in], outside autocast."""
        with torch.autocast(self.A.device.type, enabled=False):
            return self.scaling * (self.B @ self.A)

    def forward(self, x: Tensor) -> Tensor:
        """(α / r) B A dropout(x): [..., in] → [..., out], in the factors' dtype, or autocast's."""
        h = self.dropout(x if torch.is_autocast_enabled(x.device.type) else x.to(self.A.dtype))
        return F.linear(F.linear(h, self.A), self.B) * self.scaling

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep_wide(t: Tensor) -> Tensor:
            probe = fn(t.new_empty(0))
            return fn(t) if probe.dtype in WIDE else t.to(probe.device)

        return super()._apply(keep_wide, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not self.merged:  # merged, the layer's own weight has them in it: loading both would add them twice
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: Any, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.scaling = float(self.alpha) / self.A.shape[0]


class Adapted(nn.Module):
    """What both kinds of adapted layer share: the name of the adapted parameter, merging, loading."""

    adapted: str
    lora: LoRA
    kept: Tensor | None

    def adapt(self, rank: int, alpha: float, dropout: float) -> None:
        """Give a layer, whose class has just been changed, its factors."""
        self.lora = LoRA(self._parameters[self.adapted], rank, alpha, dropout)  # pyrefly: ignore[bad-argument-type]
        self.register_buffer("kept", None, persistent=False)

    def original(self) -> Tensor:
        """The matrix without its adapter, merged or not."""
        kept = self._buffers["kept"]
        weight = self._parameters[self.adapted] if kept is None else kept
        assert weight is not None
        return weight

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """W + (α / r) B A, added up in the factors' dtype and rounded once."""
        return (self.original() + self.lora.delta()).to(self.original().dtype)

    @torch.no_grad()
    def fold(self, weight: Tensor) -> None:
        """Put ``weight`` in the parameter's place and keep what was there."""
        parameter = self._parameters[self.adapted]
        assert parameter is not None
        self._buffers["kept"], self.lora.merged = parameter.detach().clone(), True
        parameter.copy_(weight)

    @torch.no_grad()
    def unfold(self) -> None:
        """Put the kept matrix back, bit for bit."""
        parameter, kept = self._parameters[self.adapted], self._buffers["kept"]
        assert parameter is not None
        assert kept is not None
        parameter.copy_(kept)
        self._buffers["kept"], self.lora.merged = None, False

    def _load_from_state_dict(self, state_dict: Any, prefix: Any, *args: Any, **kwargs: Any) -> None:
        if self.lora.merged and prefix + self.adapted in state_dict:
            errors = args[-1] if args else kwargs["error_msgs"]
            errors.append(
                f"{prefix}{self.adapted}: its adapter is merged, and unmerge would bring the old base back; unmerge first"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class LoRALinear(Adapted, nn.Linear):
    """``nn.Linear`` with an adapter: x Wᵀ + b + (α / r) x Aᵀ Bᵀ."""

    adapted = "weight"

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] → [..., out], in the dtype that the layer gave before."""
        if self.lora.merged:
            return F.linear(input, self.weight if self.lora.enabled else self.original(), self.bias)
        y = F.linear(input, self.weight, self.bias)
        return y + self.lora(input).to(y.dtype) if self.lora.enabled else y


class LoRAConnection(Adapted, HyperConnection):
    """A site whose map projection has an adapter: φ + (α / r) B A. H_res stays on its manifold whatever the adapter is."""

    adapted = "fn"

    @property
    def fn(self) -> Tensor:  # pyrefly: ignore[bad-override]
        """The projection that the site uses."""
        if self.lora.enabled and not self.lora.merged:
            return self.original() + self.lora.delta()
        weight = self._parameters["fn"] if self.lora.enabled else self.original()
        assert weight is not None
        return weight

    def reset_parameters(self) -> None:
        """The base's start; the adapter stays."""
        with adapters_off(self):
            super().reset_parameters()


@contextmanager
def adapters_off(model: nn.Module) -> Generator[None]:
    """Inside the block the model computes its base function, merged or not."""
    layers = [module for module in model.modules() if isinstance(module, Adapted)]
    before = [layer.lora.enabled for layer in layers]
    for layer in layers:
        layer.lora.enabled = False
    try:
        yield
    finally:
        for layer, enabled in zip(layers, before, strict=True):
            layer.lora.enabled = enabled
