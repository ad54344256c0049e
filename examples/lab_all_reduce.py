"""An all-reduce on a network of two racks of two hosts, made on this machine: time, and bytes on each link.

    python examples/lab_all_reduce.py

It needs Linux, iproute2, and root or user namespaces.
"""

from __future__ import annotations

import torch

from laneway.bench import netlab
from laneway.bench.netlab import Context, Network
from laneway.cluster.reduce.defaults import direct_scheme
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer


def body(context: Context, numbers: int) -> dict[str, int]:
    """What each rank does, in the namespace of its host; its result goes back to ``main``."""
    context.start_gloo(seconds=30)
    groups = LevelGroups.from_positions(context.positions)
    reducer = HierarchicalReducer(groups, direct_scheme(len(groups.names)))
    x = torch.full((numbers,), float(context.rank))
    reducer.all_reduce(x)  # the first call connects
    x.fill_(context.rank)
    timed = context.timed(lambda: reducer.all_reduce(x))
    assert x.eq(sum(range(context.world))).all()
    context.barrier()
    reducer.close()
    groups.close()
    return timed.nbytes


def main(numbers: int = 1 << 18) -> dict[str, int]:
    """Bytes on each direction of each link."""
    network = Network.grid(racks=2, hosts=2, ranks=2, host_mbit=600, rack_mbit=150)
    return netlab.run("lab_all_reduce:body", network, {"numbers": numbers}, timeout=60)[0]


if __name__ == "__main__":
    for link, nbytes in main().items():
        print(f"{link:12} {nbytes} bytes")
    netlab.shutdown()
