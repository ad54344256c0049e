"""Replicas and shards: FSDP2 on one or two axes, or DDP where nothing is sharded."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from laneway.cluster.layout import Layout
from laneway.connections import shard_connections
from laneway.memory.watch import find_blocks

__all__ = ["blocks_of", "data_parallel_kind", "own_buffers", "replicate", "shard"]


def data_parallel_kind(layout: Layout) -> str:
    """``fsdp``, ``ddp`` or ``none``. DDP knows nothing of split tensors, so with tp the replicas are FSDP2's too."""
    if layout.dp_shard > 1 or (layout.dp_replicate > 1 and layout.tp > 1):
        return "fsdp"
    return "ddp" if layout.dp_replicate > 1 else "none"


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, outermost."""
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, nn.ModuleList | nn.ModuleDict):
        return list(blocks.children())
    return [block for _, block in find_blocks(model)]


def shard(model: nn.Module, layout: Layout, mesh: DeviceMesh) -> None:
    """FSDP2, in place: connections first (their parameters stay fp32), then each block, then what is left at the root.

    ``zero=3`` frees the gathered parameters after each block's forward, 1 and 2 keep them for the backward pass.
    """
    # FSDP2 warns of in-place changes to a view that a module returned; ours are returned by ops and never changed in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    over = mesh["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else mesh["dp_shard"]
    low = torch.bfloat16 if layout.precision == "bf16" else torch.float32
    reduce = torch.bfloat16 if layout.grad_bytes == 2 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce)
    again = layout.zero == 3
    shard_connections(model, over, reshard_after_forward=again)
    for block in blocks_of(model):
        fully_shard(block, mesh=over, mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mesh=over, mp_policy=policy, reshard_after_forward=again)


def replicate(model: nn.Module, layout: Layout, mesh: DeviceMesh, device: torch.device) -> DistributedDataParallel:
    """DDP over dp_replicate; ``grad_bytes=2`` sends bf16, ``overlap_grads=False`` one bucket after the backward pass."""
    options: dict[str, Any] = {}
    if not layout.overlap_grads:
        options["bucket_cap_mb"] = 1 + sum(p.numel() * p.element_size() for p in model.parameters()) // 2**20
    group = mesh.get_group("dp_replicate")
    devices = None if device.type == "cpu" else [device.index]
    ddp = DistributedDataParallel(
        model, device_ids=devices, process_group=group, gradient_as_bucket_view=True, **own_buffers(), **options
    )
    if layout.grad_bytes == 2:
        ddp.register_comm_hook(group, _bf16_mean)
    return ddp


def _bf16_mean(group, bucket):  # DDP reads annotations as types, so none as text
    """Mean over the group in bf16. (torch's own hook for this refuses gloo.)"""
    whole = bucket.buffer()
    sent = (whole / group.size()).to(torch.bfloat16)
    work = dist.all_reduce(sent, group=group, async_op=True)
    return work.get_future().then(lambda _: whole.copy_(sent))


def own_buffers() -> dict[str, Any]:
    """DDP's option to leave buffers alone (ours are tables that every rank computes alike), by its name in this torch."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
