"""Weights of a site from other libraries, and to them: names, orientation and order of rows, made explicit.

    from laneway.connections import layouts

    layout, = layouts.detect(checkpoint)
    for prefix in layouts.sites(checkpoint, layout):
        state = layouts.load_layout(checkpoint, layout, streams=4, prefix=prefix)
        site = HyperConnection(dim, 4, **layouts.site_options(layout))
        site.load_state_dict(state)

A layout whose function ours can't compute exactly is refused until every difference is accepted by name (``accept=``).
``docs/interop.md`` has the table of conventions and where each was read.

Shapes: n streams, C width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from laneway.connections.layout_kinds import DIFFERENCES, LAYOUTS, Layout, State, width
from laneway.core import InputError, choice, positive_int

OURS = ("fn", "base", "scale")


def load_layout(
    state_dict: Mapping[str, Tensor],
    layout: str,
    *,
    streams: int,
    prefix: str = "",
    accept: Iterable[str] = (),
    part: str = "site",
) -> State:
    """One site (or the read-out) of another library as the state dict of ours: new fp32 (or float64) tensors.

    Args:
        state_dict: holds the site's tensors under ``prefix``; other tensors are left alone.
        layout: laneway, transformers, deepseek-v4 (also TileKernels' arguments), megatron, megatron-untransposed, liger or
            lucidrains (mHCv2).
        streams: n.
        prefix: all that stands before the layout's own names: ``model.layers.0.attn_hc.`` (transformers),
            ``layers.0.hc_attn_`` (deepseek-v4), ``decoder.layers.0.self_attention_hyper_connection.`` (megatron). See ``sites``.
        accept: names of the differences to accept; ``differences(layout)`` says what each means.
        part: ``site`` → for ``HyperConnection``: fn [n(n+2), nC], base [n(n+2)], scale [3].
            ``head`` → for ``StreamReadout``: fn [n, nC], base [n], scale [1]; transformers' prefix ends in ``hc_head.hc_``,
            DeepSeek-V4's and Megatron's in ``hc_head_``.

    Raises:
        InputError: an unknown layout (the nearest is suggested), a missing tensor, another shape, or a difference that is not
            accepted.
    """
    kind = _kind(layout, part)
    positive_int("streams", streams)
    accepted = _accepted(accept)
    shapes = _head_shapes if part == "head" else kind.shapes
    keys = OURS if part == "head" else kind.keys
    missing = [prefix + key for key in keys if prefix + key not in state_dict]
    if missing:
        found = sites(state_dict, layout) if part == "site" else []
        hint = f"sites begin with {found[0]!r}" + (f" … {found[-1]!r}" if found[1:] else "") if found else None
        raise InputError("state_dict", f"no {', '.join(missing)}", f"{', '.join(keys)} after the prefix {prefix!r}", hint)
    tensors = {key: state_dict[prefix + key].detach() for key in keys}
    c = _head_width(tensors["fn"], streams) if part == "head" else width(tensors[keys[0]], kind, streams)
    _check(tensors, shapes(streams, c), prefix, "state_dict")
    if part == "site":
        _require(layout, (*kind.differences, *kind.more_differences(tensors)), accepted)
    wide = {key: t.to(torch.float64 if t.dtype == torch.float64 else torch.float32) for key, t in tensors.items()}
    ours = wide if part == "head" else kind.load(wide, streams)
    return {name: ours[name].clone(memory_format=torch.contiguous_format) for name in OURS}


def save_layout(
    state: Mapping[str, Tensor],
    layout: str,
    *,
    streams: int,
    prefix: str = "",
    accept: Iterable[str] = (),
    part: str = "site",
    dtype: torch.dtype | None = None,
) -> State:
    """The state dict of a site of ours (or of the read-out) in another library's layout: the inverse of ``load_layout``.

    Args:
        state: fn, base and scale, such as ``site.state_dict()``.
        layout, streams, prefix, accept, part: as for ``load_layout``.
        dtype: of the projection; None keeps ours (Liger's own default is torch.float16).

    Raises:
        InputError: as for ``load_layout``; lucidrains also where fn has weights that it has no place for.
    """
    kind = _kind(layout, part)
    positive_int("streams", streams)
    accepted = _accepted(accept)
    missing = [name for name in OURS if name not in state]
    if missing:
        raise InputError("state", f"no {', '.join(missing)}", "fn, base and scale: the state dict of one site")
    tensors = {name: state[name].detach() for name in OURS}
    ours = _head_shapes if part == "head" else LAYOUTS["laneway"].shapes
    _check(tensors, ours(streams, _head_width(tensors["fn"], streams)), "", "state")
    if part == "site":
        _require(layout, kind.differences, accepted)
    theirs = tensors if part == "head" else kind.save(tensors, streams)
    projections = ("fn",) if part == "head" else (kind.keys[0], "dynamic_beta_fn")
    result = {}
    for name, t in theirs.items():
        t = t if dtype is None or name not in projections else t.to(dtype)
        result[prefix + name] = t.clone(memory_format=torch.contiguous_format)
    return result


def detect(state_dict: Mapping[str, Tensor]) -> list[str]:
    """The layouts of which ``state_dict`` holds a site, the present one of a library first; [] for none.

    Names do not always decide: ``megatron`` and ``megatron-untransposed`` store the same tensors and mean transposed matrices.
    A checkpoint of the latter's first version is told by its unused ``norm.weight``.
    """
    return [name for name in LAYOUTS if sites(state_dict, name)]


def sites(state_dict: Mapping[str, Tensor], layout: str) -> list[str]:
    """The prefixes of all sites stored in this layout, in the order of the state dict.

    Raises:
        InputError: an unknown layout.
    """
    kind = _kind(layout, "site")
    pattern = re.compile(f"({kind.prefix}){re.escape(kind.keys[0])}")
    matches = (pattern.fullmatch(key) for key in state_dict)
    prefixes = [match.group(1) for match in matches if match]
    whole = [p for p in prefixes if all(p + key in state_dict for key in kind.keys)]
    if layout == "megatron":
        return [p for p in whole if p + "norm.weight" not in state_dict]
    return whole


def site_options(layout: str) -> dict[str, Any]:
    """Options of ``HyperConnection`` with which it computes a layout's function: cap, eps, norm_eps.

    They are the defaults of the library. ``laneway`` has none: a state dict of ours does not say with which it was trained.

    Raises:
        InputError: an unknown layout.
    """
    return dict(_kind(layout, "site").options)


def differences(layout: str) -> dict[str, str]:
    """What ours does otherwise, by name, and what it means; {} where the function is exactly the same.

    Raises:
        InputError: an unknown layout.
    """
    kind = _kind(layout, "site")
    return {name: DIFFERENCES[name] for name in kind.differences}


def _kind(layout: str, part: str) -> Layout:
    choice("part", part, ("site", "head"))
    kind = LAYOUTS[choice("layout", layout, LAYOUTS)]
    if part == "head" and not kind.head:
        heads = [name for name, other in LAYOUTS.items() if other.head]
        raise InputError("part", part, f"site: {layout} stores no learned read-out; {', '.join(heads)} do")
    return kind


def _accepted(accept: Iterable[str]) -> set[str]:
    names = [accept] if isinstance(accept, str) else list(accept)
    return {choice("accept", name, DIFFERENCES) for name in names}


def _require(layout: str, wanted: tuple[str, ...], accepted: set[str]) -> None:
    refused = [name for name in wanted if name not in accepted]
    if refused:
        meaning = "; ".join(f"{name}: {DIFFERENCES[name]}" for name in refused)
        accepts = f"{', '.join(wanted)}: {layout} does not compute what HyperConnection does"
        raise InputError("accept", ", ".join(sorted(accepted)) or "nothing", accepts, meaning)


def _check(tensors: State, shapes: dict[str, tuple[int, ...]], prefix: str, what: str) -> None:
    for key, shape in shapes.items():
        if tuple(tensors[key].shape) != shape:
            raise InputError(f"{what}.{prefix}{key}", list(tensors[key].shape), f"{list(shape)} for this number of streams")


def _head_width(fn: Tensor, streams: int) -> int:
    return max(1, fn.shape[-1] // streams) if fn.ndim else 1


def _head_shapes(n: int, c: int) -> dict[str, tuple[int, ...]]:
    return {"fn": (n, n * c), "base": (n,), "scale": (1,)}
