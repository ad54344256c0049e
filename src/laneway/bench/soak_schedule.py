"""What is trained in a soak, and what goes wrong in it when. No torch here.

Everything is drawn from the seed alone: the length of each step's sequences, the steps of the faults and their sizes. A fault of
a kind falls on the same steps whether its kind comes alone or with the others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = {
    "spike": "a batch of several times the longest usual length, whose natural demand of memory is over the limit",
    "nan": "a batch in whose forward pass a number becomes NaN",
    "kill": "SIGKILL between the backward pass and the update",
    "disk": "a full disk for as many steps as there are between two checkpoints",
    "corrupt": "SIGKILL as above, and damage to the newest checkpoint before the next start",
}
FACTORS = (2, 3, 4)


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in ``step``; ``factor``: of a spike, the length over the longest usual one."""

    kind: str
    step: int
    factor: int = 1


@dataclass(frozen=True)
class Workload:
    """A small GPT with wide residual streams."""

    steps: int = 30
    checkpoint_every: int = 6
    batch_size: int = 4
    lengths: tuple[int, ...] = (24, 32, 48)
    """Usual sequence lengths; each step draws one."""
    layers: int = 3
    dim: int = 64
    heads: int = 4
    streams: int = 4
    lr: float = 3e-3
    text: str = "stdlib"
    """Text to train on, as ``data.path`` of a run: this Python's own sources, or a path."""
    cache: str | None = None
    """Folder of its tokens, as ``data.cache``."""

    @property
    def context(self) -> int:
        """Longest sequence that a spike can have."""
        return max(self.lengths) * max(FACTORS)


@dataclass(frozen=True)
class Job:
    """One run from its first process to its end: what one supervisor has to do.

    Attributes:
        variant: name of an entry of ``PROTECTIONS``.
        limit: bytes of tensors that a process may have; None: no limit.
        budget: bytes that the memory manager is told to stay within.
        folder: where the run directory and the disk tier's file are made.
    """

    variant: str
    seed: int
    workload: Workload
    faults: tuple[Fault, ...]
    folder: str
    limit: int | None = None
    budget: int | None = None

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Job:
        """Undo of ``dataclasses.asdict``, also after a way through JSON."""
        work: dict[str, Any] = plain["workload"] | {"lengths": tuple(plain["workload"]["lengths"])}
        parts: dict[str, Any] = {"workload": Workload(**work), "faults": tuple(Fault(**fault) for fault in plain["faults"])}
        return cls(**plain | parts)


@dataclass
class Progress:
    """What the supervisor knows of a run when it starts the next process."""

    pending: list[Fault] = field(default_factory=list)
    """Faults of the kinds that happen once (all but spikes and NaN, which are a matter of the batch) that are still to come."""
    replaced: list[int] = field(default_factory=list)
    """Steps that ended a process because of their batch, and are now given their usual one."""


@dataclass(frozen=True)
class Protections:
    """What a run has against the faults; ``limited``: whether it lives under the limit."""

    memory_manager: bool
    skips_nonfinite: bool
    outlasts_full_disk: bool
    falls_back: bool
    limited: bool = True

    def columns(self) -> dict[str, int]:
        """As a row tells it."""
        return {
            "memory_manager": int(self.memory_manager),
            "skips_nonfinite": int(self.skips_nonfinite),
            "outlasts_full_disk": int(self.outlasts_full_disk),
            "older_checkpoint_at_once": int(self.falls_back),
        }


PROTECTIONS = {
    "unmanaged": Protections(False, False, False, False),
    "protected": Protections(False, True, True, True),
    "managed": Protections(True, True, True, True),
    "reference": Protections(False, True, True, True, limited=False),
}
VARIANTS = ("unmanaged", "protected", "managed")


def draw(seed: int, workload: Workload, each: int) -> list[Fault]:
    """``each`` faults of every kind on different steps, in their order; the first step and the last have none."""
    chance = random.Random(f"soak {seed}")
    steps = chance.sample(range(2, workload.steps), each * len(KINDS))
    kinds = [kind for kind in KINDS for _ in range(each)]
    factors = [chance.choice(FACTORS) for _ in steps]
    found = [
        Fault(kind, step, factor if kind == "spike" else 1) for kind, step, factor in zip(kinds, steps, factors, strict=True)
    ]
    return sorted(found, key=lambda fault: fault.step)


def most_faults(workload: Workload) -> int:
    """The most faults of a kind that there are steps for."""
    return (workload.steps - 2) // len(KINDS)


def length(seed: int, step: int, lengths: Sequence[int]) -> int:
    """Length of a step's sequences in tokens, where it is a usual one."""
    return random.Random(f"soak {seed}/{step}").choice(list(lengths))
