"""A plain pretrained transformer becomes one with hyper-connections, in place, and computes the same function at first.

``convert`` puts a ``HyperConnection`` in the place of every residual addition, expands the embedding to n streams before the
first layer and reads them out before the last norm. All weights stay where they are, under their names. The start is that of
docs/start.md: the same logits, and a gradient in every map. docs/convert.md tells what to expect of generation, saving, bf16.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from laneway.connections.families import Family, WideLayer, family_of, wide_class
from laneway.connections.layer import HyperConnection, StreamReadout, expand_spread, expand_streams
from laneway.connections.parameters import WideParameters
from laneway.core import InputError

Model = TypeVar("Model", bound=nn.Module)
Wide = TypeVar("Wide", bound=WideParameters)
FORMAT = 1  # of the section ``laneway`` in a converted model's config.json


@dataclass(frozen=True)
class Streams:
    """What ``convert`` was asked for; the section ``laneway`` of the model's config."""

    streams: int
    manifold: str = "sinkhorn"
    iterations: int = 20
    cap: float | None = 8.0
    eps: float = 0.0
    norm_eps: float = 1e-6

    def site(self, dim: int, index: int) -> HyperConnection:
        """The site of this index over the whole network, at its start."""
        return HyperConnection(dim, site=index, **asdict(self))

    def readout(self, dim: int) -> StreamReadout:
        """HC's streams are equal at the start and its published read-out is their sum; the mean is the plain network's X."""
        return StreamReadout(dim, self.streams, "mean" if self.manifold == "none" else "learned", norm_eps=self.norm_eps)

    @property
    def spread(self) -> float:
        """Of the expansion (see ``expand_spread``); HC copies the embedding."""
        return 0.0 if self.manifold == "none" else expand_spread(self.streams)


class Expand:
    """Pre-hook of the first layer: [B, T, C] → [B, T, n, C], however the layer is called."""

    def __init__(self, streams: int, spread: float) -> None:
        self.streams, self.spread = streams, spread

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Expand the first argument, or ``hidden_states``."""
        if args:
            return (expand_streams(args[0], self.streams, spread=self.spread), *args[1:]), kwargs
        x = expand_streams(kwargs["hidden_states"], self.streams, spread=self.spread)
        return args, {**kwargs, "hidden_states": x}


class ReadOut:
    """Pre-hook of the last norm: [B, T, n, C] → [B, T, C]. An object, not a closure: a deep copy gets its own read-out."""

    def __init__(self, readout: StreamReadout) -> None:
        self.readout = readout

    def __call__(self, norm: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Read the first argument out of its streams."""
        return (self.readout(args[0]), *args[1:])


def convert(
    model: Model,
    streams: int = 4,
    *,
    manifold: str = "sinkhorn",
    iterations: int = 20,
    cap: float | None = 8.0,
    eps: float = 0.0,
    norm_eps: float = 1e-6,
) -> Model:
    """Turn every residual addition of a plain transformer into a hyper-connection over n streams, in place.

    The new parameters are fp32 (float64 in a float64 model), on the device of their layer, and stay so under ``.to(bfloat16)``.
    Between layers, hidden states are [B, T, n, C]. ``model.config.laneway`` holds the arguments, so ``save_pretrained`` and
    ``laneway.load_converted`` are a round trip; ``laneway.unconvert`` undoes it.

    Args:
        model: a transformers model with a Llama, Mistral, Qwen2, Qwen3, GPT-2, GPT-NeoX or ViT trunk, not yet wrapped or
            compiled, with any head.
        streams: n ≥ 1.
        manifold, iterations, cap, eps, norm_eps: as in ``HyperConnection``.

    Returns:
        The same object.

    Raises:
        InputError: another family, a model already converted or with wrapped layers, or an argument out of range. The model
            is then as it was.
    """
    family, trunk = family_of(model)
    asked = Streams(streams, manifold, iterations, cap, eps, norm_eps)
    layers = plain_layers(family, trunk)
    names, dim = family.sites(trunk.config), trunk.config.hidden_size
    with torch.device("cpu"):  # real maps, also where the default device is meta
        sites = [[asked.site(dim, len(names) * i + k) for k in range(len(names))] for i in range(len(layers))]
        readout = asked.readout(dim)
    for layer, row in zip(layers, sites, strict=True):
        for name, site in zip(names, row, strict=True):
            layer.add_module(name, _beside(site, layer))
        layer.__class__ = wide_class(family)
    norm = getattr(trunk, family.norm)
    trunk.readout = readout = _beside(readout, norm)
    layers[0].register_forward_pre_hook(Expand(streams, asked.spread), with_kwargs=True)
    norm.register_forward_pre_hook(ReadOut(readout))
    _mark(model, trunk, family, asked)
    return model


