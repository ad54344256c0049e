"""Devices and levels as tables, their numbers in the units that the keys name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from laneway.cluster.catalogue import DEVICES, DeviceEntry, device_entry, network
from laneway.cluster.levels import Shape, default_choice, default_links, make_level
from laneway.cluster.quantities import Quantity, keys_of, known_keys, number, read_all, scaled
from laneway.cluster.topology import Device, Level
from laneway.core import InputError, positive_int

__all__ = ["device_from_table", "device_to_table", "level_from_table", "level_to_table"]

_LEVEL = (
    Quantity("latency_s", "latency_us", -6, "latency_s"),
    Quantity("link_bandwidth", "bandwidth_GB_per_s", 9, "bandwidth_B_per_s", above=True),
    Quantity("joules_per_byte", "energy_nJ_per_byte", -9, "energy_J_per_byte"),
)
_DEVICE = (
    Quantity("memory_bytes", "memory_GB", 9, "memory_B", above=True),
    Quantity("memory_bandwidth", "memory_bandwidth_GB_per_s", 9, "memory_bandwidth_B_per_s", above=True),
)
_LEVEL_KEYS = ("name", "member", "size", "counts", "network", "links", "oversubscription", "duplex", "trusted", "source")
_DEVICE_KEYS = ("name", "teraflops", "flops", "watts", "source")
_PRECISIONS = ("fp32", "tf32", "bf16", "fp8")


def device_from_table(given: object) -> tuple[Device, DeviceEntry | None]:
    """A catalogue name, or a table with all numbers of a device; the catalogue's entry where it was a name.

    A table has `name`, `teraflops` (or `flops`: a table by precision), `memory_GB`, `memory_bandwidth_GB_per_s`, `watts`, and
    may have `source`.
    """
    if isinstance(given, str):
        entry = device_entry(given)
        return entry.device, entry
    known_keys("device", given, (*_DEVICE_KEYS, *keys_of(_DEVICE)))
    table: Mapping[str, Any] = given  # type: ignore[assignment]
    found = read_all("device", table, _DEVICE)
    for quantity in _DEVICE:
        if quantity.name not in found:
            raise InputError(f"device.{quantity.key}", None, "a number > 0")
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise InputError("device.name", name, "a name")
    watts, source = number("device.watts", table.get("watts")), _text("device.source", table.get("source", ""))
    return Device(name, _flops(table), found["memory_bytes"], found["memory_bandwidth"], watts, source), None


def _flops(table: Mapping[str, Any]) -> dict[str, float]:
    if ("flops" in table) == ("teraflops" in table):
        raise InputError("device.teraflops", table.get("teraflops"), "teraflops or flops: a table by precision, {bf16 = 312}")
    key, power = ("flops", 0) if "flops" in table else ("teraflops", 12)
    known_keys(f"device.{key}", table[key], _PRECISIONS)
    if not table[key]:
        raise InputError(f"device.{key}", table[key], f"at least one of {', '.join(_PRECISIONS)}")
    return {name: scaled(number(f"device.{key}.{name}", value, above=True), power) for name, value in table[key].items()}


def device_to_table(device: Device) -> str | dict[str, Any]:
    """The catalogue name of a device that is there as it is, else its table."""
    if device.name in DEVICES and DEVICES[device.name].device == device:
        return device.name
    tera = {name: scaled(value, -12) for name, value in device.flops.items()}
    exact = all(scaled(tera[name], 12) == value for name, value in device.flops.items())
    table: dict[str, Any] = {"name": device.name, "watts": device.watts, "source": device.source}
    table |= {"teraflops": tera} if exact else {"flops": dict(device.flops)}
    for quantity in _DEVICE:
        table |= quantity.written(getattr(device, quantity.name))
    return table


def level_from_table(table: object, field: str, entry: DeviceEntry | None, inside: Sequence[Level]) -> Level:
    """One level: the numbers that stand in its table, and for the rest those of its network.

    Args:
        table: see the head of `topology_files`.
        field: what an error names.
        entry: the device, whose usual networks serve where neither a network nor a bandwidth is given.
        inside: the levels inside this one.
    """
    known_keys(field, table, (*_LEVEL_KEYS, *keys_of(_LEVEL)))
    given: Mapping[str, Any] = table  # type: ignore[assignment]
    shape = _shape(given, field, first=not inside, second=len(inside) == 1)
    changed: dict[str, Any] = read_all(field, given, _LEVEL)
    name = _text(f"{field}.name", given.get("name", f"L{len(inside) + 1}"))
    level = _usual(given, field, name, shape, changed, entry, inside)
    for key in ("duplex", "trusted"):
        if key in given:
            if not isinstance(given[key], bool):
                raise InputError(f"{field}.{key}", given[key], "true or false")
            changed[key] = given[key]
    if "links" in given:
        changed["links"] = positive_int(f"{field}.links", given["links"])
    if "oversubscription" in given:
        changed["oversubscription"] = number(f"{field}.oversubscription", given["oversubscription"], 1)
    if "source" in given:
        changed["source"] = _text(f"{field}.source", given["source"])
    return replace(level, **changed)


def _usual(
    given: Mapping[str, Any],
    field: str,
    name: str,
    shape: Shape,
    numbers: Mapping[str, float],
    entry: DeviceEntry | None,
    inside: Sequence[Level],
) -> Level:
    """The level as its network, or the device's usual one, makes it; of one's own numbers alone where there is none."""
    if given.get("network", "custom") != "custom":
        kind = network(given["network"], f"{field}.network")
        return make_level(name, shape, kind, default_links(kind, inside))
    if "link_bandwidth" not in numbers and entry is not None and "network" not in given:
        choice = default_choice(entry, shape.member, inside)
        links = choice.links if choice.links is not None else default_links(choice.network, inside)
        return make_level(name, shape, choice.network, links)
    for quantity, key in (("link_bandwidth", "bandwidth_GB_per_s"), ("latency_s", "latency_us")):
        if quantity not in numbers:
            raise InputError(f"{field}.{key}", None, "a number, or a network of the catalogue")
    return Level(name, shape.size, numbers["latency_s"], numbers["link_bandwidth"], counts=shape.counts, member=shape.member)


def _shape(table: Mapping[str, Any], field: str, first: bool, second: bool) -> Shape:
    counts = table.get("counts")
    if counts is not None:
        if not isinstance(counts, Sequence) or isinstance(counts, str) or not counts:
            raise InputError(f"{field}.counts", counts, "a list of integers ≥ 1, one for each group")
        counts = tuple(positive_int(f"{field}.counts", count) for count in counts)
    size = positive_int(f"{field}.size", table.get("size", max(counts) if counts else None))
    return Shape(_text(f"{field}.member", table.get("member", "device" if first else "node" if second else "")), size, counts)


def _text(field: str, given: object) -> str:
    if not isinstance(given, str):
        raise InputError(field, given, "a text")
    return given


def level_to_table(level: Level) -> dict[str, Any]:
    """Every field of a level."""
    table: dict[str, Any] = {"name": level.name, "member": level.member, "size": level.size}
    if level.counts is not None:
        table["counts"] = list(level.counts)
    table["network"] = level.network
    for quantity in _LEVEL:
        table |= quantity.written(getattr(level, quantity.name))
    for name in ("links", "oversubscription", "duplex", "trusted", "source"):
        table[name] = getattr(level, name)
    return table
