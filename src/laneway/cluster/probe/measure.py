"""Measuring a network: what one exchange of each level takes with all ranks at it, a flat all-reduce, and work on numbers.

A few seconds of small messages between two steps, or before the first. What comes out predicts every scheme at every size
(`laneway.cluster.costs.measured`) and chooses one for each (`laneway.cluster.costs.sized`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from laneway.cluster.costs.curves import Curve
from laneway.cluster.costs.measured import MeasuredNetwork
from laneway.cluster.reduce.exchange import Link
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.wire import Bfloat16, Codec, Int8
from laneway.core import positive_int

__all__ = ["SIZES", "measure"]

SIZES = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 19, 1 << 20, 1 << 22)
"""Bytes of the messages: up to 4 MB."""
WORK_BYTES = 1 << 20
CODECS: dict[str, Codec] = {"bf16": Bfloat16, "int8": Int8}
Key = tuple[str, int, int]
"""What is timed ("level", "flat", "work", "drop"), which one, bytes."""


@dataclass(frozen=True)
class _Timed:
    """One thing to time.

    Attributes:
        key: its name in the results.
        call: None where this rank takes no part.
    """

    key: Key
    call: Callable[[], object] | None


def measure(
    groups: LevelGroups,
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = 5,
    dropping: Sequence[tuple[float, str]] = (),
    device: torch.device | str = "cpu",
) -> MeasuredNetwork:
    """Measure; all ranks call it, and nothing else may be under way in the groups. The result is the same on every rank.

    Everything is timed `rounds` times in turns. A round's time is that of the slowest rank; the median of rounds counts.

    Args:
        groups: of all levels.
        sizes: bytes of messages, ascending.
        rounds: of each.
        dropping: (share, wire) whose exchange at the outermost level is timed too.
        device: where the tensors are.

    Raises:
        InputError: no rounds, or no size.
    """
    positive_int("rounds", rounds)
    positive_int("sizes", len(sizes))
    device = torch.device(device)
    todo = [*_levels(groups, sizes, device), *_flat(groups, sizes, device), *_work(device)]
    todo += _dropping(groups, sizes, dropping, device)
    for item in todo:  # connections and workspaces
        if item.call is not None:
            item.call()
    taken = torch.empty(rounds, len(todo), dtype=torch.float64)
    for turn in range(rounds):
        for index, item in enumerate(todo):
            taken[turn, index] = _seconds(groups, item, device)
    shared = taken.to(device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=groups.flat)
    medians = [statistics.median(column) for column in shared.T.tolist()]
    return _fitted(groups, {item.key: seconds for item, seconds in zip(todo, medians, strict=True)}, dropping)


def _seconds(groups: LevelGroups, item: _Timed, device: torch.device) -> float:
    """Of one call, begun together; ranks that take no part say 0."""
    dist.barrier(group=groups.flat)
    if item.call is None:
        return 0.0
    start = time.perf_counter()
    item.call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def _levels(groups: LevelGroups, sizes: Sequence[int], device: torch.device) -> list[_Timed]:
    found = []
    for level, (group, ranks) in enumerate(zip(groups.up, groups.ranks, strict=True)):
        link = Link(group, ranks, groups.rank) if group is not None else None
        for size in sizes:
            found.append(_Timed(("level", level, size), None if link is None else _exchange(link, size, device)))
    return found


def _exchange(link: Link, nbytes: int, device: torch.device) -> Callable[[], object]:
    """As much to each other member as makes `nbytes` in all, and as much from each."""
    each = max(1, nbytes // (link.size - 1))
    out = torch.zeros(each, dtype=torch.uint8, device=device)
    rows = torch.empty(link.size, each, dtype=torch.uint8, device=device)
    sends = [(peer, out) for peer in link.peers()]
    receives = [(peer, rows[peer]) for peer in reversed(link.peers())]
    return lambda: link.exchange(sends, receives)


def _flat(groups: LevelGroups, sizes: Sequence[int], device: torch.device) -> list[_Timed]:
    def call(numbers: Tensor) -> Callable[[], object]:
        return lambda: dist.all_reduce(numbers, group=groups.flat)

    return [_Timed(("flat", 0, size), call(torch.zeros(max(1, size // 4), device=device))) for size in sizes]


def _work(device: torch.device) -> list[_Timed]:
    """Adding, rounding and widening of a megabyte of fp32, on all ranks at once."""
    count = WORK_BYTES // 4
    a, b = torch.ones(count, device=device), torch.ones(count, device=device)
    calls: list[Callable[[], object]] = [lambda: a.add_(b)]
    for codec in CODECS.values():
        message = torch.empty(codec.length(count), dtype=codec.dtype, device=device)
        codec.encode(b, message)
        calls.append(lambda codec=codec, message=message: codec.encode(b, message))
        calls.append(lambda codec=codec, message=message: codec.decode(message, b))
    return [_Timed(("work", place, WORK_BYTES), call) for place, call in enumerate(calls)]


def _dropping(
    groups: LevelGroups, sizes: Sequence[int], asked: Sequence[tuple[float, str]], device: torch.device
) -> list[_Timed]:
    """The outermost level's exchange of a part, with thresholds and residuals. (Noise, so that nothing is cheap by chance.)"""
    from laneway.cluster.drop import GradientDropper

    group, found = groups.up[-1], []
    for place, (share, wire) in enumerate(asked):
        dropper = GradientDropper(share, wire=wire)
        for size in [size for size in sizes if size >= 1 << 16]:
            numbers = torch.randn(size // 4, generator=torch.Generator().manual_seed(size)).to(device)

            def call(dropper: GradientDropper = dropper, numbers: Tensor = numbers, size: int = size) -> None:
                assert group is not None
                dropper.all_reduce(numbers.clone(), group, f"probe {size}")

            found.append(_Timed(("drop", place, size), None if group is None else call))
    return found


def _fitted(groups: LevelGroups, seconds: dict[Key, float], asked: Sequence[tuple[float, str]]) -> MeasuredNetwork:
    def curve(kind: str, place: int) -> Curve:
        samples = [(float(key[2]), value) for key, value in seconds.items() if key[:2] == (kind, place) and value > 0]
        return Curve.fit(samples) if samples else Curve(0.0, 0.0)

    names = ["add", *(f"{wire}_{way}" for wire in CODECS for way in ("encode", "decode"))]
    work = {name: seconds["work", place, WORK_BYTES] / WORK_BYTES for place, name in enumerate(names)}
    return MeasuredNetwork(
        groups.names,
        groups.sizes,
        tuple(curve("level", level) for level in range(len(groups.names))),
        curve("flat", 0),
        work,
        {f"{share:g}/{wire}": curve("drop", place) for place, (share, wire) in enumerate(asked)},
    )
