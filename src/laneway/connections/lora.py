"""Low-rank adapters (LoRA; Hu et al., arXiv 2106.09685) on linear layers and on the maps of sites: add, merge, save, load."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laneway.connections.layer import HyperConnection
from laneway.connections.lora_layers import Adapted, LoRA, LoRAConnection, LoRALinear
from laneway.core import InputError, LanewayError, nearest, positive_int


def add_lora(
    model: nn.Module, targets: str | Sequence[str], *, rank: int = 8, alpha: float = 16.0, dropout: float = 0.0
) -> list[str]:
    """Adapt layers of ``model`` in place and make the adapters its only trainable parameters.

    The function stays what it was, bit for bit: B is zero. Take a ``ConsistencyCheck`` of the model before.

    Args:
        model: any model; it stays the same object and so do its layers.
        targets: names of ``nn.Linear`` layers, whole or from a dot on (``attention.qkv``, ``blocks.0.ffn.out``); or a
            site's map projection, which must be named as such: ``site_attention.fn``.
        rank: r ≥ 1.
        alpha: α > 0; the adapter is scaled by α / r.
        dropout: of the adapter's input while training, 0 ≤ p < 1; 0 where a map is a target.

    Returns:
        The names of the adapted layers, in the model's order.

    Raises:
        InputError: a value out of range; a target that is no such layer, is adapted already, is narrower than the rank, or
            whose matrix another module uses too (merging would change that one). The model is then as it was.
    """
    positive_int("rank", rank)
    if not 0 < alpha < math.inf:
        raise InputError("alpha", alpha, "a number > 0")
    if not 0 <= dropout < 1:
        raise InputError("dropout", dropout, "a number from 0 to below 1")
    chosen = _choose(model, [targets] if isinstance(targets, str) else list(targets))
    for name, module in chosen:
        _check(name, module, rank, dropout, model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in adapters(model).values():  # from an earlier call
        module.lora.requires_grad_(True)
    for _, module in chosen:
        module.__class__ = LoRALinear if isinstance(module, nn.Linear) else LoRAConnection
        assert isinstance(module, Adapted)
        module.adapt(rank, alpha, dropout)
        module.lora.train(module.training)
    return [name for name, _ in chosen]


def adapters(model: nn.Module) -> dict[str, LoRALinear | LoRAConnection]:
    """Adapted layers by name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear | LoRAConnection)}


def merge(model: nn.Module) -> None:
    """Add every adapter into its matrix; the originals are kept until ``unmerge``. A state dict then has no adapters in it.

    Raises:
        InputError: there is none, or one is merged already.
        LanewayError: a sum is not finite. Nothing is merged then.
    """
    layers = _all(model, merged=False)
    weights = {name: layer.merged_weight() for name, layer in layers.items()}
    for name, weight in weights.items():
        if not torch.isfinite(weight).all():
            raise LanewayError(f"{name}: with its adapter the weight is not finite; nothing was merged")
    for name, layer in layers.items():
        layer.fold(weights[name])


def unmerge(model: nn.Module) -> None:
    """Undo of ``merge``: every base matrix is what it was, bit for bit. Raises InputError where one is not merged."""
    for layer in _all(model, merged=True).values():
        layer.unfold()


def remove_lora(model: nn.Module) -> None:
    """Take the adapters off; what is merged stays in the weights. Parameters stay frozen.

    Raises:
        InputError: there is none.
    """
    for layer in _all(model, None).values():
        layer.__class__ = nn.Linear if isinstance(layer, nn.Linear) else HyperConnection  # pyrefly: ignore
        del layer._modules["lora"], layer._buffers["kept"]
        layer._non_persistent_buffers_set.discard("kept")


