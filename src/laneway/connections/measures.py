"""What a consistency check measures, one function a measure. Formulas, limits and their sources: docs/lora.md."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laneway.connections.adapters import Adapter
from laneway.connections.layer import HyperConnection
from laneway.connections.parameters import WIDE, WideParameters, connections
from laneway.connections.picture import Camera, Picture, SiteState

DOUBLY_STOCHASTIC = ("sinkhorn", "birkhoff", "kronecker", "identity")
MAD = 1.4826  # median absolute deviation → standard deviation of a normal distribution


@dataclass(frozen=True)
class Limits:
    """What is accepted; one value for all layers, none depends on the kind of mistake."""

    rounding: float = 16.0
    """Base output against its reference in one process: relative difference, in units of the output dtype's epsilon."""
    carried: float = 1e-4
    """The same against a record from another process, whose sums may run in another order."""
    law: float = 1e-5
    """Adapted output against W x + s B A x: relative difference, over 4 epsilons of the output's dtype."""
    scaling: float = 64.0
    """α / r. Published fine-tunes lie between a fraction of one and 32."""
    rows: float = 1e-4
    """|log of a row sum of H_res|: rows are divided last, so only rounding is left."""
    columns: float = 0.1
    """|log of a column sum of H_res|, or twice what the base had: columns are as far as the iterations got."""
    contribution: float = 3.0
    """Median over tokens of |adapter's part| / |base output|."""
    logits: float = 8.0
    """The same for a map: median over tokens of the largest shift of a logit, at which a sigmoid is all but closed."""
    drift: float = 4.0
    """Shift of a stream's RMS, mean or similarity, in deviations over the base's tokens."""


@dataclass(frozen=True)
class Observation:
    """One measured value that is not accepted."""

    layer: str
    measure: str
    value: float | str
    accepted: str


def structure(
    model: nn.Module, found: list[Adapter], ties: list[list[tuple[nn.Module, str]]], training: bool, limits: Limits
) -> Iterator[Observation]:
    """What can be read off without a forward pass: what trains, what is shared, what can't learn."""
    own = {id(p) for adapter in found for p in adapter.parameters()}
    for name, parameter in model.named_parameters():
        if training and parameter.requires_grad and id(parameter) not in own:
            yield Observation(name, "trainable", "a base parameter requires gradients", "adapters only")
    tied = {id(m._parameters[key]) for group in ties for m, key in group}
    for group in ties:
        if len({id(module._parameters[key]) for module, key in group}) > 1:
            yield Observation(
                _name(model, group[-1][0]), "tied", "its matrix was another layer's too, now it is not", "ties kept"
            )
    seen: dict[int, str] = {}
    for adapter in found:
        yield from _adapter_structure(adapter, training, seen, limits)
        if id(adapter.base._parameters.get(adapter.parameter)) in tied:
            yield Observation(
                adapter.name, "tied", "another layer uses its matrix, and merging would change both", "untied matrices"
            )


def _adapter_structure(adapter: Adapter, training: bool, seen: dict[int, str], limits: Limits) -> Iterator[Observation]:
    name = adapter.name
    if adapter.kind == "wrong":
        yield Observation(name, "target", type(adapter.base).__name__, "linear layers and maps of sites")
    if training and not adapter.merged and not all(p.requires_grad for p in adapter.parameters()):
        yield Observation(name, "trainable", "a factor is frozen", "factors that require gradients")
    for a, b, scaling in adapter.factors():
        for factor in (a, b):
            other = seen.setdefault(factor.data_ptr(), name)
            if other != name:
                yield Observation(name, "shared", f"a factor is also that of {other}", "factors of its own")
        if not 0 < scaling <= limits.scaling:
            yield Observation(name, "scaling", scaling, f"0 < α / r ≤ {limits.scaling:g}")
        if not torch.isfinite(torch.stack([a.sum(), b.sum()])).all():
            yield Observation(name, "finite", "a factor is not", "finite factors")
        elif not a.any() and not b.any():
            yield Observation(name, "dead", "both factors are zero, and so is every gradient", "A ≠ 0")


