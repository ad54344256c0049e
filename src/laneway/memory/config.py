"""The dials of the tiered memory manager, and their variables in the environment. No torch here.

A field may come from the environment, a configuration file or an argument; the later wins. Each has a variable (``VARIABLES``)
so that a container can be set up without a file.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from laneway.core import InputError, choice, collect, nearest, positive_int, problems_of
from laneway.sizes import (
    BYTES_ACCEPTED,
    DEFAULT_HOST_BUFFER_RATIO,
    LARGEST_HOST_BUFFER_RATIO,
    budget_bytes,
    check_host_buffer,
    parse_bytes,
    parse_fraction,
)

__all__ = ["VARIABLES", "MemoryConfig", "check_host_buffer", "from_environment", "parse_bytes", "resolve"]

POLICIES = ("cost_aware", "lru", "fifo")
TIERS = ("auto", "host", "disk", "host+disk")
SOLVERS = ("greedy", "milp")
OPTIMIZER_STATES = ("device", "streamed")
OPTIMIZER_BITS = (32, 8, 4)
SWITCH = ("true", "false")
MIN_BYTES = 64 << 10  # what is smaller is not worth a transfer
SAVED_TENSORS = ("exact", "int8")
GRADIENTS, PARAMETERS = ("resident", "parked"), ("resident", "streamed")
LOSSY = frozenset({"saved_tensors", "optimizer_bits"})
"""Fields that may change the numbers."""

VARIABLES = {
    "budget": "MHC_MEMORY_BUDGET",
    "policy": "MHC_EVICTION_STRATEGY",
    "tier": "MHC_MEMORY_TIER",
    "folder": "MHC_SWAP_FOLDER",
    "host_buffer_ratio": "MHC_CPU_BUFFER_RATIO",
    "max_swap_ops_per_second": "MHC_MAX_SWAP_OPS_PER_SEC",
    "max_bytes_per_second": "MHC_MAX_SWAP_BYTES_PER_SEC",
    "collective_reservation": "MHC_COLLECTIVE_RESERVATION",
    "solver": "MHC_PLAN_SOLVER",
    "saved_tensors": "MHC_SAVED_TENSORS",
    "gradients": "MHC_GRADIENTS",
    "parameters": "MHC_PARAMETERS",
    "min_bytes": "MHC_MIN_SWAP_BYTES",
    "optimizer_state": "MHC_OPTIMIZER_STATE",
    "optimizer_bits": "MHC_OPTIMIZER_BITS",
    "replay": "MHC_REPLAY",
}


@dataclass(frozen=True)
class MemoryConfig:
    """What may lie where, and how much may move. With the budget at its default, off, nothing is managed."""

    budget: str | int = ""
    """Device memory to stay within: empty (off) | auto (82 % of the capacity) | bytes, such as 1.5GiB, 800MB or an integer."""
    policy: str = "cost_aware"
    """Who is moved out first: cost_aware | lru | fifo"""
    tier: str = "auto"
    """Where tensors go: host (pinned memory of the host) | disk | host+disk | auto (host beside an accelerator, disk on a CPU)"""
    folder: str = ""
    """Folder of the disk tier's file; empty: the system's folder for temporary files."""
    host_buffer_ratio: float = DEFAULT_HOST_BUFFER_RATIO
    """Largest part of the host's memory that the host tier takes, 0 to 0.95; 2.5 to 3 times the device memory are advised."""
    max_swap_ops_per_second: int = 0
    """Transfers that may start in a second, on each tier; 0: no cap."""
    max_bytes_per_second: int = 0
    """Bytes that may move in a second, both ways together, on each tier; 0: no cap."""
    collective_reservation: float = 0.5
    """Part of the link's bandwidth that transfers leave free while a collective is in flight, 0 to 1."""
    solver: str = "greedy"
    """How a plan is found: greedy | milp"""
    saved_tensors: str = "exact"
    """How saved tensors move: exact | int8 (as 8-bit integers where they are large and floating-point: fewer bytes, lossy)"""
    gradients: str = "resident"
    """Where gradients are between micro-batches: resident | parked (in the tier; needs replay off, one process)"""
    parameters: str = "resident"
    """Where parameters are that are not at work: resident | streamed (in the tier; needs replay off, one process)"""
    min_bytes: int = MIN_BYTES
    """Smaller tensors are never moved."""
    optimizer_state: str = "device"
    """Where the optimizer's state is between steps: device | streamed (in the tier, a part at a time on the device)"""
    optimizer_bits: int = 32
    """Bits of the optimizer's moments between steps, also without a budget: 32 (as the optimizer has them) | 8 | 4"""
    replay: bool = True
    """Run a micro-batch that ran out of memory again, in less; under DDP gradients are then reduced after all backward passes."""

    def problems(self, prefix: str = "memory") -> list[InputError]:
        """Everything that is wrong with these fields, one error a field."""
        return problems_of(self, f"{prefix}.", lambda sound: sound._out_of_range(prefix))

    def _out_of_range(self, prefix: str) -> list[InputError]:
        def name(field: str) -> str:
            return f"{prefix}.{field}"

        checks: list[Callable[[], object]] = [
            lambda: _check_budget(name("budget"), self.budget),
            lambda: choice(name("policy"), self.policy, POLICIES),
            lambda: choice(name("tier"), self.tier, TIERS),
            lambda: _check_folder(name("folder"), self.folder),
            lambda: _check_fraction(name("host_buffer_ratio"), self.host_buffer_ratio, LARGEST_HOST_BUFFER_RATIO),
            lambda: positive_int(name("max_swap_ops_per_second"), self.max_swap_ops_per_second, at_least=0),
            lambda: positive_int(name("max_bytes_per_second"), self.max_bytes_per_second, at_least=0),
            lambda: _check_fraction(name("collective_reservation"), self.collective_reservation, 1.0),
            lambda: choice(name("solver"), self.solver, SOLVERS),
            lambda: choice(name("saved_tensors"), self.saved_tensors, SAVED_TENSORS),
            lambda: choice(name("gradients"), self.gradients, GRADIENTS),
            lambda: choice(name("parameters"), self.parameters, PARAMETERS),
            lambda: positive_int(name("min_bytes"), self.min_bytes, at_least=0),
            lambda: choice(name("optimizer_state"), self.optimizer_state, OPTIMIZER_STATES),
            lambda: _check_bits(name("optimizer_bits"), self.optimizer_bits),
        ]
        return collect(checks)

    def check(self, prefix: str = "memory") -> None:
        """Raise the first problem."""
        for problem in self.problems(prefix):
            raise problem

    @property
    def on(self) -> bool:
        """Whether anything is managed at all."""
        return self.budget != ""

    def budget_bytes(self, capacity: int) -> int | None:
        """The budget in bytes on a device that holds ``capacity`` bytes; None where it is off.

        Raises:
            InputError: not a budget, or more than the capacity.
        """
        return budget_bytes("memory.budget", self.budget, capacity) if self.on else None

    def host_buffer_bytes(self, host_bytes: int) -> int:
        """Most bytes that the host tier may take on a host with ``host_bytes`` of memory."""
        return int(self.host_buffer_ratio * host_bytes)


