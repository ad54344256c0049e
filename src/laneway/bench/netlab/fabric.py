"""The network itself: namespaces, bridges, veth pairs and token buckets, built and changed with ``ip`` and ``tc``.

It is made in the network namespace of the caller, which becomes the switch; the caller must be in mount and network namespaces
of its own. A rate is a token bucket (tc-tbf) at the sending end. Its burst is small, because it is credit that a link hands out
after a pause; its queue holds more than all TCP windows together, so that nothing is dropped and byte counts are exact.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from laneway.bench.netlab import kernel
from laneway.bench.netlab.errors import LabError, Unavailable
from laneway.bench.netlab.network import Network, check_rate, host_name

__all__ = ["Fabric", "namespace_of"]

GSO = 16384
LEAST_BURST = 2 * GSO
BURST_S = 1e-4
WINDOW = 1 << 20
LEAST_QUEUE = 16 << 20
SYSCTLS = {
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv4/tcp_limit_output_bytes": "262144",
    "net/ipv4/tcp_wmem": f"4096 {WINDOW} {WINDOW}",
    "net/ipv4/tcp_rmem": f"4096 {4 * WINDOW} {4 * WINDOW}",
    "net/ipv4/tcp_congestion_control": "reno",
}
"""Of every host; one that the kernel has not is left alone."""
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
Device = tuple[str, str]


def namespace_of(rack: int, host: int) -> str:
    """Path of a host's network namespace."""
    return f"/run/netns/{host_name(rack, host)}"


class Fabric:
    """A network, from `build` on.

    Args:
        network: its shape and rates.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.tools = {name: _tool(name) for name in ("ip", "tc")}

    def build(self) -> None:
        """Make it all.

        Raises:
            OSError: the kernel refuses; LabError: ``ip`` or ``tc`` does.
        """
        kernel.private_mounts()
        kernel.mount("tmpfs", "/run", "tmpfs")
        with contextlib.suppress(OSError):  # where it can't be mounted anew, the outer one serves
            kernel.mount("proc", "/proc", "proc")
        os.mkdir("/run/netns")
        _sysctl("net/ipv6/conf/all/disable_ipv6", "1")
        _sysctl("net/ipv6/conf/default/disable_ipv6", "1")
        self._namespaces()
        self._run("ip", "", self._switches())
        for place in self.network.hosts:
            name = host_name(*place)
            address = self.network.address(*place)
            self._run("ip", name, ["link set lo up", f"addr add {address}/16 dev eth0", "link set eth0 up"])
        self._shape("add", {link: self.network.rate(link) for link in self.network.links})
        Path("/run/hosts").write_text("\n".join(self._names()), "utf-8")
        kernel.bind("/run/hosts", "/etc/hosts")

    def _names(self) -> list[str]:
        """Lines of /etc/hosts; torch asks for the names of IPv4 addresses in both their forms."""
        lines = ["127.0.0.1 localhost"]
        for place in self.network.hosts:
            address, name = self.network.address(*place), host_name(*place)
            lines += [f"{address} {name}", f"::ffff:{address} {name}"]
        return [*lines, ""]

    def _namespaces(self) -> None:
        here = "/run/netns/switch"
        Path(here).touch()
        kernel.bind("/proc/self/ns/net", here)
        for place in self.network.hosts:
            kernel.unshare(kernel.NEWNET)
            path = namespace_of(*place)
            Path(path).touch()
            kernel.bind("/proc/self/ns/net", path)
            _sysctl("net/ipv6/conf/all/disable_ipv6", "1")
            for name, value in SYSCTLS.items():
                _sysctl(name, value)
        kernel.setns(here, kernel.NEWNET)

    def _switches(self) -> list[str]:
        size = f"gso_max_size {GSO}"
        bridge = "type bridge stp_state 0 mcast_snooping 0"
        lines = ["link set lo up", f"link add core {bridge}", "link set core up"]
        for rack, hosts in enumerate(self.network.shape):
            lines += [
                f"link add rack{rack} {bridge}",
                f"link set rack{rack} up",
                f"link add up{rack} {size} type veth peer name down{rack} {size}",
                f"link set up{rack} master rack{rack} up",
                f"link set down{rack} master core up",
            ]
            for name in (host_name(rack, host) for host in range(len(hosts))):
                lines.append(f"link add {name} {size} type veth peer name eth0 {size} netns {name}")
                lines.append(f"link set {name} master rack{rack} up")
        return lines

    def _device(self, direction: str) -> Device:
        """Where a direction is shaped: its namespace ("" for the switch) and device."""
        link, way = direction.split(".")
        if link.startswith("rack"):
            return "", way + link.removeprefix("rack")
        return (link, "eth0") if way == "out" else ("", link)

    def _shape(self, verb: str, rates: dict[str, float]) -> None:
        queue = max(LEAST_QUEUE, 4 * WINDOW * self.network.world)
        lines: dict[str, list[str]] = {}
        for direction, mbit in rates.items():
            namespace, device = self._device(direction)
            burst = max(LEAST_BURST, int(mbit * 1e6 / 8 * BURST_S))
            text = f"qdisc {verb} dev {device} root tbf rate {round(mbit * 1e6)}bit burst {burst} limit {queue}"
            lines.setdefault(namespace, []).append(text)
        for namespace, batch in lines.items():
            self._run("tc", namespace, batch)

    def set_rate(self, link: str, mbit: float) -> None:
        """Another rate for a link (both directions) or one direction, while traffic flows.

        Raises:
            InputError: no such link, or no rate.
        """
        self._shape("change", dict.fromkeys(self.network.directions(link), check_rate("mbit", mbit)))

    def set_link(self, link: str, up: bool) -> None:
        """Cut a link, or join it again; both directions, whichever is named. Nobody is told: packets vanish."""
        direction = self.network.directions(link)[0]
        name = direction.split(".")[0]
        device = f"up{name.removeprefix('rack')}" if name.startswith("rack") else name
        self._run("ip", "", [f"link set {device} {'up' if up else 'down'}"])

    def counters(self) -> dict[str, int]:
        """Bytes that have passed each direction of each link since it was made."""
        received, sent = _device_bytes()
        found = {}
        for direction in self.network.links:
            namespace, device = self._device(direction)
            found[direction] = received[namespace] if namespace else sent[device]
        return found

    def _run(self, tool: str, namespace: str, lines: list[str]) -> None:
        command = [self.tools[tool], *(["-n", namespace] if namespace else []), "-batch", "-"]
        done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=20, check=False)
        if done.returncode:
            said = " ".join(done.stderr.split())
            raise LabError(f"{tool}{' in ' + namespace if namespace else ''}: {said}")


def _tool(name: str) -> str:
    found = shutil.which(name, path=PATH)
    if found is None:
        raise Unavailable(f"the network lab needs `{name}` of iproute2, which is not installed")
    return found


def _sysctl(name: str, value: str) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/sys", name).write_text(value, "ascii")


def _device_bytes() -> tuple[dict[str, int], dict[str, int]]:
    """Bytes received and sent, by device of this network namespace."""
    received, sent = {}, {}
    for line in Path("/proc/self/net/dev").read_text("ascii").splitlines()[2:]:
        name, _, figures = line.partition(":")
        columns = figures.split()
        received[name.strip()], sent[name.strip()] = int(columns[0]), int(columns[8])
    return received, sent
