"""Four gloo ranks, forked after one import of torch: each takes on the machines of each case in turn, detects, and adds up rank
numbers within each L1 group. What each found goes into the folder that is given.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from laneway.cluster.detect import detect_topology
from laneway.cluster.identity import gather_identities
from laneway.cluster.order import verify_order

CASES = {
    "interleaved": (["node7", "node66", "node7", "node66"], None),
    "ragged": (["node66", "node7", "node7", "node7"], None),
    "in order": (["a", "a", "b", "b"], None),
    "racks": (["n1", "n2", "n10", "n9"], ["leaf0", "leaf1", "leaf0", "leaf1"]),
}


def rank_main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    dist.new_group([0])  # somebody else's group, before ours
    results = []
    for name, (machines, leaves) in CASES.items():
        os.environ |= {"NCCL_HOSTID": f"id of {machines[rank]}", "NODE_NAME": machines[rank]}
        if leaves:
            os.environ["SLURM_TOPOLOGY_ADDR"] = f"root.{leaves[rank]}.{machines[rank]}"
            os.environ["SLURM_TOPOLOGY_ADDR_PATTERN"] = "switch.switch.node"
        topology = detect_topology()
        placement = verify_order(gather_identities(), topology)
        sums = torch.zeros(4)
        for ranks in placement.groups(0):
            group = dist.new_group(list(ranks), sort_ranks=False)
            if rank in ranks:
                mine = torch.tensor([float(rank)])
                dist.all_reduce(mine, group=group)
                sums[rank] = mine[0]
        dist.all_reduce(sums)
        results.append([name, str(topology), list(topology.hosts), list(placement.order), [int(each) for each in sums]])
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(results), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(rank_main, args=(sys.argv[1],), nprocs=4, start_method="fork")
