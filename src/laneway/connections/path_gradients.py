"""What paths hold after a backward pass: their gradients to read and to change in place, and sums over them.

Under FSDP2 a rank holds some rows of each gradient. Sums over a path are then made over all ranks, and every element counts
once, so that each rank sees the figures of the whole path. Where gradients are whole on every rank (one process, DDP) there
is no collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from laneway.connections.paths import Path, Piece
from laneway.core import InputError, LanewayError


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
        self.views: list[View] = []
        self._rows: dict[nn.Parameter, Rows] | None = None
        self._table: tuple[tuple[int, ...], Tensor] | None = None
        self._owners: tuple[tuple[tuple[int, ...], tuple[int, ...]], Tensor] | None = None

    @property
    def sharded(self) -> bool:
        """Whether a sum takes a collective."""
        self._known()
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
        known = self._known()
        whole: dict[nn.Parameter, Tensor] = {}
        self.views = []
        for index, path in enumerate(self.paths):
            for piece in path.pieces:
                parameter, rows = piece.parameter, known[piece.parameter]
                if (gradient := parameter.grad) is None:
                    continue
                if parameter not in whole:
                    whole[parameter] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                start, stop = max(piece.start - rows.first, 0), min(piece.stop - rows.first, rows.count)
                if stop <= start:
                    continue
                data = whole[parameter] if (start, stop) == (0, rows.count) else whole[parameter][start:stop]
                offset = (rows.first + start - piece.start) * piece.width
                self.views.append(View(index, piece, data, offset, rows.counts))

    def of(self, path: int) -> list[View]:
        """The views of one path."""
        return [view for view in self.views if view.path == path]

    def norms(self) -> Tensor:
        """The 2-norm of each path, fp32 [paths]; 0 without a gradient, NaN or inf where one is or the square overflows."""
        return self.reduce(self.squares()).sqrt()

    def squares(self) -> Tensor:
        """What this rank adds to the squares of ``norms``."""
        return self._per_view(2.0).square().sum(1)

    def peaks(self) -> Tensor:
        """The largest magnitude of each path on this rank, fp32 [paths]; NaN or inf where one is."""
        return self._per_view(math.inf).amax(1)

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

    def _per_view(self, order: float) -> Tensor:
        """A norm of every view that counts, [paths, most views of a path], zero where there is none."""
        views = [view for view in self.views if view.counts]
        none = torch.zeros(1, device=self.device)
        if not views:
            return none.expand(len(self.paths), 1).clone()
        wide = any(view.data.dtype == torch.float64 for view in views)
        norms = torch._foreach_norm([view.data for view in views], order, dtype=torch.float64 if wide else torch.float32)
        # By index and in a fixed order: a scattered sum may differ in its last bits between two ranks.
        return torch.cat([torch.stack(norms).float(), none])[self._places(tuple(view.path for view in views))]

    def _places(self, owners: tuple[int, ...]) -> Tensor:
        if self._table is None or self._table[0] != owners:
            of_path: list[list[int]] = [[] for _ in self.paths]
            for place, path in enumerate(owners):
                of_path[path].append(place)
            width = max(map(len, of_path))
            padded = [places + [len(owners)] * (width - len(places)) for places in of_path]
            self._table = owners, torch.tensor(padded, device=self.device)
        return self._table[1]

    def _known(self) -> dict[nn.Parameter, Rows]:
        if self._rows is None:
            self._rows = self._learn()
        return self._rows

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
