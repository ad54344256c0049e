"""The shape of a test network: hosts in racks, the rates of their links, and which rank lives where. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from laneway.core import InputError, choice, positive_int

__all__ = ["ORDERS", "Network", "host_name"]

ORDERS = ("packed", "spread")
"""Hosts in the order of ranks: rack by rack, or one of each rack in turns."""
MOST = 200
LEAST_MBIT = 0.01
Place = tuple[int, int]


def host_name(rack: int, host: int) -> str:
    """Name of a host, which is also that of its link."""
    return f"r{rack}h{host}"


@dataclass(frozen=True)
class Network:
    """Hosts in racks. Every rack has a switch, and all switches hang on one core, each by an uplink of its own.

    A link has a name and two directions: ``r0h1`` (host 1 of rack 0) with ``r0h1.out`` and ``r0h1.in``, ``rack0`` with
    ``rack0.up`` and ``rack0.down``. Traffic between racks passes one ``.up`` and one ``.down``.

    Attributes:
        shape: ranks of each host, rack by rack: ((2, 2), (2, 1)) is two racks of two hosts, the last with one rank.
        host_mbit: rate of a host's link each way, Mbit/s.
        rack_mbit: rate of a rack's uplink each way, Mbit/s.
        rates: other rates for some links, by the name of a link or of one direction, Mbit/s.
        order: how ranks are numbered: one of `ORDERS`, or the (rack, host) of every host in turn. A host's ranks are consecutive.

    Raises:
        InputError: a value out of range.
    """

    shape: tuple[tuple[int, ...], ...] = ((2, 2), (2, 2))
    host_mbit: float = 600.0
    rack_mbit: float = 150.0
    rates: Mapping[str, float] = field(default_factory=dict)
    order: str | tuple[Place, ...] = "packed"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _shape(self.shape))
        for name in ("host_mbit", "rack_mbit"):
            check_rate(name, getattr(self, name))
        for link, rate in self.rates.items():
            self.directions(link)
            check_rate(f"rates.{link}", rate)
        if isinstance(self.order, str):
            choice("order", self.order, ORDERS)
        else:
            object.__setattr__(self, "order", tuple((rack, host) for rack, host in self.order))
            if sorted(self.order) != self._packed():
                raise InputError("order", self.order, "packed, spread, or every (rack, host) once")

    @classmethod
    def grid(
        cls,
        racks: int = 2,
        hosts: int = 2,
        ranks: int = 2,
        *,
        host_mbit: float = 600.0,
        rack_mbit: float = 150.0,
        rates: Mapping[str, float] | None = None,
        order: str | tuple[Place, ...] = "packed",
    ) -> Network:
        """``racks`` × ``hosts`` a rack × ``ranks`` a host."""
        for name, value in (("racks", racks), ("hosts", hosts), ("ranks", ranks)):
            positive_int(name, value)
        return cls(((ranks,) * hosts,) * racks, host_mbit, rack_mbit, rates or {}, order)

    def _packed(self) -> list[Place]:
        return [(rack, host) for rack, hosts in enumerate(self.shape) for host in range(len(hosts))]

    @property
    def hosts(self) -> tuple[Place, ...]:
        """(rack, host) of every host, in the order of ranks."""
        if isinstance(self.order, tuple):
            return self.order
        packed = self._packed()
        return tuple(sorted(packed, key=lambda place: place[::-1]) if self.order == "spread" else packed)

    @property
    def positions(self) -> tuple[Place, ...]:
        """(rack, host) of every rank."""
        return tuple(place for place in self.hosts for _ in range(self.shape[place[0]][place[1]]))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return sum(map(sum, self.shape))

    def local(self, rank: int) -> int:
        """The rank's place inside its host."""
        return rank - self.positions.index(self.positions[rank])

    @property
    def links(self) -> tuple[str, ...]:
        """Names of all links, in both directions: the keys of byte counts."""
        racks = [f"rack{rack}.{way}" for rack in range(len(self.shape)) for way in ("up", "down")]
        return (*racks, *(f"{host_name(*place)}.{way}" for place in self._packed() for way in ("out", "in")))

    def directions(self, link: str) -> tuple[str, ...]:
        """The directions that a name means: one, or both of a link.

        Raises:
            InputError: no such link.
        """
        found = tuple(name for name in self.links if link in (name, name.split(".")[0]))
        if not found:
            choice("link", link, [*dict.fromkeys(name.split(".")[0] for name in self.links), *self.links])
        return found

    def rate(self, direction: str) -> float:
        """Mbit/s of one direction of a link at the start."""
        link = direction.split(".")[0]
        usual = self.rack_mbit if link.startswith("rack") else self.host_mbit
        return self.rates.get(direction, self.rates.get(link, usual))

    def address(self, rack: int, host: int) -> str:
        """IPv4 address of a host."""
        return f"10.77.{rack}.{host + 10}"


def check_rate(name: str, mbit: object) -> float:
    """``mbit``, where it is a rate; otherwise raise InputError."""
    if isinstance(mbit, bool) or not isinstance(mbit, int | float) or not math.isfinite(mbit) or mbit < LEAST_MBIT:
        raise InputError(name, mbit, f"a number of Mbit/s ≥ {LEAST_MBIT}")
    return float(mbit)


def _shape(given: object) -> tuple[tuple[int, ...], ...]:
    accepted = f"for each rack (1 to {MOST}) the ranks of its hosts (1 to {MOST}), as in ((2, 2), (2, 1))"
    if not isinstance(given, list | tuple) or not 1 <= len(given) <= MOST:
        raise InputError("shape", given, accepted)
    for rack in given:
        if not isinstance(rack, list | tuple) or not 1 <= len(rack) <= MOST:
            raise InputError("shape", given, accepted)
        for ranks in rack:
            positive_int("shape", ranks)
    return tuple(map(tuple, given))
