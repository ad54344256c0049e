"""The ways to train that ``laneway bench memory`` compares: plain, those of others, and managed ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from laneway.bench.tiered_compiled import compiled
from laneway.bench.tiered_peers import PEERS, checkpointed
from laneway.bench.tiered_subject import Subject, Trained
from laneway.memory.manager import MemoryManager
from laneway.native import COMPILERS

COMPILED_BUDGETS = (0.75, 0.5, 0.25, 0.0)


@dataclass
class Variant:
    """A way to train: a context around the step, the optimizer, and the manager where there is one.

    Attributes:
        share: the budget, over plain training's peak; 1 where there is none.
        remark: where its dial stands, what is rounded.
    """

    name: str
    share: float
    around: Callable[[], AbstractContextManager[Any]]
    trained: Trained
    manager: MemoryManager | None = None
    remark: str = ""

    def step(self, subject: Subject) -> None:
        """A training step in this way."""
        subject.active = self.trained
        with self.around():
            subject.step()


def peers(subject: Subject, names: Sequence[str]) -> list[Variant]:
    """Plain training, and the named ones of ``PEERS``, at the peak they happen to have."""
    return [Variant(name, 1.0, partial(PEERS[name], subject.model), subject.plain) for name in ("none", *names)]


def at_equal_peak(
    subject: Subject, names: Sequence[str], shares: Sequence[float], say: Callable[[str], None]
) -> Iterator[Variant]:
    """Those that have a dial, turned as little as brings their peak to each of the ``shares`` of plain training's.

    Checkpointing's dial is the number of blocks, torch.compile's its budget of activation memory. Where the last notch isn't
    enough, that is said, and there is no variant.
    """
    if "checkpoint" in names:
        blocks = len(list(subject.model.blocks))  # type: ignore[arg-type]
        counts = [(f"{count} of {blocks} blocks", partial(checkpointed, subject.model, count)) for count in range(1, blocks + 1)]
        yield from _turned(subject, "checkpoint", counts, shares, say)
    if "compile" in names:
        if not any(shutil.which(name) for name in COMPILERS):
            say("  compile: left out, there is no C++ compiler")
            return
        yield Variant("compile", 1.0, compiled(subject.model, 1.0), subject.plain, remark="budget 1")
        notches = [(f"budget {budget:g}", compiled(subject.model, budget)) for budget in COMPILED_BUDGETS]
        yield from _turned(subject, "compile", notches, shares, say)


def _turned(
    subject: Subject,
    name: str,
    notches: Sequence[tuple[str, Callable[[], AbstractContextManager[Any]]]],
    shares: Sequence[float],
    say: Callable[[str], None],
) -> Iterator[Variant]:
    """For each share the first notch that brings the peak down to it. From one notch to the next the peak falls."""
    at, peak = -1, float("inf")
    for share in sorted(shares, reverse=True):
        while peak > share * subject.plain_peak and at + 1 < len(notches):
            at += 1
            found = Variant(name, 1.0, notches[at][1], subject.plain)
            found.step(subject)
            peak = subject.peak(partial(found.step, subject))
        if peak > share * subject.plain_peak:
            say(f"  {name}: does not come down to {share:g} of plain, but to {peak / subject.plain_peak:.3f} ({notches[at][0]})")
            return
        yield Variant(f"{name} to {share:g}", share, notches[at][1], subject.plain, remark=notches[at][0])


def managed(subject: Subject, shares: Sequence[float]) -> list[Variant]:
    """Managed, the optimizer's state on the device."""
    return [_managed(subject, share, "resident") for share in shares]


def with_states(subject: Subject, states: Sequence[str], shares: Sequence[float]) -> Iterator[Variant]:
    """The optimizer's state in few bits and nothing else; then, for each share, managed with the state in each of the ways."""
    for state in states:
        if not state.startswith("streamed"):
            trained = subject.another()
            subject.few_bits(trained, state)
            yield Variant(state, 1.0, partial(PEERS["none"], subject.model), trained, remark="rounds the moments")
    for share in shares:
        for state in states:
            yield _managed(subject, share, state)


def _managed(subject: Subject, share: float, state: str) -> Variant:
    trained = subject.plain if state == "resident" else subject.another()
    manager = subject.managed(int(share * subject.plain_peak), trained, state)
    name = f"managed {share:g}" + ("" if state == "resident" else f" {state}")
    remark = "rounds the moments" if state.endswith("bit") else ""
    return Variant(name, share, lambda: manager, trained, manager, remark)


def exact(variant: Variant, subject: Subject, wanted: Sequence[torch.Tensor]) -> bool:
    """Whether the gradients are those of plain training; a manager's on the pass it records and on those it plans."""
    same = []
    for _ in range(1 if variant.manager is None else 3):
        subject.active = variant.trained
        with variant.around():
            gradients = subject.gradients()
        same += [torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True)]
    return all(same)