def unconvert(model: Model) -> Model:
    """Make a converted model plain again, in place: its weights stay, sites and read-out go.

    Only while all maps are at their start is the plain model the same function, so otherwise this is refused: trained maps
    have no plain counterpart.

    Returns:
        The same object.

    Raises:
        InputError: the model is not converted, is dispatched by a device map, or a map has moved. It is then as it was.
    """
    family, trunk = family_of(model)
    if not is_converted(model):
        raise InputError("model", type(model).__name__, "a model that laneway.convert or laneway.load_converted gave")
    layers = list(getattr(trunk, family.layers))
    if any("forward" in vars(layer) for layer in layers) or any(p.is_meta for p in model.parameters()):
        raise InputError(
            "model", "dispatched over devices or wrapped", "a model that nothing has wrapped", "load it without a map"
        )
    moved = [name for name, module in model.named_modules() if isinstance(module, WideParameters) and not at_start(module)]
    if moved:
        accepted = "a converted model whose maps are all at their start"
        hint = "trained maps have no plain counterpart; keep the converted model"
        raise InputError("model", f"{len(moved)} with maps that have moved, first {moved[0]}", accepted, hint)
    for layer in layers:
        layer.__class__ = layer.plain
        for name in family.sites(trunk.config):
            delattr(layer, name)
    for module in (layers[0], getattr(trunk, family.norm)):
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, Expand | ReadOut):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    del trunk.readout
    _unmark(model, trunk, family)
    return model


def is_converted(model: nn.Module) -> bool:
    """Whether ``convert`` has been here."""
    return any(isinstance(module, WideLayer) for module in model.modules())


def at_start(module: WideParameters) -> bool:
    """Whether a site or read-out has exactly the parameters that ``reset_parameters`` gives."""
    fresh: Any = copy.deepcopy(module).cpu()
    with torch.device("cpu"):
        fresh.reset_parameters()
    return all(torch.equal(a.cpu(), b) for a, b in zip(module.parameters(), fresh.parameters(), strict=True))


def plain_layers(family: Family, trunk: Any) -> list[Any]:
    """The trunk's layers, checked: all of the family's own class, and none with a forward of its own."""
    layers, plain = list(getattr(trunk, family.layers)), family.type_of(family.layer)
    if not layers:
        raise InputError("model.config.num_hidden_layers", 0, "at least one layer")
    for layer in layers:
        if isinstance(layer, WideLayer):
            raise InputError("model", type(trunk).__name__, "a plain model", "it is converted already")
        if type(layer) is not plain:
            raise InputError("model", type(layer).__name__, f"layers of the class {plain.__name__}, unchanged")
        if "forward" in vars(layer):
            hint = "convert first, then dispatch or wrap; a saved one loads with laneway.load_converted(path, device_map=…)"
            raise InputError("model", f"{plain.__name__} with a wrapped forward", "layers that nothing has wrapped", hint)
    return layers


def _beside(module: Wide, neighbour: nn.Module) -> Wide:
    """``module`` on the device of ``neighbour``'s weights, in float64 where they are, in the same mode."""
    weight = next(neighbour.parameters())
    module.train(neighbour.training)
    if weight.is_meta:  # transformers is loading: the loader puts every tensor in its place
        return module
    return module.to(weight.device, torch.float64 if weight.dtype == torch.float64 else torch.float32)


def _mark(model: Any, trunk: Any, family: Family, asked: Streams) -> None:
    """Tell transformers: the config's section, layers that no device map may split, maps that loading must keep fp32."""
    for part in (model, trunk):
        part.config.laneway = {"format": FORMAT, **asdict(asked)}
        part._no_split_modules = {*(part._no_split_modules or ()), f"Wide{family.layer}"}
        part._keep_in_fp32_modules_strict = {*(part._keep_in_fp32_modules_strict or ()), *_map_names(trunk, family)}


def _unmark(model: Any, trunk: Any, family: Family) -> None:
    for part in (model, trunk):
        if hasattr(part.config, "laneway"):  # both have one config, as a rule
            del part.config.laneway
        part._no_split_modules = {*part._no_split_modules} - {f"Wide{family.layer}"}
        part._keep_in_fp32_modules_strict = {*part._keep_in_fp32_modules_strict} - _map_names(trunk, family)


def _map_names(trunk: Any, family: Family) -> set[str]:
    return {*family.sites(trunk.config), "readout"}
