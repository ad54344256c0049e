"""``accelerate_hf``: the hyper-connections of transformers' models by our ops, in place; ``restore_hf`` undoes it.

Every decoder layer, site and head keeps its object, and with it its Parameters, hooks, names and place in the tree; only its
**class** changes, to a subclass that puts our forward in front (``hf_modules.py``, ``hf_layers.py``). Why not a new module: an
optimizer, an adapter or a hook made before would go on with the old one. Why not a ``forward`` bound to the instance:
transformers puts gradient checkpointing around the forward of the *class*, which a bound one would hide. The subclass has the
name of the original, because device maps and FSDP wrapping find layers by it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

from torch import nn

from laneway.connections import hf_layers, hf_modules
from laneway.core import InputError

Model = TypeVar("Model", bound=nn.Module)

# Class in transformers.models.X.modeling_X → the mixin that goes in front of it.
LAYERS: dict[str, tuple[str, type]] = {
    "DeepseekV4DecoderLayer": ("deepseek_v4", hf_layers.DeepseekV4Layer),
    "Glm5NextTextDecoderLayer": ("glm5_next", hf_layers.Glm5NextLayer),
    "HYV4DecoderLayer": ("hy_v4", hf_layers.IndexedLayer),
    "HYV4VLDecoderLayer": ("hy_v4_vl", hf_layers.IndexedLayer),
}
SITES: dict[str, tuple[str, type]] = {
    "DeepseekV4HyperConnection": ("deepseek_v4", hf_modules.Site),
    "Glm5NextTextHyperConnection": ("glm5_next", hf_modules.Site),
    "HYV4HyperConnection": ("hy_v4", hf_modules.IndependentSite),
    "HYV4VLHyperConnection": ("hy_v4_vl", hf_modules.IndependentSite),
}
HEADS: dict[str, tuple[str, type]] = {
    "DeepseekV4HyperHead": ("deepseek_v4", hf_modules.Readout),
    "HYV4HyperHead": ("hy_v4", hf_modules.Readout),
    "HYV4VLHyperHead": ("hy_v4_vl", hf_modules.Readout),
}
KNOWN = LAYERS | SITES | HEADS
RECORD = "_laneway_original"


@dataclass(frozen=True)
class Original:
    """What ``restore_hf`` needs: the class a module had, and the names that were added to it."""

    cls: type
    attributes: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


def accelerate_hf(model: Model) -> Model:
    """Let our ops compute the hyper-connections of a transformers model. In place; returns the model.

    Works on models of the types deepseek_v4, glm5_next, hy_v4 and hy_v4_vl and on whatever contains them (a PEFT model), before
    or after weights are loaded. Names, state dict, Parameters, hooks and configuration stay as they are; outputs and gradients
    are those of the original to rounding (docs/interop.md). A second call does nothing.

    Inside, ``layer.attn_hc(x)`` then returns ``(h, merge)`` as ``HyperConnection`` does, no longer the maps. ``StreamProbe``,
    ``param_groups`` and ``shard_connections`` find the sites; for HY-V4, which has no H_res, there is nothing to probe.

    Raises:
        InputError: the model has no decoder layer of these types, or one whose forward something else has replaced.
    """
    layers = [m for m in _modules(model) if _mixin(m, LAYERS)]
    if not layers:
        raise InputError(
            "model",
            type(model).__name__,
            "a transformers model of type " + ", ".join(dict.fromkeys(kind for kind, _ in LAYERS.values())),
            "only their hyper-connections have the maps that HyperConnection computes",
        )
    # Sites elsewhere belong to code that expects transformers' return values, so only those of known layers are taken. An
    # adapter may have put wrappers and copies in between.
    inside = (m for layer in layers for name in hf_layers.Layer.SITES for m in getattr(layer, name).modules())
    sites = [m for m in inside if _mixin(m, SITES)]
    heads = [m for m in model.modules() if _mixin(m, HEADS)]
    once = dict.fromkeys((*layers, *sites, *heads))  # layers may share a site
    plans = [_plan(m) for m in once if RECORD not in m.__dict__]
    for plan in plans:  # nothing below here raises: all or nothing
        if plan is not None:
            plan.carry_out()
    return model


def restore_hf(model: Model) -> Model:
    """Undo of ``accelerate_hf``: every module gets its own class back. In place; returns the model.

    Does nothing where nothing was accelerated.

    Raises:
        InputError: something else (FSDP) has since changed the class of a module again; undo that first.
    """
    swapped = [m for m in _modules(model) if RECORD in m.__dict__]
    for module in swapped:
        if type(module) not in _MADE.values():
            accepted = "a model whose modules have the classes that accelerate_hf gave them"
            raise InputError("model", type(module).__name__, accepted, "restore it before fully_shard")
    for module in swapped:
        record: Original = module.__dict__.pop(RECORD)
        for name in record.attributes:
            del module.__dict__[name]
        for name in record.modules:
            del module._modules[name]
        module.__class__ = record.cls
        _rebind(module)
    return model


@dataclass(frozen=True)
class _Plan:
    """A module, its class to be, and what our constructor sets on a module of ours."""

    module: nn.Module
    cls: type
    attributes: dict[str, Any]
    modules: dict[str, nn.Module | None]

    def carry_out(self) -> None:
        record = Original(type(self.module), tuple(self.attributes), tuple(self.modules))
        self.module.__class__ = self.cls
        self.module.__dict__.update(self.attributes)
        self.module._modules.update(self.modules)
        self.module.__dict__[RECORD] = record
        _rebind(self.module)


def _plan(module: nn.Module) -> _Plan | None:
    """How to swap one module; None where ours would not compute the same.

    Raises:
        InputError: the module has a forward of its own that is not accelerate's hook.
    """
    own = module.__dict__.get("forward")
    if own is not None and not isinstance(own, MethodType) and "_old_forward" not in module.__dict__:
        accepted = "decoder layers with the forward of their class (or under accelerate's hooks)"
        raise InputError("model", f"{type(module).__name__} with a forward of its own", accepted, "call accelerate_hf first")
    mixin = _mixin(module, KNOWN)
    assert mixin is not None
    attributes: dict[str, Any] = {}
    modules: dict[str, nn.Module | None] = {}
    if issubclass(mixin, hf_modules.Borrowed):
        template = mixin.template(module)
        if template is None:
            return None
        attributes = {name: value for name, value in vars(template).items() if name not in module.__dict__}
        modules = {name: child for name, child in template._modules.items() if name not in module._modules}
    return _Plan(module, _made(mixin, type(module)), attributes, modules)


def _rebind(module: nn.Module) -> None:
    """Bound methods that accelerate's hooks have put on the instance point at the forward of the present class."""
    for name in ("forward", "_old_forward"):
        if isinstance(module.__dict__.get(name), MethodType):
            module.__dict__[name] = MethodType(type(module).forward, module)


