"""Devices and networks by name. The numbers and their sources are in `devices` and `networks`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import replace

from laneway.cluster.devices import DEVICES, DeviceEntry
from laneway.cluster.networks import NETWORKS, Network, ethernet
from laneway.cluster.topology import Device
from laneway.core import InputError

__all__ = ["DEVICES", "NETWORKS", "Network", "device", "device_entry", "match_device", "network"]

_DEVICE_ALIASES = {"a100-80gb": "A100", "h100-80gb": "H100", "h100-sxm": "H100", "a100-sxm": "A100", "h200-sxm": "H200"}
_NETWORK_ALIASES = {"ndr": "NDR400", "hdr": "HDR200", "edr": "EDR100", "cloud": "WAN", "edge": "Broadband"}
_OTHER_FORMS = re.compile(r"PCIE|NVL(?!INK)|MIG|[0-9]g\.[0-9]+gb", re.IGNORECASE)
_FASTEST_ETHERNET = 3200


def device_entry(name: object, field: str = "device") -> DeviceEntry:
    """The catalogue's entry of a device, whatever the case of its name.

    Raises:
        InputError: unknown; the closest names are suggested.
    """
    found = _find(name, DEVICES, _DEVICE_ALIASES)
    if found is None:
        raise _unknown(field, name, DEVICES, "or a table with the numbers of your own")
    return DEVICES[found]


def device(name: object, field: str = "device") -> Device:
    """The device of that name, whatever its case: "H100". Raises InputError, with the closest names, where there is none."""
    return device_entry(name, field).device


def network(name: object, field: str = "network") -> Network:
    """The network of that name, whatever its case: "NDR400", or Ethernet of any rate, "50GbE".

    Raises:
        InputError: unknown (the closest names are suggested), or a rate of 0.
    """
    found = _find(name, NETWORKS, _NETWORK_ALIASES)
    if found is not None:
        return NETWORKS[found]
    rate = re.fullmatch(r"([0-9]{1,5}(?:\.[0-9]{1,3})?)GbE", name, re.IGNORECASE | re.ASCII) if isinstance(name, str) else None
    if rate is None:
        raise _unknown(field, name, NETWORKS, "or Ethernet of another rate, such as 50GbE")
    if not 0 < float(rate[1]) <= _FASTEST_ETHERNET:
        raise InputError(field, name, f"Ethernet with a bandwidth above 0 and up to {_FASTEST_ETHERNET}GbE")
    return ethernet(float(rate[1]), f"{float(rate[1]):g}GbE")


def match_device(text: str) -> Device:
    """The device that a driver, a scheduler or a label means: "NVIDIA H100 80GB HBM3", "a100", "AMD_Instinct_MI300X_OAM".

    A device that the catalogue doesn't have keeps its name, with a stand-in's numbers; its `source` says so. So do the PCIe and
    NVL forms of one that it has: their numbers are others.
    """
    words = re.sub(r"[\s_]+", " ", text).strip()
    if not _OTHER_FORMS.search(words):
        for name in sorted(DEVICES, key=len, reverse=True):
            model, _, memory = name.partition("-")
            if re.search(rf"(?<![A-Za-z0-9]){model}(?![A-Za-z0-9])", words, re.IGNORECASE) and memory.lower() in words.lower():
                return DEVICES[name].device
    stand_in = DEVICES["GPU"].device
    return replace(stand_in, name=words or stand_in.name, source=f"{words or 'GPU'} is not in the catalogue; {stand_in.source}")


def _find(name: object, names: Iterable[str], aliases: dict[str, str]) -> str | None:
    if not isinstance(name, str):
        return None
    wanted = name.lower()
    return next((each for each in names if each.lower() == wanted), aliases.get(wanted))


def _unknown(field: str, given: object, names: Iterable[str], also: str) -> InputError:
    names = list(names)
    lower = {name.lower(): name for name in names}
    close = [lower[found] for found in difflib.get_close_matches(str(given).lower()[:80], lower, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(close)}?" if close else None
    return InputError(field, given, f"one of {', '.join(names)}, {also}", hint)