def lora_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The adapters alone: ``NAME.lora.A``, ``.B`` and ``.alpha``, detached; merged or not."""
    names = ("A", "B", "alpha")
    return {f"{name}.lora.{key}": getattr(m.lora, key).detach() for name, m in _all(model, None).items() for key in names}


@torch.no_grad()
def load_lora_state_dict(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Undo of ``lora_state_dict`` for a model with the same targets; the scaling comes from the file.

    Raises:
        InputError: names or shapes differ, or an adapter is merged. Nothing is loaded then.
    """
    own = {key: (layer.lora, key) for key, layer in _named(_all(model, merged=False))}
    wrong = sorted(set(own) ^ set(state))
    if wrong:
        raise InputError("state", wrong[0], "exactly the adapters of this model", f"{len(wrong)} names are in one of both only")
    for key, (lora, _) in own.items():
        want = getattr(lora, key.rpartition(".")[2]).shape
        if state[key].shape != want:
            raise InputError(key, list(state[key].shape), f"{list(want)}: the same rank and width")
    for key, (lora, _) in own.items():
        getattr(lora, key.rpartition(".")[2]).copy_(state[key])
        lora.scaling = float(lora.alpha) / lora.A.shape[0]


def _named(layers: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, layer in layers.items():
        for key in ("A", "B", "alpha"):
            yield f"{name}.lora.{key}", layer


def _all(model: nn.Module, merged: bool | None) -> dict[str, LoRALinear | LoRAConnection]:
    """Every adapted layer; InputError where there is none, or one is not as wanted."""
    layers = adapters(model)
    if not layers:
        raise InputError("model", type(model).__name__, "a model with adapters", "call add_lora first")
    for name, layer in layers.items():
        if merged is not None and layer.lora.merged is not merged:
            state = "merged" if layer.lora.merged else "not merged"
            raise InputError("model", f"{name} is {state}", "adapters that are " + ("merged" if merged else "not merged"))
    return layers


def _choose(model: nn.Module, targets: list[str]) -> list[tuple[str, nn.Module]]:
    """The layers that the targets name, in the model's order."""
    known: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, HyperConnection):
            known[f"{name}.fn"] = module
        elif name and not isinstance(module, LoRA | nn.Dropout):
            known[name] = module
    if not targets:
        raise InputError("targets", targets, "at least one name of a layer")
    found: set[str] = set()
    for target in targets:
        hits = {name for name in known if name == target or name.endswith("." + target)}
        if not hits:
            ends = {name.split(".", 2)[-1] for name, m in known.items() if isinstance(m, nn.Linear | HyperConnection)}
            close = nearest(target, ends)
            accepted = "the name of a linear layer, or of a site followed by .fn"
            raise InputError("targets", target, accepted, f"did you mean {close!r}?" if close else None)
        found |= hits
    return [(name.removesuffix(".fn") if name.endswith(".fn") else name, m) for name, m in known.items() if name in found]


def _check(name: str, module: nn.Module, rank: int, dropout: float, model: nn.Module) -> None:
    """Raise InputError where a layer can't be adapted."""
    if isinstance(module, Adapted):
        raise InputError("targets", name, "layers without an adapter", "it has one already; use another name, or remove_lora")
    site = isinstance(module, HyperConnection)
    if type(module) not in (nn.Linear, HyperConnection):
        kind = type(module).__name__
        raise InputError(
            "targets", name, "an nn.Linear, or NAME.fn of a HyperConnection", f"it is a {kind}, whose forward is its own"
        )
    if site and getattr(module, "disabled", False):
        raise InputError("targets", name, "a site with maps", "this one is a plain residual without parameters")
    if site and dropout:
        raise InputError("dropout", dropout, "0 where a map is a target", "a map's adapter is added to φ and has no input")
    matrix = module._parameters["fn" if site else "weight"]
    assert matrix is not None
    if rank > min(matrix.shape):
        raise InputError("rank", rank, f"at most {min(matrix.shape)}, the smaller side of {name}")
    shared = [other for other, m in model.named_modules() if m is not module and any(p is matrix for p in m._parameters.values())]
    if shared:
        raise InputError(
            "targets", name, "layers with a matrix of their own", f"{shared[0]} shares it, and merging would change both"
        )
