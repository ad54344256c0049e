"""Streams that are made again in the backward pass, a block of sites at a time (arXiv 2512.24880, §4.3.2 and Eq. 20).

Kept for the backward: the streams that enter a block, and of every site the sub-layer's output f, the maps and the projections
(a few dozen numbers a token). When the backward pass reaches a block it replays the block's post-mixes,
x_{k+1} = H_res x_k + H_postᵀ f_k, from the kept streams on, with the very op of the forward pass and the rounded numbers it used:
the streams are the same bit for bit. No sub-layer, projection or Sinkhorn iteration runs again. A block's streams are let go as
its sites are done with.

What is kept goes through ``save_for_backward``, each tensor once, so hooks on saved tensors (offloading) see all of it;
parameters are saved as any op saves them, so FSDP may free and gather them in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from laneway.connections import site_ops
from laneway.connections.layer import HyperConnection, Merge, WatchedMerge, crosses


class _Block:
    """The sites between two kept states. Knows the autograd nodes that hold what a replay needs, and no tensor before one."""

    def __init__(self) -> None:
        self.nodes: list[weakref.ref[Any]] = []  # node k holds f and the maps of site k, node 0 also the block's first streams
        self.unpacked: dict[int, tuple[Any, ...]] = {}
        self.cache: dict[int, Tensor] = {}

    def saved(self, index: int) -> tuple[Any, ...]:
        """The saved tensors of a node, (x or None, f, maps, …), unpacked once: hooks may fetch them from far away."""
        if index not in self.unpacked:
            node = self.nodes[index]()
            if node is None:
                raise RuntimeError(
                    "a site's saved tensors were freed before its block was recomputed; keep the whole block's graph"
                )
            self.unpacked[index] = node.saved_tensors
        return self.unpacked[index]

    def streams(self, index: int) -> Tensor:
        """x of site ``index`` of this block, […, n, C]."""
        if index not in self.cache:
            x = self.cache[0] = self.saved(0)[0]
            for k in range(index):
                _, f, maps, *_ = self.saved(k)
                x = self.cache[k + 1] = site_ops.mhc_post(x, x, f, maps)
        return self.cache[index]

    def done(self, index: int) -> None:
        """Site ``index`` was the last to need its saved tensors and the streams after it."""
        self.unpacked.pop(index, None)
        for k in [k for k in self.cache if k > index or index == 0]:
            del self.cache[k]


class Recomputation:
    """Where a chain is in its blocks of ``length`` sites."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.block, self.index = _Block(), 0

    def start(self, x: Tensor) -> _Start:
        """Enter a site with streams x: a block begins."""
        return _Start(self, x)

    def cross(self, before: Merge, f: Tensor) -> _Recomputed:
        """Enter a site after post of the one ``before``."""
        return _Recomputed(self, before, f)

    def leave(self, merge: Merge, f: Tensor) -> Tensor:
        """Post of the last site."""
        if merge.maps is None or isinstance(merge, WatchedMerge):
            return merge(f)
        return _Post.apply(self.block, self.index, merge.x, merge.carry, f, merge.maps)


@dataclass(frozen=True)
class _Start:
    plan: Recomputation
    x: Tensor

    def enter(self, site: HyperConnection, pre: Tensor | None) -> tuple[Tensor, Merge]:
        if not site.mhc:
            return site.enter(self.x, pre)
        site.require_wide(self.x)
        self.plan.block, self.plan.index = _Block(), 0
        h, maps, carry, *_, read = _Pre.apply(self.x, site.carried(self.x, pre), *site.arguments)
        return h, Merge(site, self.x, h.shape, carry, maps, read=read)


