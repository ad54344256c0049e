"""Ops that are run again where memory for their result is missing: the failure that the rest of the step never hears of."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from laneway.memory.oom import out_of_memory, wanted_bytes

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")
HIDDEN_STATE = ("running_mean", "dropout_state")  # arguments that forward ops write though their schemas don't say so
UNKNOWN = 64 << 20  # bytes to ask for where neither the error nor the op's inputs say how many

Told = Callable[[str, int, float], None]
"""Called with an op's name, the bytes it wanted and the seconds until it had them, when it succeeded after failing."""


class RngState:
    """The state of torch's generators: the CPU's, the device's, and others given."""

    def __init__(self, device: torch.device, generators: Iterable[torch.Generator] = ()) -> None:
        self.device = device
        self._cpu = torch.get_rng_state()
        self._device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        self._others = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Set them back."""
        torch.set_rng_state(self._cpu)
        if self._device is not None:
            torch.get_device_module(self.device).set_rng_state(self._device, self.device)
        for generator, state in self._others:
            generator.set_state(state)


class RetryOps(TorchDispatchMode):
    """A dispatch mode that runs an op again, after ``evict``, where its allocation failed; forward and backward.

    Only ops that change nothing are repeated: those whose schema has no mutable argument, but for batch normalisation (its
    schema hides that it writes the running statistics), recurrent layers with dropout, and collectives (other ranks would be
    left waiting). Random ops begin again from the same generator state. What is not repeated raises as it would have.

    Every op costs some tens of microseconds of Python while the mode is on, and nothing while it is off. Compiled code allocates
    without asking it.

    Args:
        evict: frees about so many bytes of the device and returns how many it did.
        device: whose generator random ops draw from.
        attempts: how often an op is run at most; each time twice as much is evicted.
        free: empties caches; called before ``evict`` returns to the op for a second time or where nothing could be evicted.
        told: told of every op that succeeded after failing.
    """

    def __init__(
        self,
        evict: Callable[[int], int],
        *,
        device: torch.device | None = None,
        attempts: int = 3,
        free: Callable[[], None] = lambda: None,
        told: Told | None = None,
    ) -> None:
        super().__init__()
        self.evict, self.attempts, self.free, self.told = evict, attempts, free, told
        self.device = device or torch.device("cpu")

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile as if the mode were not there: compiled and eager code differ in the last bits."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if types or not repeatable(func):  # subclasses (DTensor) may communicate within an op
            return func(*args, **kwargs)
        before: RngState | None = None
        failed_at, wanted, attempt = 0.0, 0, 0
        while True:
            attempt += 1
            try:
                if before is not None:
                    before.restore()
                elif torch.Tag.nondeterministic_seeded in func.tags:
                    before = RngState(self.device, _generators(args, kwargs))
                found = func(*args, **kwargs)
                break
            except (RuntimeError, MemoryError) as error:
                if attempt >= self.attempts or not out_of_memory(error):
                    raise
                failed_at = failed_at or time.perf_counter()
                wanted = wanted_bytes(error) or _input_bytes((args, kwargs)) or UNKNOWN
            # here, out of the handler, the failed call's traceback holds nothing any more
            if self.evict(wanted << (attempt - 1)) < wanted or attempt > 1:
                self.free()
        if failed_at and self.told is not None:
            self.told(str(func), wanted, time.perf_counter() - failed_at)
        return found


@functools.cache
def repeatable(func: Any) -> bool:
    """Whether running an op a second time, after it failed, is as if it had run once."""
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    if schema is None or schema.is_mutable or func.namespace in COLLECTIVES or func.namespace == "profiler":
        return False
    return "backward" in schema.name or not any(argument.name in HIDDEN_STATE for argument in schema.arguments)


def _generators(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Generator]:
    return [given for given in (*args, *kwargs.values()) if isinstance(given, torch.Generator)]


def _input_bytes(given: Any) -> int:
    """Bytes of all tensors in a nest: a guess at what an op's result needs."""
    if isinstance(given, Tensor):
        return given.numel() * given.element_size()
    if isinstance(given, list | tuple):
        return sum(_input_bytes(part) for part in given)
    return sum(_input_bytes(part) for part in given.values()) if isinstance(given, dict) else 0
