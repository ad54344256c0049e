"""Paths of gradients: the maps of every site and the matrices of its sub-layers.

A **path** is a named group of parameters that carries one part of the signal: H_pre, H_post or H_res of one site (their rows
of ``fn``, ``base`` and ``scale``), or one matrix of a sub-layer, through which a branch reads from or writes to the streams.
Paths of one **kind** play the same role in different layers: a kind is the name with its indices starred.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from torch import nn

from laneway.connections.control import StreamControl
from laneway.connections.layer import HyperConnection
from laneway.connections.parameters import WideParameters
from laneway.core import InputError

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module|module)\.")
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` of a parameter's first dim."""

    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many rows it has, over all ranks."""
        return self.stop - self.start

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return math.prod(self.parameter.shape[1:])

    @property
    def elements(self) -> int:
        """Numbers in it, over all ranks."""
        return self.rows * self.width


@dataclass(frozen=True)
class Path:
    """A named group of parameters. ``kind``: what its peers have in common with it."""

    name: str
    kind: str
    pieces: tuple[Piece, ...] = field(repr=False)

    @property
    def elements(self) -> int:
        """Numbers in it, over all ranks."""
        return sum(piece.elements for piece in self.pieces)


def paths_of(model: nn.Module) -> list[Path]:
    """The paths of a model, in the order of its modules; of a wrapped one (DDP, FSDP2, …) after it was wrapped.

    Three a site (``….pre``, ``….post``, ``….res``), and one for every trained matrix (two dims or more) that lies in a numbered
    block and belongs to no site (nor its control), read-out or embedding. A matrix that an embedding shares is left out too; what
    several layers share belongs to the first of them, and what is frozen to none.

    Raises:
        InputError: the model has none.
    """
    taken = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    found: list[Path] = []
    for prefix, module in model.named_modules():
        name = _WRAPPERS.sub("", f"{prefix}.").rstrip(".")
        own: list[Path] = []
        if isinstance(module, HyperConnection):
            own = _site_paths(name, module, taken)
        elif not isinstance(module, WideParameters | nn.Embedding | StreamControl):
            own = _matrices(name, module, taken)
        taken |= {id(piece.parameter) for path in own for piece in path.pieces}
        found += own
    if not found:
        raise InputError("model", type(model).__name__, "a model with hyper-connections or numbered blocks, some of it trained")
    return found


def _site_paths(name: str, site: HyperConnection, taken: set[int]) -> list[Path]:
    if site.disabled:
        return []
    n = site.streams
    rows = 1 if site.manifold == "none" else n  # of fn, for pre and for post; the maps of HC share a row among the streams
    groups = {
        "pre": (Piece(site.fn, 0, rows), Piece(site.base, 0, n), Piece(site.scale, 0, 1)),
        "post": (Piece(site.fn, rows, 2 * rows), Piece(site.base, n, 2 * n), Piece(site.scale, 1, 2)),
        "res": (Piece(site.fn, 2 * rows, site.fn.shape[0]), Piece(site.base, 2 * n, site.base.shape[0]), Piece(site.scale, 2, 3)),
    }
    own = {group: tuple(piece for piece in pieces if _own(piece, taken)) for group, pieces in groups.items() if pieces[1].rows}
    return [_path(f"{name}.{group}".lstrip("."), pieces) for group, pieces in own.items() if pieces]


def _own(piece: Piece, taken: set[int]) -> bool:
    return piece.parameter.requires_grad and id(piece.parameter) not in taken


def _matrices(name: str, module: nn.Module, taken: set[int]) -> list[Path]:
    return [
        _path(name if key == "weight" else f"{name}.{key}", (Piece(p, 0, p.shape[0]),))
        for key, p in module.named_parameters(recurse=False)
        if p.requires_grad and p.ndim >= 2 and id(p) not in taken and _INDEX.search(name)
    ]


def _path(name: str, pieces: tuple[Piece, ...]) -> Path:
    return Path(name, _INDEX.sub("*", name), pieces)