def from_environment(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The fields that the environment gives, checked; an empty variable gives nothing.

    Args:
        environ: default: ``os.environ``.

    Raises:
        InputError: a wrong value, by the variable's name; or a variable that is one of ``VARIABLES`` but for a letter or two.
    """
    environ = os.environ if environ is None else environ
    given = {field: environ[variable].strip() for field, variable in VARIABLES.items() if environ.get(variable, "").strip()}
    _refuse_misspelt(environ)
    return {field: _from_text(field, text) for field, text in given.items()}


def resolve(
    file: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> MemoryConfig:
    """The configuration from all its sources: default < environment < file < arguments; checked.

    Args:
        file: fields of the file's ``[memory]`` table.
        arguments: fields given in a call or as flags.
        environ: default: ``os.environ``.

    Raises:
        InputError: an unknown field or a wrong value.
    """
    given = from_environment(environ) | dict(file or {}) | dict(arguments or {})
    known = [field.name for field in fields(MemoryConfig)]
    for name in given:
        if name not in known:
            close = nearest(name, known)
            accepted = "one of the fields " + ", ".join(known)
            raise InputError(f"memory.{name}", given[name], accepted, close and f"did you mean {close!r}?")
    config = MemoryConfig(**given)
    config.check()
    return config


def _from_text(field: str, text: str) -> Any:
    """The field's value from its variable's text; an error names the variable."""
    variable = VARIABLES[field]
    value: Any = text
    if field == "host_buffer_ratio":
        value = parse_fraction(variable, text, LARGEST_HOST_BUFFER_RATIO)
    elif field == "collective_reservation":
        value = parse_fraction(variable, text)
    elif field == "max_swap_ops_per_second":
        if not (text.isascii() and text.isdigit()):
            raise InputError(variable, text, "an integer ≥ 0; 0: no cap")
        value = int(text)
    elif field in ("max_bytes_per_second", "min_bytes"):
        value = parse_bytes(variable, text)
    elif field == "optimizer_bits":
        value = int(text) if text.isascii() and text.isdigit() else text
    elif field == "replay":
        value = choice(variable, text.lower(), SWITCH) == "true"
    for problem in MemoryConfig(**{field: value}).problems():
        raise InputError(variable, text, problem.accepted, problem.hint)
    return value


def _refuse_misspelt(environ: Mapping[str, str]) -> None:
    known = set(VARIABLES.values())
    for name in sorted(environ):
        if name.startswith("MHC_") and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
            if close:
                raise InputError(name, environ[name], "one of " + ", ".join(sorted(known)), f"did you mean {close[0]!r}?")


def _check_budget(field: str, given: object) -> None:
    if given in ("", "auto") and isinstance(given, str):
        return
    accepted = f"empty (off), auto, or {BYTES_ACCEPTED}"
    try:
        size = parse_bytes(field, given)
    except InputError as error:
        raise InputError(field, given, accepted, error.hint) from None
    if size == 0:
        raise InputError(field, given, accepted, "to turn it off, leave it empty")


def _check_bits(field: str, given: object) -> None:
    if isinstance(given, bool) or given not in OPTIMIZER_BITS:
        raise InputError(field, given, "32, 8 or 4")


def _check_folder(field: str, given: object) -> None:
    if not isinstance(given, str) or "\0" in given:
        raise InputError(field, given, "the path of a folder, or empty for that of temporary files")


def _check_fraction(field: str, given: object, most: float) -> None:
    """A number, not a text that holds one."""
    if isinstance(given, str):
        raise InputError(field, given, f"a number from 0 to {most:g}")
    parse_fraction(field, given, most)
