"""``wrap_model``: a plain model made ready to train by a layout.

In this order, each from outside of the single-device model: streams (if asked), recompute, stages (pp), split sub-layers (tp),
shards and replicas (FSDP2 or DDP) with mixed precision, memory manager. What can't be combined is refused by name first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from laneway.cluster.identity import gather_identities
from laneway.cluster.layout import Layout
from laneway.cluster.mesh import build_mesh, check_world
from laneway.cluster.order import verify_order
from laneway.cluster.topology import Topology
from laneway.core import InputError
from laneway.memory.collectives import InFlight
from laneway.memory.config import MemoryConfig
from laneway.memory.manage import manage_memory
from laneway.models.gpt import GPT
from laneway.strategy.combine import check_combination
from laneway.strategy.data_parallel import data_parallel_kind, replicate, shard
from laneway.strategy.pipelined import SCHEDULES, PipelinedModel
from laneway.strategy.recompute import apply_recompute
from laneway.strategy.sequence_parallel import sum_gradients_of_parts
from laneway.strategy.stages import GPTStage
from laneway.strategy.streams import with_streams
from laneway.strategy.tensor_parallel import apply_tensor_parallel
from laneway.strategy.wrapped import WrappedModel

__all__ = ["wrap_model"]

Memory = MemoryConfig | Callable[[nn.Module], AbstractContextManager[Any]]


def wrap_model(
    model: nn.Module,
    layout: Layout,
    *,
    topology: Topology | None = None,
    order: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    streams: int | None = None,
    manifold: str = "sinkhorn",
    memory: Memory | None = None,
    schedule: str = "1f1b",
    equal_weights: bool = True,
) -> WrappedModel | PipelinedModel:
    """Lay a model over the processes of a job. It takes the process group that exists; one process needs none.

    Every rank calls it with the same model and arguments, then trains::

        model = wrap_model(model, Layout(dp_shard=4, tp=2))
        optimizer = torch.optim.AdamW(model.param_groups(weight_decay=0.1), lr=3e-4)
        for inputs, targets in shares_of(model.data_rank, model.data_ranks):
            loss = model.step(inputs, targets)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    Without stages (pp = 1), ``model(inputs)`` and ``loss.backward()`` do as well.

    Args:
        model: this package's GPT or any module; tp needs one that gives a plan, pp a GPT. It is changed in place. On the meta
            device it stays there: ``to_empty(device=…)`` gives each rank storage for its part, then load weights.
        layout: degrees and dials.
        topology: of as many devices as the layout has. Where the ranks run is compared with it, and put right by the order of
            ranks; a difference is logged once.
        order: rank at each place of the grid (see ``build_mesh``); None: as the topology says, or rank = place without one.
        device: of the ranks' tensors; None: the accelerator of LOCAL_RANK, else the CPU.
        streams: residual streams to put into a plain model (see ``convert``); None leaves it.
        manifold: of those streams' H_res.
        memory: a configuration for ``manage_memory``, or what makes the context that passes run within.
        schedule: of pipeline stages: ``1f1b`` or ``gpipe`` (both interleaved 1F1B with ``layout.chunks`` > 1).
        equal_weights: send rank 0's weights to all ranks first; False where they are equal already.

    Returns:
        The model with ``step``, ``clip_grad_norm_``, ``param_groups`` and ``full_state_dict``.

    Raises:
        InputError: something of the layout can't be applied to this model, or not together.
        InputError: machines on which the topology fits in no order.
        LanewayError: another number of processes than the layout needs.
    """
    check_combination(model, layout, memory, schedule, SCHEDULES)
    if topology is not None and topology.world != layout.world:
        raise InputError("topology", f"{topology.world} devices", f"the layout's {layout.world}")
    check_world(layout)
    where = _device(device)
    mesh = _mesh(layout, where, _order(topology) if order is None else order)
    model = with_streams(model, streams, manifold)
    if not any(parameter.is_meta for parameter in model.parameters()):
        model = model.to(where)
        if mesh is not None and equal_weights and layout.world > 1:
            _send_weights(model)
    apply_recompute(model, layout)
    if layout.pp > 1:
        assert isinstance(model, GPT)
        assert mesh is not None
        return _pipelined(model, layout, mesh, where, schedule)
    call = _distribute(model, layout, mesh, where)
    return WrappedModel(model, call, layout, mesh, where, _memory(model, call, memory))


def _device(given: torch.device | str | None) -> torch.device:
    if given is not None:
        return torch.device(given)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))


def _order(topology: Topology | None) -> Sequence[int] | None:
    """The order in which ranks sit as the topology says, by the machines that they run on."""
    if topology is None or not dist.is_initialized() or topology.world == 1:
        return None
    placement = verify_order(gather_identities(), topology)
    if not placement.matches and dist.get_rank() == 0:
        logging.getLogger(__name__).warning("ranks are put in the topology's order: %s", "; ".join(placement.problems))
    return placement.order


def _mesh(layout: Layout, device: torch.device, order: Sequence[int] | None) -> DeviceMesh | None:
    if not dist.is_initialized():
        return None
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)  # FSDP2 and collectives work on the current device
    return build_mesh(layout, device_type=device.type, order=order)


@torch.no_grad()
def _send_weights(model: nn.Module) -> None:
    for tensor in dict.fromkeys([*model.parameters(), *model.buffers()]):
        dist.broadcast(tensor, src=0)


def _distribute(model: nn.Module, layout: Layout, mesh: DeviceMesh | None, device: torch.device) -> nn.Module:
    """tp, then replicas and shards, in place; returns what a forward pass calls."""
    if mesh is None:
        return model
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh["tp"], sequence=layout.sequence_parallel)
        if layout.sequence_parallel:
            sum_gradients_of_parts(model, mesh.get_group("tp"))
    kind = data_parallel_kind(layout)
    if kind == "fsdp":
        shard(model, layout, mesh)
    return replicate(model, layout, mesh, device) if kind == "ddp" else model


def _pipelined(model: GPT, layout: Layout, mesh: DeviceMesh, device: torch.device, schedule: str) -> PipelinedModel:
    here, count = mesh.get_local_rank("pp"), layout.pp * layout.chunks
    stages = [GPTStage(model, chunk * layout.pp + here, count) for chunk in range(layout.chunks)]
    calls = []
    for stage in stages:
        if layout.precision == "bf16" and data_parallel_kind(layout) != "fsdp":
            stage.autocast_dtype = torch.bfloat16
        calls.append(_distribute(stage, layout, mesh, device))
    return PipelinedModel(stages, calls, layout, mesh, device, schedule)


def _memory(model: nn.Module, call: nn.Module, memory: Memory | None) -> AbstractContextManager[Any] | None:
    if memory is None or (isinstance(memory, MemoryConfig) and not memory.on):
        return None
    if not isinstance(memory, MemoryConfig):
        return memory(model)
    if memory.optimizer_state == "streamed":
        hint = "or give memory=lambda model: manage_memory(model, optimizer, config=…)"
        raise InputError("memory.optimizer_state", "streamed", "device: the optimizer is made after the model is wrapped", hint)
    flying = InFlight()
    if memory.collective_reservation and isinstance(call, DistributedDataParallel):
        flying.watch(call)
    return manage_memory(model, config=memory, busy=flying)
