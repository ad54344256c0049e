"""Time of a reduction on a network that was measured: what one transfer of a level takes with all ranks at it, and what numbers
cost on the way.

A phase of a hierarchy takes its level's start, its bytes at the level's rate, and the work of rounding and adding. Phases of one
vector follow each other. Pieces of a vector are on different levels at once: the first one takes all its phases, each further one
the time of what is busiest, a link (everything that leaves a host also passes its link, whatever level it is for), or the
processors. The flat collective has a curve of its own.

`laneway.cluster.probe` measures; nothing here needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, log2
from pathlib import Path
from typing import Any

from laneway.cluster.costs.curves import Curve
from laneway.cluster.reduce.scheme import LevelScheme, ReductionScheme
from laneway.core import InputError

__all__ = ["WIRE_SHARE", "MeasuredNetwork", "Phase", "phases", "predict"]

WIRE_SHARE = {"fp32": 1.0, "bf16": 0.5, "int8": (128 + 4) / 512}
"""Bytes on the wire over those of fp32; int8 has a scale for each block of 128."""
WORK = ("add", "bf16_encode", "bf16_decode", "int8_encode", "int8_decode")


@dataclass(frozen=True)
class MeasuredNetwork:
    """What was measured, all ranks at work at once.

    Attributes:
        names: of the levels, innermost first.
        sizes: members of a group of each level.
        levels: by level: seconds in which every rank exchanges so many bytes with its group (bytes that one rank sends).
        flat: seconds of a flat all-reduce of a vector of so many bytes.
        work: seconds per fp32 byte of adding and of each conversion, keys `WORK`.
        dropping: by "share/wire": seconds of the outermost level's exchange of a part of so many fp32 bytes.

    Raises:
        InputError: levels, sizes and names of different lengths.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    levels: tuple[Curve, ...]
    flat: Curve
    work: dict[str, float] = field(default_factory=dict)
    dropping: dict[str, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.sizes) == len(self.levels) > 0:
            raise InputError("levels", len(self.levels), f"one curve and one size for each of the {len(self.names)} levels")

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "names": list(self.names),
            "sizes": list(self.sizes),
            "levels": [curve.to_dict() for curve in self.levels],
            "flat": self.flat.to_dict(),
            "work": self.work,
            "dropping": {key: curve.to_dict() for key, curve in self.dropping.items()},
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> MeasuredNetwork:
        """Undo of `to_dict`.

        Raises:
            InputError: something else.
        """
        try:
            levels = tuple(Curve.from_dict(each) for each in given["levels"])
            dropping = {key: Curve.from_dict(each) for key, each in given["dropping"].items()}
            flat, work = Curve.from_dict(given["flat"]), {key: float(value) for key, value in given["work"].items()}
            return cls(tuple(given["names"]), tuple(map(int, given["sizes"])), levels, flat, work, dropping)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError("measured", type(given).__name__, "what to_dict gave") from error

    def save(self, path: str | Path) -> None:
        """Write JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1), "utf-8")

    @classmethod
    def load(cls, path: str | Path) -> MeasuredNetwork:
        """Read what `save` wrote.

        Raises:
            InputError: no such file, or something else in it.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text("utf-8")))
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError("measured", str(path), "a file that MeasuredNetwork.save wrote", str(error)) from error


@dataclass(frozen=True)
class Phase:
    """One level's part of a piece's way.

    Attributes:
        level: its index.
        messages: transfers one after the other.
        nbytes: that a rank sends in all of them, on average over the ranks.
        work: seconds of the processors.
        seconds: in all, when it runs alone.
    """

    level: int
    messages: int
    nbytes: float
    work: float
    seconds: float


