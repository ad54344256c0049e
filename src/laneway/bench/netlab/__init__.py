"""A network of several hosts on one Linux machine, to test and time distributed code on.

    from laneway.bench import netlab

    def body(context, n):                      # at the top of an importable module; runs on every rank, in its host's namespace
        context.start_gloo(seconds=30)         # RANK, WORLD_SIZE, MASTER_ADDR … are set; gloo goes over the lab's links
        x = torch.ones(n)
        dist.all_reduce(x)                     # the first call connects
        timed = context.timed(lambda: dist.all_reduce(x))
        return timed.seconds, timed.nbytes["rack0.up"]

    results = netlab.run(body, netlab.Network(), {"n": 1 << 20}, timeout=60)        # one a rank
    netlab.Network.grid(racks=2, hosts=2, ranks=2, host_mbit=600, rack_mbit=150, order="spread")
    netlab.Network(((2, 2), (2, 1)), rates={"rack1.up": 50})                        # ragged; one direction slower

A host is a network namespace, a rack a bridge, and every link has a rate of its own each way (`Network`). What a body gets is a
`Context`: rank, world, rack, host, local, positions; ``barrier``, ``gather``, ``start`` and ``timed``, which put no byte on the
links; ``counters``; and the control of the network, from any rank and any thread: ``set_rate("rack1", 15)``, ``set_link("r0h1",
False)``, ``kill``, ``stop``, ``resume`` and the same for hosts. Ranks that a test kills are named in ``may_die``; `Ended` is
then their result. A rank that raises or hangs ends the lab with `RankFailed` or `TimeLimit`, which hold tracebacks, output and
stacks. Traffic between racks passes the uplinks of both: to make a path faster, change both.

`run_torchrun` starts torchrun instead, one agent per host, with a static or a c10d rendezvous; its workers have
``Context.attach()`` for the same context, ``report`` for results, and ``kill_host`` and ``start_host`` for agents.

torch is imported once in a process that labs are forked from, and stays for the next lab: the first takes seconds, the others
less than one. Everything, processes and devices, lives in namespaces which end with the lab, with an error, with the time
limit, and with this process even where that is killed; nothing is ever made in the machine's own network. Needs root or user
namespaces, and iproute2; otherwise `available` and `run` raise `Unavailable`.

Rates are exact, and so are byte counts. There is no delay but that of scheduling, and ranks of one host share a processor:
times of small messages and inside a host say little.
"""

from __future__ import annotations

from laneway.bench.netlab.client import available, run, shutdown
from laneway.bench.netlab.context import Context, Timed
from laneway.bench.netlab.errors import Ended, LabError, RankFailed, TimeLimit, Unavailable
from laneway.bench.netlab.network import Network, host_name
from laneway.bench.netlab.torchrun import TorchrunResult, run_torchrun

__all__ = [
    "Context",
    "Ended",
    "LabError",
    "Network",
    "RankFailed",
    "TimeLimit",
    "Timed",
    "TorchrunResult",
    "Unavailable",
    "available",
    "host_name",
    "run",
    "run_torchrun",
    "shutdown",
]
