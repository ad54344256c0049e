"""What the memory manager did in a run, as the report sees it: ``memory.json`` read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from laneway.report.series import Curve
from laneway.rundir import RunDirectory, number

CHOICES = ("keep", "move", "recompute")


@dataclass(frozen=True)
class Life:
    """A saved tensor: its size, what the plan does with it, and the events at which it is saved, first used and freed."""

    name: str
    nbytes: float
    choice: str
    save: int
    use: int
    free: int


@dataclass(frozen=True)
class Plan:
    """A plan of one shape of pass. Bytes and seconds; NaN for a figure that is missing.

    Attributes:
        counts: tensors and bytes of each choice.
        times, unmanaged_times: of the points of the traces; a trace's point holds until the next.
        trace, unmanaged_trace: bytes on the device, as planned and with everything kept.
    """

    shape: str
    reason: str
    feasible: bool
    overhead: float
    beta: float
    budget: float
    predicted_peak: float
    unmanaged_peak: float
    counts: dict[str, tuple[float, float]]
    blocks: list[str]
    lives: list[Life]
    times: np.ndarray
    trace: np.ndarray
    unmanaged_times: np.ndarray
    unmanaged_trace: np.ndarray


@dataclass(frozen=True)
class Memory:
    """The manager's account of a run; ``tier`` and ``passes`` as they were written."""

    budget: float
    capacity: float
    policy: str
    tier: dict[str, Any]
    replanned: float
    plans: list[Plan]
    passes: list[dict[str, Any]]

    @classmethod
    def of(cls, data: dict[str, Any]) -> Memory:
        """From the file's content.

        Raises:
            ValueError: a part is not what it should be; the message says which.
        """
        passes = _list(data, "passes")
        for at, row in enumerate(passes):
            if not number(_is(dict, row, f"passes[{at}]").get("pass")) >= 0:
                raise ValueError(f"passes[{at}].pass is no number of a pass")
        return cls(
            budget=number(data.get("budget")),
            capacity=number(data.get("capacity")),
            policy=str(data.get("policy", "")),
            tier=_is(dict, data.get("tier"), "tier"),
            replanned=number(data.get("replanned")),
            plans=[_plan(_is(dict, plan, f"plans[{at}]"), f"plans[{at}].") for at, plan in enumerate(_list(data, "plans"))],
            passes=passes,
        )

    def curve(self, key: str) -> Curve:
        """A figure of the passes, over their numbers."""
        rows = sorted(self.passes, key=lambda row: number(row["pass"]))
        return Curve(*(np.array([number(row.get(name)) for row in rows], dtype=float) for name in ("pass", key)))

    def ways(self, way: str) -> list[float]:
        """Numbers of the passes that went this way: recorded, planned or strayed."""
        return [number(row["pass"]) for row in self.passes if row.get("way") == way]


def read_memory(directory: RunDirectory) -> tuple[Memory | None, str]:
    """The manager's account of a run, None where there is none; and what is wrong with the file, empty where nothing is."""
    data = directory.read_memory()
    if data is None:
        return None, f"{directory.memory.name} is no JSON object" if directory.memory.is_file() else ""
    try:
        return Memory.of(data), ""
    except ValueError as error:
        return None, f"{directory.memory.name}: {error}"


def _plan(data: dict[str, Any], where: str) -> Plan:
    counts = _is(dict, data.get("counts"), where + "counts")
    times, trace = _trace(data, "trace", where)
    unmanaged_times, unmanaged_trace = _trace(data, "unmanaged_trace", where)
    return Plan(
        shape=str(data.get("shape", "")),
        reason=str(data.get("reason", "")),
        feasible=data.get("feasible") is True,
        **{
            key: number(data.get(key))
            for key in ("overhead", "beta", "budget", "predicted_peak", "unmanaged_peak")
        },
        counts={name: _count(_is(dict, counts.get(name), f"{where}counts.{name}")) for name in CHOICES},
        blocks=[str(name) for name in _list(data, "checkpointed_blocks", where)],
        lives=[
            _life(_is(dict, entry, f"{where}entries[{at}]"), f"{where}entries[{at}]")
            for at, entry in enumerate(_list(data, "entries", where))
        ],
        times=times,
        trace=trace,
        unmanaged_times=unmanaged_times,
        unmanaged_trace=unmanaged_trace,
    )  # fmt: skip


def _count(data: dict[str, Any]) -> tuple[float, float]:
    return number(data.get("entries")), number(data.get("nbytes"))


def _life(data: dict[str, Any], where: str) -> Life:
    nbytes = number(data.get("nbytes"))
    if not nbytes >= 0:
        raise ValueError(f"{where}.nbytes is no number of bytes")
    if data.get("choice") not in CHOICES:
        raise ValueError(f"{where}.choice is none of {', '.join(CHOICES)}")
    events = [event for key in ("save", "use", "free") if isinstance(event := data.get(key), int) and event >= -1]
    if len(events) < 3:
        raise ValueError(f"{where}: save, use and free are not all events")
    return Life(str(data.get("name", "")), nbytes, data["choice"], *events)


def _trace(data: dict[str, Any], key: str, where: str) -> tuple[np.ndarray, np.ndarray]:
    points = _list(data, key, where)
    for at, point in enumerate(points):
        if not (isinstance(point, list) and len(point) == 2 and all(number(value) >= 0 for value in point)):
            raise ValueError(f"{where}{key}[{at}] is no pair of seconds and bytes")
    found = np.array([[number(value) for value in point] for point in points], dtype=float).reshape(-1, 2)
    if (np.diff(found[:, 0]) < 0).any():
        raise ValueError(f"{where}{key}: time goes back")
    return found[:, 0], found[:, 1]


def _list(data: dict[str, Any], key: str, where: str = "") -> list[Any]:
    return _is(list, data.get(key), where + key)


def _is(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{where} is {'missing' if value is None else 'damaged'}")
    return value