def dtypes(model: nn.Module) -> Iterator[Observation]:
    """Parameters of maps that are narrower than fp32."""
    for module in connections(model):
        for key, parameter in WideParameters.named_parameters(module, recurse=False):
            if parameter.dtype not in WIDE:
                yield Observation(_name(model, module), "dtype", f"{key} is {parameter.dtype}", "float32 or float64")


def same_outputs(now: Picture, then: Picture, limit: float | None, rounding: float, measure: str) -> Iterator[Observation]:
    """The first output, in order of execution, that is not what it was. ``limit`` None: ``rounding`` epsilons of its dtype."""
    for name, reference in then.outputs.items():
        layer = name.partition(":")[0] or "the model's output"
        if name not in now.outputs:
            yield Observation(layer, measure, "no longer runs", "the layers of the base")
            return
        here = now.outputs[name]
        if here.dtype != reference.dtype:
            yield Observation(layer, measure, f"output in {here.dtype}", reference.dtype)
            return
        accepted = rounding * torch.finfo(_dtype(reference.dtype)).eps if limit is None else limit
        if (difference := here.difference(reference)) > accepted:
            yield Observation(layer, measure, difference, f"a relative difference ≤ {accepted:.1g}")
            return


def maps(camera: Camera, now: Picture, then: Picture, limits: Limits) -> Iterator[Observation]:
    """The constraint of every site, and that all of it is finite."""
    sites = {name: module for name, module in camera.layers if isinstance(module, HyperConnection)}
    for key, state in now.sites.items():
        name = key.partition("#")[0]
        site = sites[name]
        if state.finite:
            yield Observation(name, "finite", f"{state.finite} is not", "finite streams and maps")
        if state.dtype not in map(str, WIDE):
            yield Observation(name, "dtype", f"H_res is {state.dtype}", "float32 or float64")
        if site.manifold in DOUBLY_STOCHASTIC and not state.finite:
            yield from _sums(name, state, then.sites.get(key), limits)
        if site.manifold == "orthogonal" and not state.orthogonal <= limits.rows:
            yield Observation(name, "orthogonal", state.orthogonal, f"|H Hᵀ − I| ≤ {limits.rows:g}")


def _sums(name: str, state: SiteState, before: SiteState | None, limits: Limits) -> Iterator[Observation]:
    columns = max(limits.columns, 2 * before.columns if before else 0.0)
    for measure, value, accepted in (("rows", state.rows, limits.rows), ("columns", state.columns, columns)):
        if not value <= accepted:
            yield Observation(name, measure, value, f"|log of a sum of H_res| ≤ {accepted:.2g}")


def drift(now: Picture, then: Picture) -> Iterator[tuple[str, str, float]]:
    """(site, rms | mean | similarity, shift of the median over tokens in deviations of the base; the largest stream counts)."""
    floors = {"log_rms": 0.05, "mean": 0.02, "similarity": 0.05}  # a deviation below these is taken for these
    for key, before in then.sites.items():
        if (state := now.sites.get(key)) is None or state.log_rms.shape != before.log_rms.shape or not len(before.log_rms):
            continue
        for measure, floor in floors.items():
            yield key, measure.removeprefix("log_"), _shift(getattr(state, measure), getattr(before, measure), floor)


def _shift(now: Tensor, then: Tensor, floor: float) -> float:
    middle = then.median(0).values
    deviation = (MAD * (then - middle).abs().median(0).values).clamp_min(floor)
    shift = ((now.median(0).values - middle).abs() / deviation).max().item()
    return shift if math.isfinite(shift) else math.inf


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name.removeprefix("torch."))


def _name(model: nn.Module, module: nn.Module) -> str:
    return next((name for name, m in model.named_modules() if m is module), type(module).__name__)
