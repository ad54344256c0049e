"""``manage_memory``: a memory manager with the tier, the meter and the caps that fit the machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laneway.core import InputError, LanewayError
from laneway.memory.config import MemoryConfig, resolve
from laneway.memory.counting import CountingAllocator
from laneway.memory.disk import DiskTier
from laneway.memory.host import HostTier
from laneway.memory.manager import MemoryManager, device_of
from laneway.memory.meter import Meter, device_meter, host_capacity
from laneway.memory.optimizer_lowbit import LowBitOptimizerState
from laneway.memory.optimizer_state import StreamedOptimizerState
from laneway.memory.sharing import Sharing
from laneway.memory.stack import StackedTier
from laneway.memory.throttle import Throttle
from laneway.memory.tier import Tier

LEAST_FILE, FILE_OVER_BUDGET = (
    1 << 30,
    4,
)  # the disk tier's file: 4 × the budget, not less than 1 GiB, at most half of what is free
LEAST_CHUNK, LARGEST_CHUNK, CHUNKS_IN_BUDGET = 4 << 20, 64 << 20, 32  # of optimizer state that is updated at a time


def manage_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    budget: str | int | None = None,
    policy: str | None = None,
    recompute: bool = True,
    busy: Callable[[], bool] = lambda: False,
    config: MemoryConfig | None = None,
    stay_without_grad: bool = False,
    **fields: Any,
) -> MemoryManager:
    """Keep training within a budget of device memory; the gradients stay the same bit for bit.

    Use it as a context manager around the training loop::

        with manage_memory(model, optimizer, budget="6GiB"):
            for batch in batches:
                loss(model(batch)).backward()
                optimizer.step()
                optimizer.zero_grad()

    Saved tensors move to the host or the disk and back, or are computed again, as a plan says that is made after the first pass
    of each shape. On a machine without accelerator the device is the RAM and the tier is the disk.

    With ``gradients="parked"`` or ``parameters="streamed"`` what reads gradients and parameters (clipping, ``optimizer.step()``)
    goes ``with memory.all_here():``. Anything else that uses what is away raises.

    Args:
        model: on one device; its forward pass begins a pass.
        optimizer: with ``optimizer_state="streamed"`` its state lives in the tier between steps; with ``optimizer_bits`` 8 or 4
            its moments have so many bits there (another result than with 32).
        budget: bytes on the device, such as ``6GiB``; ``auto``: 82 % of its capacity (also where no source names one).
        policy: whom to send out where there is no plan yet: ``cost_aware``, ``lru`` or ``fifo``.
        recompute: whether plans may compute again.
        busy: says whether a collective is in flight: then transfers leave it a share of the link. An ``InFlight`` also counts
            how long they were in each other's way.
        config: all fields at once; otherwise from the environment and ``fields``.
        stay_without_grad: with ``parameters="streamed"``: what a forward pass without gradients brought stays.
        fields: other fields of ``MemoryConfig``.

    Raises:
        InputError: a field or a variable of the environment is wrong, or the tier's folder has no room.
        LanewayError: the model is on several devices.
    """
    given = {name: value for name, value in {"budget": budget, "policy": policy, **fields}.items() if value is not None}
    if config is None:
        config = resolve(arguments=given)
    elif given:
        raise InputError("config", given, "either config or single fields, not both")
    if not config.on:
        config = replace(config, budget="auto")
    device = device_of(model)
    refuse_parts(model, config)
    meter = exact_meter(device)
    tier = make_tier(config, device, lambda: make_throttle(config, busy), config.budget_bytes(meter.capacity()) or 0)
    manager = MemoryManager(model, config, tier, meter, device, recompute=recompute)
    if config.optimizer_state == "streamed" or config.optimizer_bits != 32:
        if optimizer is None:
            raise InputError("optimizer", None, "the optimizer whose state is to be streamed, or held in few bits")
        manager.optimizer_state = make_optimizer_state(config, optimizer, tier, manager.budget)
    if config.parameters == "streamed":
        manager.stream_parameters(stay_without_grad=stay_without_grad)
    if config.gradients == "parked":
        manager.park_gradients()
    return manager


def refuse_parts(model: nn.Module, config: MemoryConfig) -> None:
    """Refuse to move gradients or parameters of a model where that can't work.

    Raises:
        InputError: FSDP2 or another wrapper of parameters, DDP, or a compiled module.
    """
    for field, moved in (("gradients", config.gradients == "parked"), ("parameters", config.parameters == "streamed")):
        if not moved:
            continue
        why = None
        if any(hasattr(parameter, "__tensor_flatten__") for parameter in model.parameters()):
            why = "FSDP2, or another wrapper, decides where these parameters are"
        elif any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            why = "DDP keeps gradients in buckets of its own"
        elif any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
            why = "compiled modules read them past the hooks that bring them back"
        if why is not None:
            raise InputError(f"memory.{field}", getattr(config, field), f"resident with this model: {why}")


def make_optimizer_state(
    config: MemoryConfig, optimizer: torch.optim.Optimizer, tier: Tier | None, budget: int = 0
) -> StreamedOptimizerState:
    """The optimizer's state as the configuration wants it held: in ``tier`` where it is streamed, in few bits or as it is.

    Chunks are a small part of the ``budget`` (0: none), within bounds.
    """
    place = tier if config.optimizer_state == "streamed" else None
    chunk = min(LARGEST_CHUNK, max(LEAST_CHUNK, budget // CHUNKS_IN_BUDGET)) if budget else LEAST_CHUNK
    if config.optimizer_bits == 32:
        return StreamedOptimizerState(optimizer, place, chunk_bytes=chunk)
    return LowBitOptimizerState(optimizer, config.optimizer_bits, tier=place, chunk_bytes=chunk)


def make_throttle(config: MemoryConfig, busy: Callable[[], bool] = lambda: False) -> Throttle | None:
    """The caps of the configuration; None where there are none, and nobody who counts what shares the link."""
    caps = config.max_bytes_per_second or config.max_swap_ops_per_second or config.collective_reservation
    if not caps and not isinstance(busy, Sharing):
        return None
    return Throttle(config.max_bytes_per_second, config.max_swap_ops_per_second, config.collective_reservation, busy)


def make_tier(
    config: MemoryConfig, device: torch.device, throttle: Callable[[], Throttle | None] = lambda: None, budget: int = 0
) -> Tier:
    """Host memory beside an accelerator, a file beside the RAM, or what the configuration names.

    Args:
        throttle: makes a throttle for each tier.
        budget: bytes of device that it is for.

    Raises:
        LanewayError: the folder has no room for the disk tier's file.
    """
    kind = config.tier
    if kind == "auto":
        kind = "disk" if device.type == "cpu" else "host"
    if kind == "disk":
        return _disk_tier(config, throttle(), budget)
    host = HostTier(config.host_buffer_bytes(host_capacity()), device, throttle=throttle())
    if kind == "host":
        return host
    try:
        return StackedTier([host, _disk_tier(config, throttle(), budget)])
    except BaseException:
        host.close()
        raise


def _disk_tier(config: MemoryConfig, throttle: Throttle | None, budget: int) -> DiskTier:
    folder = Path(config.folder or tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    free = os.statvfs(folder)
    room = free.f_bavail * free.f_frsize
    capacity = min(room // 2, max(LEAST_FILE, FILE_OVER_BUDGET * budget)) // 4096 * 4096
    if capacity < 1 << 20:
        raise LanewayError(f"memory.folder: {folder} has {room} bytes free, too few for the disk tier; name another folder")
    return DiskTier(folder, capacity, throttle=throttle)


def exact_meter(device: torch.device) -> Meter:
    """The device's meter; on the CPU with the counting allocator, where it can be compiled."""
    if device.type == "cpu" and CountingAllocator.installed() is None:
        with contextlib.suppress(LanewayError):  # no compiler: the process's resident set has to do
            CountingAllocator.install(caching=True)
    return device_meter(device)