@dataclass(frozen=True)
class _Recomputed:
    plan: Recomputation
    before: Merge
    f: Tensor

    def enter(self, site: HyperConnection, pre: Tensor | None) -> tuple[Tensor, Merge]:
        plan, before = self.plan, self.before
        if site.single_pass and pre is None:
            pre = before.pre
        if not crosses(before, site):
            return _Start(plan, plan.leave(before, self.f)).enter(site, pre)
        site.require_wide()
        following = (_Block(), 0) if plan.index + 1 == plan.length else (plan.block, plan.index + 1)
        places = (plan.block, plan.index, *following)
        carried = site.carried(before.x, pre)
        y, h, maps, carry, *_, read = _Cross.apply(places, before.x, before.carry, self.f, before.maps, carried, *site.arguments)
        plan.block, plan.index = following
        return h, Merge(site, y, h.shape, carry, maps, read=read)


class _Pre(torch.autograd.Function):
    """mhc_pre at the start of a block, whose streams it and the site's post keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, carried: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
        h, maps, carry, z, r, read = site_ops.mhc_pre(x, carried, *arguments)
        ctx.options = arguments[3:]
        ctx.mark_non_differentiable(z, r)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, carried, *arguments[:3], maps, z, r)
        return h, maps, carry, z, r, read

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        gh, gmaps, gcarry, *_, read = grad_outputs
        x, carried, *parameters, maps, z, r = ctx.saved_tensors
        weights = carried if read is None else read
        gx, *grads, gcarried = site_ops.mhc_pre_backward(x, gcarry, gh, gmaps, weights, *parameters, maps, z, r, *ctx.options)
        return gx, None if carried is None else gcarried, *grads, *[None] * 4


class _Cross(torch.autograd.Function):
    """mhc_cross that keeps neither the streams it reads nor, inside a block, those it writes."""

    @staticmethod
    def forward(
        ctx: Any,
        places: Sequence[Any],
        x: Tensor,
        carry: Tensor,
        f: Tensor,
        maps: Tensor,
        carried: Tensor | None,
        *arguments: Any,
    ) -> tuple[Tensor, ...]:
        block, index, after, _ = places
        y, h, next_maps, next_carry, z, r, read = site_ops.mhc_cross(x, carry, f, maps, carried, *arguments)
        ctx.places, ctx.options = places, arguments[3:]
        ctx.mark_non_differentiable(z, r)
        ctx.set_materialize_grads(False)
        start = x if index == 0 else None
        end = y if after is not block else None  # the next block's start, which that block keeps too: the same storage
        ctx.save_for_backward(start, f, maps, end, carried, *arguments[:3], next_maps, z, r)
        block.nodes.append(weakref.ref(ctx))
        return y, h, next_maps, next_carry, z, r, read

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        gy, gh, gmaps, gnext, *_, read = grad_outputs
        block, index, after, after_index = ctx.places
        _, f, maps, end, carried, *parameters, next_maps, z, r = block.saved(index)
        x, y = block.streams(index), after.streams(after_index) if end is None else end
        g, gf, gbefore, *grads, gcarried = site_ops.mhc_cross_backward(
            gnext, gy, gh, gmaps, x, f, maps, y, carried if read is None else read, *parameters, next_maps, z, r, *ctx.options
        )
        block.done(index)
        return None, None, g, gf, gbefore, None if carried is None else gcarried, *grads, *[None] * 4


class _Post(torch.autograd.Function):
    """mhc_post that keeps no streams."""

    @staticmethod
    def forward(ctx: Any, block: _Block, index: int, x: Tensor, carry: Tensor, f: Tensor, maps: Tensor) -> Tensor:
        ctx.place = block, index
        ctx.save_for_backward(x if index == 0 else None, f, maps)
        block.nodes.append(weakref.ref(ctx))
        return site_ops.mhc_post(x, carry, f, maps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        (gy,) = grad_outputs
        block, index = ctx.place
        _, f, maps = block.saved(index)
        x, gy = block.streams(index), gy.contiguous()
        gf, gmaps = site_ops.mhc_post_backward(gy, x, f, maps)
        block.done(index)
        return None, None, None, gy, gf, gmaps
