"""What ``laneway bench memory`` trains: one network under one dtype, and the bytes of it alone, without the benchmark's own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneway.bench.tiered_models import MODELS, Size
from laneway.core import LanewayError
from laneway.memory.config import MemoryConfig
from laneway.memory.counting import CountingAllocator
from laneway.memory.manage import make_optimizer_state, make_tier
from laneway.memory.manager import MemoryManager
from laneway.memory.meter import device_meter
from laneway.memory.optimizer_state import StreamedOptimizerState
from laneway.memory.profile import PassProfile
from laneway.memory.simulate import Link
from laneway.memory.tier import Tier

CPU = torch.device("cpu")
STATES = {
    "resident": {},
    "streamed": {"optimizer_state": "streamed"},
    "8bit": {"optimizer_bits": 8},
    "4bit": {"optimizer_bits": 4},
    "streamed-8bit": {"optimizer_state": "streamed", "optimizer_bits": 8},
    "streamed-4bit": {"optimizer_state": "streamed", "optimizer_bits": 4},
}
"""How an optimizer's state is held, as fields of the memory configuration."""


class Without:
    """The CPU's meter less ``own()`` bytes."""

    def __init__(self, own: Callable[[], int]) -> None:
        self.meter, self.own = device_meter(CPU), own

    def live(self) -> int:
        """Bytes in use."""
        return self.meter.live() - self.own()

    def peak(self) -> int:
        """Most bytes in use since the last reset."""
        return self.meter.peak() - self.own()

    def reset_peak(self) -> None:
        """Start anew."""
        self.meter.reset_peak()

    def capacity(self) -> int:
        """Bytes that there are."""
        return self.meter.capacity()


class Trained:
    """An optimizer over the subject's parameters, and what holds its state where that isn't torch's own way."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        self.held: StreamedOptimizerState | None = None

    def resident(self) -> int:
        """Bytes of its state on the device."""
        if self.held is not None:
            return self.held.resident
        values = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.dim())


class Subject:
    """A network, a batch and plain training of it. Parameters change from step to step and are shared by all ways to train.

    Attributes:
        wanted: tensors that the benchmark keeps for comparison: not counted.
        active: whose state counts; that of the others doesn't.
        plain_peak: most bytes alive in a plain step.
    """

    def __init__(self, name: str, dtype: str, size: Size, folder: str, allocator: CountingAllocator) -> None:
        self.name, self.dtype, self.size, self.folder, self.allocator = name, dtype, size, folder, allocator
        torch.manual_seed(0)
        self.model: nn.Module = MODELS[name](size)
        self.tokens = self.batch(size.batch)
        self.wanted: list[Tensor] = []
        self.trained: list[Trained] = []
        self.plain = self.active = self.another()
        self.tiers: list[Tier] = []
        self.meter = Without(self.own)
        for _ in range(2):
            self.step()
        self.plain_peak = self.peak(self.step)

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *error: object) -> None:
        for trained in self.trained:
            if trained.held is not None:
                trained.held.close()
        for tier in self.tiers:
            tier.close()
        self.wanted = []

    def about(self) -> dict[str, str | int]:
        """The columns that say what was trained."""
        size = self.size
        tokens = size.batch * size.length
        return {"model": self.name, "layers": size.layers, "dim": size.dim, "tokens": tokens, "dtype": self.dtype}

    # -- bytes

    def own(self) -> int:
        """What the benchmark holds for itself: tensors to compare with, and optimizers that aren't in use."""
        others = sum(trained.resident() for trained in self.trained if trained is not self.active)
        return others + sum(tensor.nbytes for tensor in self.wanted)

    def peak(self, work: Callable[[], object]) -> int:
        """Most bytes alive during ``work``, without those that the benchmark itself holds."""
        self.meter.reset_peak()
        work()
        return self.meter.peak()

    @contextmanager
    def limited(self, limit: int) -> Generator[None]:
        """Within, an allocation that would need more than ``limit`` bytes fails."""
        self.allocator.limit(limit + self.own())
        try:
            yield
        finally:
            self.allocator.limit(None)

    def came_through(self, work: Callable[[], object]) -> bool:
        """Whether ``work`` ran without running out of memory. Where it didn't, gradients are dropped."""
        try:
            work()
        except (torch.OutOfMemoryError, LanewayError):
            came = False
        else:
            came = True
        if not came:
            gc.collect()
            self.forget()
        return came

    # -- the work

    def batch(self, size: int, length: int | None = None) -> Tensor:
        """[size, length + 1] random tokens."""
        return torch.randint(0, self.size.vocabulary, (size, (length or self.size.length) + 1))

    def backward(self, tokens: Tensor | None = None, share: float = 1.0) -> None:
        """Forward and backward pass of a batch, with the loss times ``share``."""
        tokens = self.tokens if tokens is None else tokens
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == "bf16"):
            logits: Tensor = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        (loss if share == 1.0 else loss * share).backward()

    def parts(self, count: int) -> list[Callable[[], None]]:
        """The batch in ``count`` parts, fewer where it has fewer rows."""
        chunks = self.tokens.chunk(count)
        return [partial(self.backward, chunk, len(chunk) / len(self.tokens)) for chunk in chunks]

    def step(self) -> None:
        """A training step with the active optimizer."""
        self.backward()
        self.active.optimizer.step()
        self.forget()

    def gradients(self) -> list[Tensor]:
        """Copies of the gradients of the batch."""
        self.backward()
        found = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.forget()
        return found

    def forget(self) -> None:
        """No gradients."""
        self.model.zero_grad(set_to_none=True)

    # -- ways to train

    def another(self) -> Trained:
        """An optimizer more."""
        self.trained.append(Trained(list(self.model.parameters())))
        return self.trained[-1]

    def managed(self, budget: int, trained: Trained | None = None, state: str = "resident") -> MemoryManager:
        """A manager with a tier of its own, and the optimizer's state as ``state`` says."""
        config = MemoryConfig(str(budget), folder=self.folder, collective_reservation=0.0, **STATES[state])  # type: ignore[arg-type]
        tier = make_tier(config, CPU, budget=budget)
        self.tiers.append(tier)
        manager = MemoryManager(self.model, config, tier, self.meter, CPU)
        if trained is not None and state != "resident":
            trained.held = manager.optimizer_state = make_optimizer_state(config, trained.optimizer, tier, budget)
        return manager

    def few_bits(self, trained: Trained, state: str) -> None:
        """The optimizer's state in few bits, without a manager."""
        trained.held = make_optimizer_state(MemoryConfig(**STATES[state]), trained.optimizer, None)  # type: ignore[arg-type]

    def release(self, trained: Trained, manager: MemoryManager | None) -> None:
        """Drop an optimizer, its state, and the manager it was used with."""
        self.active = self.plain
        self.trained.remove(trained)
        trained.optimizer.state.clear()
        if manager is not None:
            self.tiers.remove(manager.tier)
            manager.tier.close()

    @cached_property
    def recorded(self) -> tuple[PassProfile, Link] | None:
        """What a pass of the usual batch does, and the way to the tier; None where nothing it saves is large enough to manage."""
        before, self.active = self.active, self.plain
        manager = self.managed(int(1.2 * self.plain_peak))
        with manager:
            self.step()
        self.active = before
        profile = next(iter(manager.profiles.values()), None)
        return None if profile is None else (profile, manager.link())

    @property
    def beta(self) -> float | None:
        """Bytes that the forward pass saves per second over what the tier takes per second; None where nothing is managed."""
        return None if self.recorded is None else self.recorded[0].beta(self.recorded[1].write_bandwidth)
