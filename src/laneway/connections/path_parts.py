"""What a rank holds of the paths: rows of their parameters, and the parts of a gradient that belong to each path."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from laneway.connections.paths import Piece
from laneway.core import LanewayError


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

    @property
    def size(self) -> int:
        """Numbers in it."""
        return (self.stop - self.start) * self.piece.width

    def stride(self, sample: int) -> int:
        """Distance of the values that a sample of the whole piece takes: no divisor of the width, to meet all columns."""
        step = max(-(-self.piece.elements // sample), 1)
        while step > 1 and math.gcd(step, self.piece.width) > 1:
            step += 1
        return step


@dataclass(frozen=True)
class Parts:
    """All parts of one parameter. ``counts``: whether this rank adds them to a sum."""

    parts: tuple[Part, ...]
    rows: int
    counts: bool

    def views(self, gradient: Tensor) -> list[Tensor]:
        """The gradient's parts."""
        return [gradient if part.stop - part.start == self.rows else gradient[part.start : part.stop] for part in self.parts]


def part_of(path: int, piece: Piece, rows: Rows) -> Part | None:
    """What this rank has of a piece; None: nothing."""
    start, stop = max(piece.start - rows.first, 0), min(piece.stop - rows.first, rows.count)
    offset = (rows.first + start - piece.start) * piece.width
    return Part(path, piece, start, stop, offset) if stop > start else None


def rows_of(parameter: nn.Parameter, here: dict[int, int]) -> Rows:
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
