"""What paths hold after a backward pass: their gradients to read and to change in place, and sums over them.

Under FSDP2 a rank holds some rows of each gradient. Sums over a path are then made over all ranks, and every element counts
once, so that each rank sees the figures of the whole path. Where gradients are whole on every rank (one process, DDP) there
is no collective. On a CPU compiled kernels make the sums in one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laneway.connections.backends import compiled_serves
from laneway.connections.kernels.cpu.gradients import Segments, path_counts, path_sums
from laneway.connections.path_parts import Part, Parts, Rows, View, part_of, rows_of
from laneway.connections.path_table import Table
from laneway.connections.paths import Path
from laneway.connections.transport import BINS, histograms
from laneway.core import InputError, LanewayError

CHUNK = 1 << 20  # numbers that are made wide at a time


class PathGradients:
    """Finds the gradients of paths after each backward pass, and sums over them.

    ``look`` first, ``release`` at last: in between it keeps the gradients alive.

    Raises:
        InputError: no path.
        LanewayError: a parameter is split otherwise than by rows (FSDP2), or over other ranks than the one before.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        if not self.paths or not all(isinstance(path, Path) for path in self.paths):
            raise InputError("paths", self.paths, "a model, or one or more of its paths")
        self.groups: list[dist.ProcessGroup] = []
        self._known: dict[nn.Parameter, Parts] | None = None
        self._found: list[tuple[Parts, Tensor]] = []
        self._views: list[View] | None = None
        self._compiled: tuple[Tensor, Tensor] | None = None
        self._latest: Table | None = None

    @property
    def sharded(self) -> bool:
        """Whether a sum takes a collective."""
        self._parts()
        return bool(self.groups)

    @property
    def share(self) -> float:
        """Ranks that hold one copy of the gradients, as a part of all ranks; a sum over all ranks is to be multiplied by it."""
        return math.prod(map(dist.get_world_size, self.groups)) / dist.get_world_size() if self.sharded else 1.0

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self.paths[0].pieces[0].parameter.device

    def look(self) -> None:
        """Find the gradients as they are now. Call it again after each backward pass: they are other tensors then."""
        self.release()
        for parameter, parts in self._parts().items():
            if (gradient := parameter.grad) is not None:
                self._found.append((parts, gradient.to_local() if isinstance(gradient, DTensor) else gradient))

    def release(self) -> None:
        """Let go of the gradients, so that their memory is free once the training loop has no more use for them."""
        self._found, self._views, self._compiled = [], None, None

    @property
    def views(self) -> list[View]:
        """What ``look`` found, path after path."""
        if self._views is None:
            found = [
                View(part.path, part.piece, data, part.offset, parts.counts)
                for parts, gradient in self._found
                for part, data in zip(parts.parts, parts.views(gradient), strict=True)
            ]
            self._views = sorted(found, key=lambda view: view.path)
        return self._views

    def of(self, path: int) -> list[View]:
        """The views of one path."""
        return [view for view in self.views if view.path == path]

    # -- sums over gradients as ``look`` found them

    def norms(self) -> Tensor:
        """The 2-norm of each path over all ranks, float64 [paths] on the host; 0 without a gradient, NaN or inf where one is."""
        squares = self.reduce(self.squares()).double().cpu()
        if odd := (~squares.isfinite()).nonzero().flatten().tolist():
            squares[odd] = self.exact(odd)
        return squares.sqrt()

    def exact(self, paths: Sequence[int]) -> Tensor:
        """Squares of a few paths' norms as they are now, over all ranks, float64 on the host; no finite gradient overflows."""
        sums = []
        for path in paths:
            parts = [part for view in self.of(path) if view.counts for part in view.data.reshape(-1).split(CHUNK)]
            zero = torch.zeros((), dtype=self._wide, device=self.device)
            sums.append(sum((part.to(self._wide).square().sum() for part in parts), zero))
        return self.reduce(torch.stack(sums)).double().cpu()

    def squares(self) -> Tensor:
        """What this rank adds to the squares of ``norms`` [paths]. Uncompiled, inf where fp32 can't hold it."""
        if (sums := self._sums()) is not None:
            return sums[0].clone()
        if not (views := self._counting()):
            return torch.zeros(len(self.paths), dtype=self._wide, device=self.device)
        norms = torch.stack(torch._foreach_norm(views, 2, dtype=_at_least_fp32(views)))
        return self._table.by_path(norms.square()).to(self._wide).sum(1)

    def peaks(self) -> Tensor:
        """The largest magnitude of each path on this rank [paths]; NaN or inf where one is."""
        if (sums := self._sums()) is not None:
            return sums[1].clone()
        if not (views := self._counting()):
            return torch.zeros(len(self.paths), dtype=self._wide, device=self.device)
        if self.device.type == "cpu":  # the norm of that order is many times slower there
            found = [torch.maximum(-low, high) for low, high in map(torch.aminmax, views)]
        else:
            found = torch._foreach_norm(views, math.inf, dtype=_at_least_fp32(views))
        return self._table.by_path(torch.stack([peak.to(self._wide) for peak in found])).amax(1)

    def counts(self, sample: int) -> Tensor:
        """How many magnitudes of each path on this rank fall into each bin of ``transport`` [paths, bins].

        Every shard takes those of its values that a sample of the whole piece has, about ``sample`` over all shards.
        """
        if (segments := self._segments()) is not None:
            return path_counts(segments, *self._table.strides(sample), len(self.paths))
        values = [
            view[first::step].to(torch.float32)
            for view, first, step in zip(self._counting(), *map(np.ndarray.tolist, self._table.strides(sample)), strict=True)
        ]
        if not values:
            return torch.zeros(len(self.paths), BINS, dtype=self._wide, device=self.device)
        return histograms(torch.cat(values), self._table.sampled(sample, self.device), len(self.paths)).to(self._wide)

    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Over the ranks that the gradients are sharded over, in place; left as it is where they are whole."""
        for group in self.groups:
            dist.all_reduce(values, op, group=group)
        return values

    # -- how

    @property
    def _wide(self) -> torch.dtype:
        """The type of sums, the same on all ranks."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    @property
    def _gradients(self) -> list[Tensor]:
        return [gradient for _, gradient in self._found]

    def _segments(self) -> Segments | None:
        """What compiled kernels read, where they serve."""
        return self._table.segments(self._gradients) if compiled_serves(self.device) else None

    def _sums(self) -> tuple[Tensor, Tensor] | None:
        """Squares and peaks by compiled kernels, once for each ``look``; None where they don't serve."""
        if self._compiled is None and (segments := self._segments()) is not None:
            self._compiled = path_sums(segments, len(self.paths))
        return self._compiled

    def _counting(self) -> list[Tensor]:
        return self._table.views(self._gradients)

    @property
    def _table(self) -> Table:
        found = [parts for parts, _ in self._found]
        if self._latest is None or not self._latest.of(found):
            self._latest = Table(found, len(self.paths))
        return self._latest

    def _parts(self) -> dict[nn.Parameter, Parts]:
        if self._known is None:
            rows = self._learn()
            parts: dict[nn.Parameter, list[Part]] = {parameter: [] for parameter in rows}
            for index, path in enumerate(self.paths):
                for piece in path.pieces:
                    if (part := part_of(index, piece, rows[piece.parameter])) is not None:
                        parts[piece.parameter].append(part)
            self._known = {p: Parts(tuple(parts[p]), here.count, here.counts) for p, here in rows.items()}
        return self._known

    def _learn(self) -> dict[nn.Parameter, Rows]:
        parameters = list(dict.fromkeys(piece.parameter for path in self.paths for piece in path.pieces))
        meshes = list(dict.fromkeys(p.device_mesh for p in parameters if isinstance(p, DTensor)))
        if len(meshes) > 1:
            raise LanewayError("paths: parameters lie on different device meshes; accepted: one mesh for all of them")
        dims: set[int] = set()
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                dims |= {dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()}
        sharded = [dim for dim in sorted(dims) if meshes[0].size(dim) > 1]
        self.groups = [meshes[0].get_group(dim) for dim in sharded]
        here = {dim: meshes[0].get_local_rank(dim) for dim in sharded}
        return {parameter: rows_of(parameter, here) for parameter in parameters}


def _at_least_fp32(gradients: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32
