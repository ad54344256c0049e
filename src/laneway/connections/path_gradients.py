"""What paths hold after a backward pass: their gradients to read and to change in place, and sums over them.

Under FSDP2 a rank holds some rows of each gradient. Sums over a path are then made over all ranks, and every element counts
once, so that each rank sees the figures of the whole path. Where gradients are whole on every rank (one process, DDP) there
is no collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from laneway.connections.paths import Path, Piece
from laneway.core import InputError, LanewayError

MOST_ROWS = 256  # of a parameter that is split among paths, up to which one operation takes the norm of every row


@dataclass(frozen=True)
class Rows:
    """This rank's rows of a parameter. ``counts``: whether it adds them to a sum (else another rank with the same rows does)."""

    first: int
    count: int
    counts: bool


@dataclass(frozen=True)
class View:
    """A part of one path's gradient on this rank. ``offset``: place of its first element in its whole ``piece``."""

    path: int
    piece: Piece
    data: Tensor
    offset: int
    counts: bool


@dataclass(frozen=True)
class Part:
    """Rows ``start`` to ``stop`` of a parameter on this rank, which are a path's."""

    path: int
    piece: Piece
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Parts:
    """All parts of one parameter. ``counts``: whether this rank adds them to a sum."""

    parts: tuple[Part, ...]
    rows: int
    counts: bool

    @cached_property
    def by_row(self) -> bool:
        """Whether norms are taken row by row, all parts in one operation."""
        return len(self.parts) > 1 and self.rows <= MOST_ROWS

    @cached_property
    def thin(self) -> bool:
        """Whether a row is one number, so that it is its own norm."""
        return self.by_row and self.parts[0].piece.parameter.ndim == 1

    @property
    def owners(self) -> list[int]:
        """The path of each norm that is taken; −1: of none."""
        if not self.by_row:
            return [part.path for part in self.parts]
        found = [-1] * self.rows
        for part in self.parts:
            found[part.start : part.stop] = [part.path] * (part.stop - part.start)
        return found

    def views(self, gradient: Tensor) -> list[Tensor]:
        """The gradient's parts."""
        return [gradient if part.stop - part.start == self.rows else gradient[part.start : part.stop] for part in self.parts]

    def norms(self, gradient: Tensor, order: float, dtype: torch.dtype) -> list[Tensor]:
        """The norms, each one-dimensional: as many numbers as ``owners``."""
        if self.by_row:
            return [_norm(gradient.reshape(self.rows, -1), order, dtype)]
        return [_norm(view.reshape(1, -1), order, dtype) for view in self.views(gradient)]


