"""How other libraries store one site, and what of it reaches ours. ``layouts.py`` is the interface.

Ours: fn [n(n+2), nC] with the rows pre (n), post (n), res (n², [in, out]); base [n(n+2)]; scale [3]. Rows of H_res sum to one
last. Every kind below says how it differs; a difference that no choice of our options takes away has a name, and the caller
must accept it by that name.

Shapes: n streams, C width, m = n(n+2) maps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from laneway.core import InputError

State = dict[str, Tensor]

DIFFERENCES = {
    "sinkhorn_order": "its Sinkhorn ends with the columns of H_res, ours with the rows: the same only as far as both converged",
    "norm_eps": "its norm divides by RMS(x) + ε, ours by √(RMS(x)² + ε): relatively about ε / RMS(x)",
    "eps": "its ε (1e-6) is inside Sinkhorn and not in H_pre; ours is in both or, as imported, in neither",
    "stream_norm": "it normalises every stream by itself, we all of them together: the same only where all streams have one RMS",
    "norm_weight": "the weight of its norm is multiplied into the projection; an export can't take it out again",
}


@dataclass(frozen=True)
class Layout:
    """One way of storing a site.

    Args:
        keys: names of its tensors after the prefix; the first is the projection, by which sites are found.
        shapes: (n, C) → the shape of each.
        load, save: their tensors → ours, and back.
        prefix: regular expression of the prefixes under which its sites are found.
        options: of ``HyperConnection``, with which ours computes its function.
        differences: names that always have to be accepted.
        unused: tensors that may be there and have no effect.
        head: whether it has a learned read-out, stored as fn [n, nC], base [n], scale [1].
    """

    keys: tuple[str, ...]
    shapes: Callable[[int, int], dict[str, tuple[int, ...]]]
    load: Callable[[State, int], State]
    save: Callable[[State, int], State]
    prefix: str
    options: dict[str, Any]
    differences: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    head: bool = False
    more_differences: Callable[[State], tuple[str, ...]] = field(default=lambda state: ())


def width(projection: Tensor, layout: Layout, n: int) -> int:
    """C, from the projection's own shape: its largest dim is nC or, where a stream has its own, C."""
    largest = max(projection.shape) if projection.ndim else 0
    for c in (largest // n, largest):
        if layout.shapes(n, c)[layout.keys[0]] == tuple(projection.shape):
            return c
    return max(1, largest // n)


# --- laneway, transformers, DeepSeek-V4 (and TileKernels, whose functions take the same three tensors)


def _same_shapes(n: int, c: int) -> dict[str, tuple[int, ...]]:
    m = n * (n + 2)
    return {"fn": (m, n * c), "base": (m,), "scale": (3,)}


def _same(prefix: str, **options: Any) -> Layout:
    return Layout(("fn", "base", "scale"), _same_shapes, lambda t, n: dict(t), lambda t, n: dict(t), prefix, options, head=True)


V4_OPTIONS = {"cap": None, "eps": 1e-6, "norm_eps": 1e-6}


# --- Megatron-Core and Liger: three scalars for the scale


def _scalars(t: State) -> Tensor:
    return torch.stack([t[f"alpha_{part}"].reshape(()) for part in ("pre", "post", "res")])


def _split_scale(scale: Tensor, shape: tuple[int, ...]) -> State:
    return {f"alpha_{part}": scale[i].reshape(shape) for i, part in enumerate(("pre", "post", "res"))}


def turn(rows: Tensor, n: int) -> Tensor:
    """The last n² of dim 0 from [out, in] to [in, out], or back: what is before them stays."""
    res = rows[2 * n :].unflatten(0, (n, n)).transpose(0, 1).flatten(0, 1)
    return torch.cat([rows[: 2 * n], res])


def _megatron_shapes(n: int, c: int) -> dict[str, tuple[int, ...]]:
    m = n * (n + 2)
    return {"mapping_proj.weight": (m, n * c), "bias": (m,), "alpha_pre": (1,), "alpha_post": (1,), "alpha_res": (1,)}


def _megatron_load(t: State, n: int) -> State:
    return {"fn": t["mapping_proj.weight"], "base": t["bias"], "scale": _scalars(t)}


def _megatron_save(t: State, n: int) -> State:
    return {"mapping_proj.weight": t["fn"], "bias": t["base"], **_split_scale(t["scale"], (1,))}


def _turned_load(t: State, n: int) -> State:
    ours = _megatron_load(t, n)
    return ours | {"fn": turn(ours["fn"], n), "base": turn(ours["base"], n)}


def _turned_save(t: State, n: int) -> State:
    return _megatron_save(t | {"fn": turn(t["fn"], n), "base": turn(t["base"], n)}, n)


def _liger_shapes(n: int, c: int) -> dict[str, tuple[int, ...]]:
    m = n * (n + 2)
    return {"phi": (n * c, m), "b": (m,), "alpha_pre": (), "alpha_post": (), "alpha_res": ()}


def _liger_load(t: State, n: int) -> State:
    return {"fn": turn(t["phi"].t(), n), "base": turn(t["b"], n), "scale": _scalars(t)}


def _liger_save(t: State, n: int) -> State:
    return {"phi": turn(t["fn"], n).t(), "b": turn(t["base"], n), **_split_scale(t["scale"], ())}


# --- lucidrains' mHCv2: every stream has its own norm and one shared projection [C → pre, res out …] and [C → post]


def _lucid_shapes(n: int, c: int) -> dict[str, tuple[int, ...]]:
    return {
        "dynamic_alpha_fn": (1, c, n + 1),
        "static_alpha": (n, n + 1),
        "pre_branch_scale": (1,),
        "residual_scale": (1,),
        "dynamic_beta_fn": (c, 1),
        "static_beta": (n, 1, 1),
        "h_post_scale": (),
        "norm.gamma": (c,),
    }


def _lucid_load(t: State, n: int) -> State:
    """One block of fn for each stream: what stream j projects is its own map's logits alone."""
    weight = t["dynamic_alpha_fn"][0].t()  # [pre, res → 0 … n−1], C
    weight = torch.cat([weight[:1], t["dynamic_beta_fn"].t(), weight[1:]]) * (1 + t["norm.gamma"])
    c = weight.shape[1]
    fn = weight.new_zeros(n * (n + 2), n, c)
    for j in range(n):
        fn[_rows(n, j), j] = weight
    pre, res = t["static_alpha"][:, 0], t["static_alpha"][:, 1:]
    base = torch.cat([pre, t["static_beta"].flatten(), res.flatten()])
    scale = torch.stack([t[name].reshape(()) for name in ("pre_branch_scale", "h_post_scale", "residual_scale")])
    return {"fn": fn.flatten(1), "base": base, "scale": scale}


def _rows(n: int, j: int) -> list[int]:
    """Rows of fn that belong to stream j: pre, post, and res from j to every stream."""
    return [j, n + j, *range(2 * n + j * n, 2 * n + (j + 1) * n)]


def _lucid_save(t: State, n: int) -> State:
    fn = t["fn"].unflatten(1, (n, -1))
    weight = fn[_rows(n, 0), 0]
    rebuilt = torch.zeros_like(fn)
    for j in range(n):
        rebuilt[_rows(n, j), j] = weight
    if not torch.equal(rebuilt, fn):
        accepted = "a projection in which all streams share one block, and none reads another's"
        raise InputError("state.fn", "rows that differ by stream or read several", accepted, "lucidrains has no place for it")
    pre, post, res = t["base"].split([n, n, n * n])
    scale = t["scale"]
    return {
        "dynamic_alpha_fn": torch.cat([weight[:1], weight[2:]]).t()[None],
        "static_alpha": torch.cat([pre[:, None], res.view(n, n)], dim=1),
        "pre_branch_scale": scale[0:1],
        "residual_scale": scale[2:3],
        "dynamic_beta_fn": weight[1:2].t(),
        "static_beta": post.view(n, 1, 1),
        "h_post_scale": scale[1].reshape(()),
        "norm.gamma": weight.new_zeros(weight.shape[1]),
    }


def _lucid_gamma(t: State) -> tuple[str, ...]:
    return ("norm_weight",) if t["norm.gamma"].any() else ()


MEGATRON_KEYS = ("mapping_proj.weight", "bias", "alpha_pre", "alpha_post", "alpha_res")
LIGER_KEYS = ("phi", "b", "alpha_pre", "alpha_post", "alpha_res")
ANY = r"(?:.*\.)?"

LAYOUTS: dict[str, Layout] = {
    "laneway": _same(ANY + r"(?<!attn_hc\.)(?<!ffn_hc\.)"),
    "transformers": _same(ANY + r"(?:attn_hc|ffn_hc)\.", **V4_OPTIONS),
    "deepseek-v4": _same(ANY + r"hc_(?:attn|ffn)_", **V4_OPTIONS),
    "megatron": Layout(
        MEGATRON_KEYS, _megatron_shapes, _megatron_load, _megatron_save, ANY, V4_OPTIONS, ("norm_eps",), head=True
    ),
    "megatron-untransposed": Layout(
        MEGATRON_KEYS,
        _megatron_shapes,
        _turned_load,
        _turned_save,
        ANY,
        {"cap": None, "eps": 0.0, "norm_eps": 1e-6},
        ("sinkhorn_order", "norm_eps"),
        ("norm.weight",),
    ),
    "liger": Layout(
        LIGER_KEYS, _liger_shapes, _liger_load, _liger_save, ANY,
        {"cap": None, "eps": 0.0, "norm_eps": 1e-6}, ("sinkhorn_order", "eps"),
    ),
    "lucidrains": Layout(
        tuple(_lucid_shapes(1, 1)), _lucid_shapes, _lucid_load, _lucid_save, ANY,
        {"cap": None, "eps": 0.0, "norm_eps": 0.0}, ("sinkhorn_order", "stream_norm"), more_differences=_lucid_gamma,
    ),
}  # fmt: skip