def predict(network: MeasuredNetwork, scheme: ReductionScheme, nbytes: float) -> float:
    """Seconds of an all-reduce of `nbytes` of fp32.

    Raises:
        InputError: a scheme of other levels than the network's, or one that drops a share that was not measured.
    """
    if scheme.flat:
        return network.flat.seconds(nbytes)
    pieces = max(1, int(nbytes // scheme.chunk_bytes)) if scheme.chunk_bytes else 1
    steps = phases(network, scheme, nbytes / pieces)
    total = sum(step.seconds for step in steps)
    if pieces == 1:
        return total
    busiest = max(max(step.seconds for step in steps), sum(step.work for step in steps))
    for level, curve in enumerate(network.levels):
        through = sum(step.nbytes for step in steps if step.level >= level)
        busiest = max(busiest, curve.per_byte * through)
    return total + (pieces - 1) * busiest


def phases(network: MeasuredNetwork, scheme: ReductionScheme, nbytes: float) -> list[Phase]:
    """The phases of one piece: up, the turn, down.

    Raises:
        InputError: as `predict`.
    """
    if len(scheme.levels) != len(network.names):
        raise InputError("scheme.levels", len(scheme.levels), f"{len(network.names)} levels, as the network has")
    up, down, left, acting = [], [], float(nbytes), 1.0
    top = len(network.names) - 1
    for level, part in enumerate(scheme.levels[:-1]):
        size = network.sizes[level]
        if size > 1:
            up.append(_leg(network, level, part, left, acting, "up"))
            down.insert(0, _leg(network, level, part, left, acting, "down"))
        if part.algorithm == "tree":  # one member of each group goes on, with the whole vector
            acting /= size
        else:
            left /= size
    return [*up, *_turn(network, top, scheme.levels[-1], left, acting), *down]


def _turn(network: MeasuredNetwork, level: int, part: LevelScheme, nbytes: float, acting: float) -> list[Phase]:
    """The outermost level: both ways."""
    size = network.sizes[level]
    if size == 1:
        return []
    if part.drop:
        key = f"{part.drop:g}/{part.wire}"
        if key not in network.dropping:
            raise InputError("scheme.drop", key, f"a share and wire that was measured: {', '.join(network.dropping) or 'none'}")
        seconds = network.dropping[key].seconds(nbytes * acting)
        return [Phase(level, 2, 0.0, 0.0, seconds)]
    if size == 2 and part.algorithm in ("all_to_all", "native"):  # one exchange of everything, summed on both
        sent = nbytes * WIRE_SHARE[part.wire]
        work = _work(network, part.wire, nbytes, nbytes, nbytes)
        return [Phase(level, 1, sent * acting, work, network.levels[level].seconds(sent * acting) + work)]
    return [_leg(network, level, part, nbytes, acting, way) for way in ("up", "down")]


def _leg(network: MeasuredNetwork, level: int, part: LevelScheme, nbytes: float, acting: float, way: str) -> Phase:
    """One way over one level, at which that share of the ranks is at work: the links have so much less to carry at once."""
    size, curve = network.sizes[level], network.levels[level]
    direct = part.algorithm in ("all_to_all", "native")
    wire = part.wire if direct or way == "down" else "fp32"
    if part.algorithm == "tree":
        messages, each = ceil(log2(size)), nbytes * WIRE_SHARE[wire]
        sent = messages * each
    else:
        sent = nbytes * (size - 1) / size * WIRE_SHARE[wire]
        messages = 1 if direct else sum(count - 1 for count in part.dims or (size,))
        each = sent / messages
    moved = sent / WIRE_SHARE[wire]
    work = _work(network, wire, moved, moved, moved) if way == "up" else _work(network, wire, nbytes / size, moved, 0.0)
    return Phase(level, messages, sent * acting, work, messages * curve.seconds(each * acting) + work)


def _work(network: MeasuredNetwork, wire: str, encoded: float, decoded: float, added: float) -> float:
    """Seconds of rounding, widening and adding so many fp32 bytes."""
    cost = network.work
    work = added * cost.get("add", 0.0)
    if wire != "fp32":
        work += encoded * cost.get(f"{wire}_encode", 0.0) + decoded * cost.get(f"{wire}_decode", 0.0)
    return work