class PathGradients:
    """Finds the gradients of paths after each backward pass, and sums over them.

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
        self._table: tuple[tuple[int, ...], Tensor] | None = None
        self._owners: tuple[tuple[tuple[int, ...], tuple[int, ...]], Tensor] | None = None

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
        self._found, self._views = [], None
        for parameter, parts in self._parts().items():
            if (gradient := parameter.grad) is not None:
                self._found.append((parts, gradient.to_local() if isinstance(gradient, DTensor) else gradient))

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

    def norms(self) -> Tensor:
        """The 2-norm of each path, fp32 [paths]; 0 without a gradient, NaN or inf where one is or the square overflows."""
        return self.reduce(self.squares()).sqrt()

    def squares(self) -> Tensor:
        """What this rank adds to the squares of ``norms``."""
        return self._by_path(2.0).square().sum(1)

    def peaks(self) -> Tensor:
        """The largest magnitude of each path on this rank, fp32 [paths]; NaN or inf where one is."""
        return self._by_path(math.inf).amax(1)

    def owners(self, paths: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """The path of each number where ``sizes`` numbers of each of ``paths`` lie one behind the other."""
        if self._owners is None or self._owners[0] != (paths, sizes):
            found = torch.repeat_interleave(torch.tensor(paths), torch.tensor(sizes)).to(self.device)
            self._owners = (paths, sizes), found
        return self._owners[1]

    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Over the ranks that the gradients are sharded over, in place; left as it is where they are whole."""
        for group in self.groups:
            dist.all_reduce(values, op, group=group)
        return values

    def _by_path(self, order: float) -> Tensor:
        """Norms of all parts that count, or of their rows, [paths, most of them of a path], zero where there is none."""
        found = [(parts, gradient) for parts, gradient in self._found if parts.counts and parts.parts]
        none = torch.zeros(1, device=self.device)
        if not found:
            return none.expand(len(self.paths), 1).clone()
        wide = any(gradient.dtype == torch.float64 for _, gradient in found)
        dtype = torch.float64 if wide else torch.float32
        norms = [norm for parts, gradient in found if not parts.thin for norm in parts.norms(gradient, order, dtype)]
        if thin := [gradient for parts, gradient in found if parts.thin]:
            norms.append(torch.cat(thin).abs().to(dtype))
        # By index and in a fixed order: a scattered sum may differ in its last bits between two ranks.
        return torch.cat([torch.cat(norms).float(), none])[self._places(tuple(id(parts) for parts, _ in found))]

    def _places(self, found: tuple[int, ...]) -> Tensor:
        """For each path the places of its norms; the last place stands for none. ``found``: whose norms they are."""
        if self._table is None or self._table[0] != found:
            of_path: list[list[int]] = [[] for _ in self.paths]
            counting = sorted((parts for parts, _ in self._found if parts.counts), key=lambda parts: parts.thin)
            owners = [path for parts in counting for path in parts.owners]
            for place, path in enumerate(owners):
                if path >= 0:
                    of_path[path].append(place)
            width = max(map(len, of_path))
            padded = [places + [len(owners)] * (width - len(places)) for places in of_path]
            self._table = found, torch.tensor(padded, device=self.device)
        return self._table[1]

    def _parts(self) -> dict[nn.Parameter, Parts]:
        if self._known is None:
            rows = self._learn()
            parts: dict[nn.Parameter, list[Part]] = {parameter: [] for parameter in rows}
            for index, path in enumerate(self.paths):
                for piece in path.pieces:
                    if (part := _part(index, piece, rows[piece.parameter])) is not None:
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
        return {parameter: _rows(parameter, here) for parameter in parameters}


def _norm(rows: Tensor, order: float, dtype: torch.dtype) -> Tensor:
    """Of each row of a matrix; 0 of an empty one."""
    if rows.shape[1] == 0:
        return rows.new_zeros(len(rows), dtype=dtype)
    if order == math.inf:  # torch's norm of that order is many times slower on a CPU
        low, high = torch.aminmax(rows, dim=1)
        return torch.maximum(-low, high).to(dtype)
    return torch.linalg.vector_norm(rows, order, dim=1, dtype=dtype)


def _part(path: int, piece: Piece, rows: Rows) -> Part | None:
    """What this rank has of a piece; None: nothing."""
    start, stop = max(piece.start - rows.first, 0), min(piece.stop - rows.first, rows.count)
    offset = (rows.first + start - piece.start) * piece.width
    return Part(path, piece, start, stop, offset) if stop > start else None


def _rows(parameter: nn.Parameter, here: dict[int, int]) -> Rows:
    """Which rows this rank has, as torch.chunk splits them; ``here``: its place on each mesh dim that something is split over."""
    if not isinstance(parameter, DTensor):
        return Rows(0, parameter.shape[0], not any(here.values()))
    first, count, counts = 0, parameter.shape[0], True
    for dim, place in here.items():
        placement = parameter.placements[dim]
        if placement.is_replicate():
            counts &= place == 0
            continue
        if type(placement) is not Shard or placement.dim != 0:
            raise LanewayError(f"paths: a parameter is split as {parameter.placements}; accepted: by rows, as FSDP2 does")
        chunk = -(-count // parameter.device_mesh.size(dim))
        start = min(chunk * place, count)
        first, count = first + start, min(chunk, count - start)
    if parameter.to_local().shape[0] != count:
        raise LanewayError(f"paths: rank holds {parameter.to_local().shape[0]} rows; accepted: the {count} of an even split")
    return Rows(first, count, counts)
