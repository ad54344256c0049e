"""Settings of NCCL and gloo that follow from a topology, for the user to take: a file of variables and one for NCCL's tuner.

Nothing here sets a variable. Where the user has set one, theirs stays, and the file says so. Per level, algorithm and protocol by
message size go into the table of NCCL's example tuner plugin (ext-tuner/example): a row there is for so many hosts and ranks, so
that groups inside a host, across hosts and across racks each have their own. No torch here.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from laneway.cluster.probe.tuner import TUNER_HEADER, TunerRow, tuner_rows
from laneway.cluster.topology import Level, Topology
from laneway.core import InputError
from laneway.rundir import replace_file

__all__ = ["Interfaces", "Setting", "Settings", "found_interfaces", "settings_of"]

ENV_FILE, TUNER_FILE = "network.env", "nccl_tuner.csv"
BUFFER, MOST_BUFFER = 4 * 2**20, 64 * 2**20
"""NCCL's own buffer for each channel, and the largest that is asked for: it is device memory."""
FAST_SOCKET = 12e9
"""Bytes per second from which on one thread does not fill an Ethernet link."""
INFINIBAND = ("SDR", "FDR", "EDR", "HDR", "NDR", "XDR", "IB")


@dataclass(frozen=True)
class Interfaces:
    """Names on the hosts, the same on all.

    Attributes:
        sockets: IP interfaces ("eth0").
        adapters: InfiniBand or RoCE adapters ("mlx5_0").
    """

    sockets: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """One variable.

    Attributes:
        name, value: of it.
        why: what it follows from.
        users: the value that the user has set, which stays; None: none.
    """

    name: str
    value: str
    why: str
    users: str | None = None

    def line(self) -> str:
        """For a shell: what is set where it is read stays, too."""
        if self.users is not None:
            return f"# {self.name}: yours stays, {self.users!r}; from the topology: {self.value!r}, {self.why}"
        return f'[ -n "${{{self.name}+set}}" ] || export {self.name}={shlex.quote(self.value)}  # {self.why}'


@dataclass(frozen=True)
class Settings:
    """Variables and the tuner's rows."""

    variables: tuple[Setting, ...]
    tuner: tuple[TunerRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the user has not set."""
        return {each.name: each.value for each in self.variables if each.users is None}

    @property
    def kept(self) -> tuple[Setting, ...]:
        """Those that the user has set to something else."""
        return tuple(each for each in self.variables if each.users is not None and each.users != each.value)

    def write(self, folder: str | Path) -> list[Path]:
        """Write ``network.env`` and, where there are rows, ``nccl_tuner.csv``.

        Returns: the paths.

        Raises:
            InputError: a folder that can't be written to.
        """
        at = Path(folder)
        lines = ["# Read it with `source`, on every host, before the ranks start.", *(f"# {note}" for note in self.notes)]
        files = {ENV_FILE: [*lines, *(each.line() for each in self.variables)]}
        if self.tuner:
            files[TUNER_FILE] = ["# " + TUNER_HEADER, *(row.line() for row in self.tuner)]
        try:
            at.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                replace_file(at / name, ("\n".join(content) + "\n").encode())
        except OSError as error:
            raise InputError("export_settings", str(folder), "a folder that can be written to", error.strerror) from error
        return [at / name for name in files]


def settings_of(
    topology: Topology, *, interfaces: Interfaces | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """What NCCL and gloo should know of a network.

    Args:
        topology: of the cluster.
        interfaces: names on its hosts; None: not known, and left out.
        environ: where the user's own values are; by default this process's.
    """
    environ = os.environ if environ is None else environ
    names = interfaces or Interfaces()
    outer = [level for level in topology.levels[1:] if level.size > 1]
    cpu = topology.device.name.upper().startswith("CPU")
    found: list[tuple[str, str, str]] = []
    notes = []
    if outer and names.sockets:
        found.append(("GLOO_SOCKET_IFNAME", names.sockets[0], "interface of the hosts"))
    if not cpu:
        found += _nccl(outer, names)
        notes.append(f"{TUNER_FILE} needs NCCL's example tuner plugin: NCCL_TUNER_PLUGIN and NCCL_TUNER_CONFIG_FILE name both.")
    if outer and interfaces is None:
        notes.append("Names of interfaces and adapters are not known from here: set NCCL_SOCKET_IFNAME, NCCL_IB_HCA yourself.")
    variables = tuple(Setting(name, value, why, environ.get(name)) for name, value, why in found)
    return Settings(variables, () if cpu else tuple(tuner_rows(topology)), tuple(notes))


def found_interfaces(root: str | Path = "/") -> Interfaces:
    """Names on this host: the interface of the default route, and adapters with an active port.

    Args:
        root: of the file system that is looked at.
    """
    at = Path(root)
    routes = _read(at / "proc/net/route").splitlines()[1:]
    sockets = dict.fromkeys(
        fields[0] for line in routes if len(fields := line.split()) > 7 and fields[1] == fields[7] == "00000000"
    )
    adapters = [
        adapter.name
        for adapter in sorted((at / "sys/class/infiniband").glob("*"))
        if any("ACTIVE" in _read(port) for port in adapter.glob("ports/*/state"))
    ]
    return Interfaces(tuple(sockets), tuple(adapters))


def _nccl(outer: Sequence[Level], names: Interfaces) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    if outer and names.sockets:
        found.append(("NCCL_SOCKET_IFNAME", "=" + ",".join(names.sockets), "interfaces of the hosts, by their exact names"))
    if outer and names.adapters:
        found.append(("NCCL_IB_HCA", "=" + ",".join(names.adapters), "adapters with an active port, by their exact names"))
    if outer and (longest := max(outer, key=_in_flight)) and (size := _buffer(longest)) > BUFFER:
        why = f"{longest.name}: twice what is on the way at {longest.link_bandwidth / 1e9:.3g} GB/s and {longest.latency_s:.3g} s"
        found.append(("NCCL_BUFFSIZE", str(size), why))
    if len([level for level in outer if level.network.upper().startswith(INFINIBAND)]) > 1:
        why = "several levels of InfiniBand: more queue pairs take more of the ways through the fabric"
        found.append(("NCCL_IB_QPS_PER_CONNECTION", "4", why))
    fast = [level for level in outer if "GBE" in level.network.upper() and level.link_bandwidth >= FAST_SOCKET]
    if fast:
        why = f"{fast[0].name} is {fast[0].network}: where TCP carries it, one thread does not fill it"
        found += [("NCCL_SOCKET_NTHREADS", "4", why), ("NCCL_NSOCKS_PERTHREAD", "4", why)]
    return found


def _in_flight(level: Level) -> float:
    return level.link_bandwidth * level.latency_s


def _buffer(level: Level) -> int:
    """Bytes of a buffer that keeps the level's link full: a power of two."""
    wanted = 2 * 2 * _in_flight(level)
    return min(MOST_BUFFER, max(BUFFER, 2 ** math.ceil(math.log2(max(wanted, 1)))))


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
