"""A written plan as the report sees it: which axes of parallelism cross which level, and with how many bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laneway.rundir import number

AXES = ("tp", "cp", "dp_shard", "dp_replicate", "pp")  # from neighbouring ranks outwards


@dataclass(frozen=True)
class Axis:
    """A degree of parallelism: neighbours of a group are ``stride`` ranks apart."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True)
class LevelRow:
    """One level: how many groups of it there are, what one holds, what crosses it."""

    name: str
    members: int
    groups: int
    network: str
    bandwidth: float
    axes: list[Axis]
    nbytes: float


@dataclass(frozen=True)
class PlanView:
    """What the picture and its table show."""

    title: str
    device: str
    world: int
    levels: list[LevelRow]
    breakdown: dict[str, float]
    reasons: list[list[str]]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> PlanView:
        """From a written plan.

        Raises:
            ValueError: a part is missing or is not what it should be.
        """
        try:
            layout, topology, predicted = data["layout"], data["topology"], data["predicted"]
            axes = _axes(layout)
            world = math.prod(axis.size for axis in axes)
            return cls(
                title=_title(data, world),
                device=str(topology["device"]["name"]),
                world=world,
                levels=_levels(topology["levels"], axes, world, predicted.get("bytes_per_level", {})),
                breakdown={str(name): number(seconds) for name, seconds in predicted["breakdown"].items()},
                reasons=[[str(row[key]) for key in ("choice", "value", "number", "source")] for row in data.get("reasons", [])],
            )
        except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
            raise ValueError(f"no plan: {type(error).__name__} {error}") from error


def read_plan(path: Path) -> tuple[PlanView | None, str]:
    """The plan in a run directory, None where there is none; and what is wrong with the file, empty where nothing is."""
    if not path.is_file():
        return None, ""
    try:
        return PlanView.of(json.loads(path.read_text("utf-8"))), ""
    except (ValueError, RecursionError) as error:
        return None, f"{path.name}: {error}"


def _axes(layout: Mapping[str, Any]) -> list[Axis]:
    found, stride = [], 1
    for name in AXES:
        size = int(layout.get(name, 1))
        found.append(Axis(name, size, stride))
        stride *= size
    return found


def _title(data: Mapping[str, Any], world: int) -> str:
    size = number(data["model_size"])
    factor, unit = next(((f, u) for f, u in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if size >= f), (1.0, ""))
    return f"{size / factor:.4g}{unit} parameters on {world} × {data['topology']['device']['name']}"


def _levels(levels: list[Mapping[str, Any]], axes: list[Axis], world: int, sent: Mapping[str, Any]) -> list[LevelRow]:
    rows, inside = [], 1
    for level in levels:
        size = int(level["size"])
        whole = inside * size
        crossing = [axis for axis in axes if axis.size > 1 and axis.stride < whole and axis.stride * axis.size > inside]
        bandwidth = (
            number(level["link_bandwidth"]) * int(level.get("links", 1)) / inside / number(level.get("oversubscription", 1))
        )
        name, network = str(level["name"]), str(level.get("network", ""))
        rows.append(LevelRow(name, size, -(-world // whole), network, bandwidth, crossing, number(sent.get(name, 0.0))))
        inside = whole
    return rows[::-1]
