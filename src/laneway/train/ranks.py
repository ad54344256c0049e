"""The processes of a run: who we are, which device is ours, and how all ranks come to the same decision."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from laneway.cluster.recover import Watch, another, bury
from laneway.cluster.recover.attempt import attempt_store
from laneway.core import InputError, LanewayError
from laneway.train.contact import Contact

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    contact: Contact | None = None

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes the run's shared files and speaks to the user."""
        return self.rank == 0

    def on_first(self, action: Callable[[], T]) -> T:
        """Run ``action`` on rank 0 alone; every rank returns its result or raises its LanewayError."""
        outcome: list[T | LanewayError | None] = [None]
        if self.first:
            outcome = [_attempt(action)]
        if self.world_size > 1:
            dist.broadcast_object_list(outcome, src=0, device=self.device)
        return _result(outcome[0])

    def one_by_one_machine(self, action: Callable[[], T]) -> T:
        """Run ``action`` on the first rank of each machine, then on the others: they find what the first one left on disk.

        Where it failed on any rank, every rank raises that LanewayError.
        """
        outcome = _attempt(action) if self.local_rank == 0 else None
        self._raise_any(outcome)
        if self.local_rank != 0:
            outcome = _attempt(action)
        self._raise_any(outcome)
        return _result(outcome)

    def together(self, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank; where it failed on any rank, every rank raises that LanewayError."""
        outcome = _attempt(action)
        self._raise_any(outcome)
        return _result(outcome)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place; the same bits on every rank."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def _raise_any(self, outcome: object) -> None:
        if self.world_size == 1:
            return _result(outcome) if isinstance(outcome, LanewayError) else None
        outcomes: list[object] = [None] * self.world_size
        dist.all_gather_object(outcomes, outcome if isinstance(outcome, LanewayError) else None)
        for error in outcomes:
            if isinstance(error, LanewayError):
                raise error
        return None


def _attempt(action: Callable[[], T]) -> T | LanewayError:
    try:
        return action()
    except LanewayError as error:
        return error
    except OSError as error:  # a full disk on one rank must not leave the others waiting
        return LanewayError(f"{error.filename or 'a file'}: {error.strerror or error}")


def _result(outcome: Any) -> Any:
    if isinstance(outcome, LanewayError):
        raise outcome
    return outcome


def pick_device(name: str, local_rank: int) -> torch.device:
    """The device named in the configuration; ``auto`` is the accelerator that torch finds, else the CPU.

    Raises:
        InputError: the device is of no known type or is not on this machine.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = ["auto", "cpu"] + ([accelerator.type] if accelerator else [])
    if name not in here:
        raise InputError("device", name, "one of " + ", ".join(here) + " on this machine")
    if name == "cpu" or accelerator is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise LanewayError(
            f"rank {local_rank} of this machine has no device: it has {count}; start fewer processes or use --device cpu"
        )
    return torch.device(accelerator.type, local_rank)


@contextmanager
def ranks_of_run(device: str = "auto", failure_timeout: float = 0.0) -> Generator[Ranks]:
    """Join the processes that torchrun started (one process where none did); leaves the group at the end.

    A process group that exists already is used and left as it is.

    Args:
        device: see ``pick_device``.
        failure_timeout: seconds without a sign of life after which a rank is lost; 0: torch's own timeouts.

    Raises:
        LostContactError: a rank was lost, or failed. The group is laid to rest, the process should end with ``leave``.
    """
    rank, local_rank, world_size = (int(os.environ.get(name, default)) for name, default in _TORCHRUN)
    chosen = pick_device(device, local_rank)
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen.index)
    ours = world_size > 1 and not dist.is_initialized()
    contact: Contact | None = None
    try:
        store = attempt_store(rank, world_size) if ours else None
        if store is not None and failure_timeout:
            apart = dist.PrefixStore("watch", another(store))
            contact = Contact(Watch(apart, rank, world_size, limit=failure_timeout))
        if ours:
            _join(chosen, store, rank, world_size)
        if contact is None and failure_timeout and world_size > 1:
            contact = Contact(Watch.of_world(limit=failure_timeout))
        yield Ranks(rank, local_rank, world_size, chosen, contact)
    except BaseException as error:
        found = error if contact is None else contact.explain(error)
        if ours:
            traceback.clear_frames(error.__traceback__)  # the frames an error came through hold the model too, see _leave
        if found is error:
            raise
        raise found from error
    finally:
        if contact is not None and contact.end() and ours:
            bury()
        if ours:
            _leave()


def _join(device: torch.device, store: dist.Store | None, rank: int, world_size: int) -> None:
    backend = "gloo"
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    own = None if device.type == "cpu" else device
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=own)


def _leave() -> None:
    """Leave the process group, after all that holds it.

    If DDP's reducer were the last to let go of the group, gloo's threads would be joined by a thread that holds the
    interpreter's lock, which they may be waiting for: a process that has done its work would never end.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


_TORCHRUN = (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))
