"""A small GPT under DistributedDataParallel, its gradients averaged over the levels of the network.

    torchrun --nproc-per-node 4 examples/ddp_levels.py --topology 2xCPU_2nodes
    torchrun --nproc-per-node 4 examples/ddp_levels.py --topology 2xCPU_2nodes --wire bf16 --drop 0.9

The first lets four processes of one machine stand for two hosts with two ranks each. On several machines leave the topology out:
the ranks then find out who shares a host.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from laneway.cluster.drop import GradientDropper
from laneway.cluster.hooks import attach_ddp
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.cluster.reduce.scheme import FLAT, LevelScheme, ReductionScheme, SchemeTable
from laneway.cluster.topology import Topology
from laneway.models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(layers=2, dim=64, heads=2, context=32)
SEQUENCES = 4
"""Of each rank in a step."""


def make_model() -> GPT:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return GPT(CONFIG)


def make_optimizer(model: GPT) -> torch.optim.Optimizer:
    """AdamW, as usual."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def make_batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [sequences, context] of a rank: pieces of this file's own text."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    draw = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(0, len(text) - CONFIG.context, (SEQUENCES, 1), generator=draw)
    tokens = text[starts + torch.arange(CONFIG.context + 1)]
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy, nats per token."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def make_reducer(topology: str, wire: str, drop: float) -> HierarchicalReducer:
    """A reducer whose small vectors go flat, and whose large ones go over the levels."""
    groups = LevelGroups.from_topology(Topology.parse(topology)) if topology else LevelGroups.detect()
    inner = (LevelScheme(),) * (len(groups.names) - 1)
    levels = ReductionScheme((*inner, LevelScheme(wire=wire, drop=drop)), chunk_bytes=2 << 20)
    reducer = HierarchicalReducer(groups, SchemeTable(((0, FLAT), (64 << 10, levels))))
    if drop:
        reducer.dropper = GradientDropper(drop, wire=wire)
    return reducer


def main() -> None:
    """Train, and say what went over each level."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="", help="who shares a host and a rack; empty: as the ranks find themselves")
    parser.add_argument("--wire", default="fp32", help="between hosts: fp32, bf16 or int8")
    parser.add_argument("--drop", type=float, default=0.0, help="share of the entries that stays at home for a step")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()

    reducer = make_reducer(options.topology, options.wire, options.drop)
    model = make_model().to(device)
    optimizer = make_optimizer(model)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    attach_ddp(ddp, reducer)

    for step in range(1, options.steps + 1):
        inputs, targets = make_batch(rank, step)
        loss = loss_of(ddp, (inputs.to(device), targets.to(device)))
        optimizer.zero_grad()
        loss.backward()  # buckets are reduced meanwhile
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}", flush=True)

    sent = dict(zip(reducer.groups.names, reducer.sent_bytes, strict=True))
    if isinstance(reducer.dropper, GradientDropper):
        sent[reducer.groups.names[-1]] += reducer.dropper.sent_bytes
    if rank == 0:
        for name, nbytes in sent.items():
            print(f"sent over {name}: {nbytes} bytes")
    reducer.close()
    reducer.groups.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
