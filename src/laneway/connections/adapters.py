"""One view of adapted layers, whoever made them: laneway's own and those of PEFT, told by what they have, not by an import."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneway.connections.layer import HyperConnection, StreamReadout
from laneway.connections.lora_layers import LoRAConnection, LoRALinear, adapters_off

Factors = tuple[Tensor, Tensor, float]  # A [r, in], B [out, r], scaling


@dataclass(frozen=True)
class Adapter:
    """An adapted layer.

    Args:
        name: as in the model.
        module: what runs in the forward pass.
        base: the layer whose matrix is adapted (``module`` itself for laneway's own).
        parameter: name of that matrix in ``base``.
    """

    name: str
    module: nn.Module
    base: nn.Module
    parameter: str

    @property
    def own(self) -> bool:
        """Whether it is laneway's."""
        return isinstance(self.module, LoRALinear | LoRAConnection)

    @property
    def kind(self) -> str:
        """``map`` for a site's projection, ``linear``, ``wrong`` (embeddings, read-outs), or ``other`` (transformers' Conv1D)."""
        if isinstance(self.base, HyperConnection):
            return "map"
        if isinstance(self.base, nn.Embedding | StreamReadout):
            return "wrong"
        return "linear" if isinstance(self.base, nn.Linear) else "other"

    @property
    def merged(self) -> bool:
        """Whether the adapter is in the matrix."""
        return self.module.lora.merged if isinstance(self.module, LoRALinear | LoRAConnection) else bool(_peft(self).merged)

    @property
    def plain(self) -> bool:
        """Whether the layer's law is W + s B A: not so for DoRA and other variants of PEFT's, or factors with a bias."""
        if self.own:
            return True
        layer = _peft(self)
        return not (getattr(layer, "lora_variant", None) or any(getattr(layer, "lora_bias", {}).values()))

    def matrix(self) -> Tensor:
        """The matrix without the adapter, as far as that can be had: PEFT's merged layers keep no original."""
        if isinstance(self.module, LoRALinear | LoRAConnection):
            return self.module.original()
        found = self.base._parameters[self.parameter]
        assert found is not None
        return found

    def factors(self) -> list[Factors]:
        """A, B and scaling of each active adapter of the layer."""
        if isinstance(self.module, LoRALinear | LoRAConnection):
            lora = self.module.lora
            return [(lora.A, lora.B, lora.scaling)]
        layer, found = _peft(self), []
        for key in layer.active_adapters:
            if key in layer.lora_A:
                found.append((layer.lora_A[key].weight, layer.lora_B[key].weight, float(layer.scaling[key])))
            elif key in layer.lora_embedding_A:
                found.append((layer.lora_embedding_A[key], layer.lora_embedding_B[key], float(layer.scaling[key])))
        return found

    def parameters(self) -> list[nn.Parameter]:
        """Everything of the layer that is not its base."""
        base = {id(parameter) for parameter in self.base.parameters()}
        if isinstance(self.module, LoRALinear | LoRAConnection):
            return list(self.module.lora.parameters())
        return [parameter for parameter in self.module.parameters() if id(parameter) not in base]

    def plain_output(self, x: Tensor) -> Tensor:
        """What a linear layer gives without its adapter: [..., in] → [..., out]."""
        bias = self.base._parameters.get("bias")
        return F.linear(x, self.matrix(), bias)

    @contextmanager
    def off(self) -> Generator[None]:
        """Inside the block the layer computes its base function."""
        if self.own:
            with adapters_off(self.module):
                yield
            return
        layer = _peft(self)
        before, layer._disable_adapters = layer._disable_adapters, True  # not enable_adapters(), which changes requires_grad
        try:
            yield
        finally:
            layer._disable_adapters = before


def find_adapters(model: nn.Module) -> list[Adapter]:
    """All adapted layers in the model's order, laneway's and PEFT's."""
    found, inside = [], set()
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear | LoRAConnection):
            found.append(Adapter(name, module, module, module.adapted))
        elif hasattr(module, "lora_A") and hasattr(module, "base_layer") and hasattr(module, "active_adapters"):
            layer: Any = module
            if id(layer) in inside:
                continue
            base = layer.base_layer
            inside.add(id(base))
            parameter = getattr(layer, "parameter_name", "weight")
            found.append(Adapter(name.removeprefix("base_model.model."), layer, base, parameter))
    return found


@contextmanager
def all_off(found: list[Adapter]) -> Generator[None]:
    """Inside the block every layer computes its base function."""
    with ExitStack() as stack:
        for adapter in found:
            stack.enter_context(adapter.off())
        yield


@torch.no_grad()
def delta(factors: list[Factors], x: Tensor) -> Tensor:
    """Σ s x Aᵀ Bᵀ in the factors' dtype: what the adapters should add to the layer's output."""
    return torch.stack([s * F.linear(F.linear(x.to(a.dtype), a), b) for a, b, s in factors]).sum(0)


def _peft(adapter: Adapter) -> Any:
    return adapter.module