_MADE: dict[tuple[type, type], type] = {}


def _made(mixin: type, cls: type) -> type:
    """The subclass of ``cls`` with our forward in front: one for each class, under the name of the original."""
    if (mixin, cls) not in _MADE:
        bases = (mixin, mixin.OURS, cls) if issubclass(mixin, hf_modules.Borrowed) else (mixin, cls)
        _MADE[mixin, cls] = type(cls.__name__, bases, {"__module__": __name__, "__qualname__": cls.__name__})
    return _MADE[mixin, cls]


def _mixin(module: nn.Module, table: dict[str, tuple[str, type]]) -> type | None:
    """The mixin for a module whose class is, or derives from, one in ``table``."""
    for cls in type(module).__mro__:
        kind, mixin = table.get(cls.__name__, (None, None))
        if kind is not None and cls.__module__ == _home(kind):
            return mixin
    return None


def _home(kind: str) -> str:
    return f"transformers.models.{kind}.modeling_{kind}"


def _modules(model: Any) -> list[nn.Module]:
    """All modules; none of what is no module."""
    return list(model.modules()) if isinstance(model, nn.Module) else []


def __getattr__(name: str) -> type:
    """A class that ``accelerate_hf`` makes, by the name under which a pickled model asks for it."""
    if name not in KNOWN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kind, mixin = KNOWN[name]
    return _made(mixin, getattr(importlib.import_module(_home(kind)), name))
