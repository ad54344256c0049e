"""Low-rank adapters (LoRA; Hu et al., arXiv 2106.09685): W + (α / r) B A, with A [r, in] and B [out, r].

An adapted layer stays the object it was: its class becomes ``LoRALinear`` (or ``LoRAConnection`` for a site's map projection
``fn``), and the two factors are its child ``lora``. So hooks, tied parameters and the names of the base's tensors in a state
dict are untouched; new names only are added, ``….lora.A``, ``….lora.B`` and ``….lora.alpha``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneway.connections.layer import HyperConnection
from laneway.connections.parameters import WIDE
from laneway.core import InputError, LanewayError, nearest, positive_int


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

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.scaling = float(self.alpha) / self.A.shape[0]


class _Adapted(nn.Module):
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

    def _load_from_state_dict(self, state_dict: Any, prefix: str, meta: Any, strict: bool, missing: Any, extra: Any, errors: Any):
        if self.lora.merged and prefix + self.adapted in state_dict:
            errors.append(f"{prefix}{self.adapted}: its adapter is merged, so another base would be lost at unmerge; unmerge first")
            return
        super()._load_from_state_dict(state_dict, prefix, meta, strict, missing, extra, errors)


class LoRALinear(_Adapted, nn.Linear):
    """``nn.Linear`` with an adapter: x Wᵀ + b + (α / r) x Aᵀ Bᵀ."""

    adapted = "weight"

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] → [..., out], in the dtype that the layer gave before."""
        if self.lora.merged:
            return F.linear(input, self.weight if self.lora.enabled else self.original(), self.bias)
        y = F.linear(input, self.weight, self.bias)
        return y + self.lora(input).to(y.dtype) if self.lora.enabled else y


class LoRAConnection(_Adapted, HyperConnection):
    """A site whose map projection has an adapter: φ + (α / r) B A. H_res stays on its manifold whatever the adapter is."""

    adapted = "fn"

    @property
    def fn(self) -> Tensor:  # pyrefly: ignore[bad-override]
        """The projection that the site uses."""
        if self.lora.merged and self.lora.enabled or not self.lora.enabled:
            weight = self._parameters["fn"] if self.lora.enabled else self.original()
            assert weight is not None
            return weight
        return self.original() + self.lora.delta()

    def reset_parameters(self) -> None:
        """The base's start; the adapter stays."""
        with adapters_off(self):
            super().reset_parameters()


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
        assert isinstance(module, _Adapted)
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


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside the block the model computes its base function, merged or not."""
    layers = [module for module in model.modules() if isinstance(module, _Adapted)]
    before = [layer.lora.enabled for layer in layers]
    for layer in layers:
        layer.lora.enabled = False
    try:
        yield
    finally:
        for layer, enabled in zip(layers, before, strict=True):
            layer.lora.enabled = enabled


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
    if isinstance(module, _Adapted):
        raise InputError("targets", name, "layers without an adapter", "it has one already; use another name, or remove_lora")
    site = isinstance(module, HyperConnection)
    if type(module) not in (nn.Linear, HyperConnection):
        kind = type(module).__name__
        raise InputError("targets", name, "an nn.Linear, or NAME.fn of a HyperConnection", f"it is a {kind}, whose forward is its own")
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
        raise InputError("targets", name, "layers with a matrix of their own", f"{shared[0]} shares it, and merging would change both")
