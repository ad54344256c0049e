"""Batches out of tokens: which windows, in which order, and which rank gets which.

Training. An epoch is a shuffle of W windows of ``context`` + 1 tokens that start ``context`` apart (so each token is a target
at most once), the first at an offset below ``context`` that is drawn for each epoch: window boundaries fall elsewhere
every time. W is the same in all epochs, so fewer than 2 · ``context`` tokens at the two ends sit out, others in each epoch.
The sequence of windows is one endless line: epoch after epoch, no remainder dropped, cut into global batches; rank r of w
takes the r-th of w equal parts of each. So the line depends on tokens, context and seed alone, and a run may resume with
another number of ranks, or another batch size, and go on with the very next window.

Evaluation. Whole batches only, windows evenly spaced over the split, no randomness.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from laneway.core import InputError, positive_int
from laneway.data.order import Permutation, number


class Tokens(Protocol):
    """A TokenFile or a 1-D numpy array of integers."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: slice, /) -> np.ndarray: ...


class BatchLoader:
    """Endless iterator over training batches; see the head of this file for the order.

    Args:
        tokens: token ids.
        context: tokens in one sequence (T).
        batch_size: sequences in one *global* batch.
        seed: of the shuffles, an integer ≥ 0.
        rank: which part of each batch is ours.
        world_size: number of parts; must divide ``batch_size``.

    ``next(loader)`` gives inputs and targets, both int64 [batch_size / world_size, context]; targets are the inputs shifted
    by one token. Raises InputError for arguments that don't fit together and for fewer than ``context`` + 1 tokens.
    """

    def __init__(self, tokens: Tokens, context: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        _check(tokens, context, batch_size, rank, world_size)
        positive_int("seed", seed, at_least=0)
        self.tokens, self.context, self.batch_size = tokens, context, batch_size
        self.rank, self.world_size = rank, world_size
        self.seed, self.epoch, self.position = seed, 0, 0
        self.windows = max(1, (len(tokens) - context) // context)

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        local = self.batch_size // self.world_size
        first = self.position + self.rank * local
        starts = self._starts(np.arange(first, first + local))
        self._move(self.position + self.batch_size)
        return _gather(self.tokens, starts, self.context)

    def state_dict(self) -> dict[str, int]:
        """Where we are: ``epoch`` and ``position`` (windows of it already used, over all ranks), and what the order depends on.

        The same on every rank.
        """
        place = {"seed": self.seed, "epoch": self.epoch, "position": self.position}
        return {**place, "context": self.context, "tokens": len(self.tokens)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on exactly where ``state`` was taken; raises InputError where the tokens or the context are other ones."""
        for name, ours in {"context": self.context, "tokens": len(self.tokens)}.items():
            if state[name] != ours:
                raise InputError(
                    f"loader state: {name}", state[name], f"{ours}, as this run has", "the order of batches would differ"
                )
        for name in ("seed", "epoch", "position"):
            positive_int(f"loader state: {name}", state[name], at_least=0)
        if state["position"] >= self.windows:
            raise InputError("loader state: position", state["position"], f"a number below {self.windows}")
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]

    def _move(self, position: int) -> None:
        """Set the place, counted in windows from the begin of the current epoch, possibly beyond its end."""
        further, self.position = divmod(position, self.windows)
        self.epoch += further

    def _starts(self, positions: np.ndarray) -> np.ndarray:
        """First tokens of the windows at ``positions``, counted from the begin of the current epoch."""
        starts = np.empty_like(positions)
        further, within = np.divmod(positions, self.windows)
        for ahead in np.unique(further):
            here = further == ahead
            offset, shuffle = self._epoch_order(self.epoch + int(ahead))
            starts[here] = offset + self.context * shuffle(within[here])
        return starts

    def _epoch_order(self, epoch: int) -> tuple[int, Permutation]:
        """Offset of the first window and the shuffle of one epoch."""
        key = f"{self.seed}/{epoch}".encode()
        # Any offset below the bound leaves room for all windows and the last target.
        bound = min(self.context, len(self.tokens) - self.windows * self.context)
        return number(key, bound), Permutation(self.windows, key)


def evaluation_batches(
    tokens: Tokens, context: int, batch_size: int, limit: int | None = None, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batches every time, for a validation loss: (inputs, targets), both int64 [batch_size / world_size, context].

    As many whole global batches as there are windows without overlap for, at most ``limit``, at least one. Their windows
    start at even distances over all of ``tokens``; they overlap only where there are too few tokens for one batch. Every
    rank gets the same number of batches, and their union does not depend on the number of ranks. Raises InputError at the call.
    """
    _check(tokens, context, batch_size, rank, world_size)
    if limit is not None:
        positive_int("limit", limit)
    whole = max(1, (len(tokens) - 1) // context // batch_size)
    batches = whole if limit is None else min(whole, limit)
    return _evaluate(tokens, context, batch_size, batches, rank, world_size)


def _evaluate(
    tokens: Tokens, context: int, batch_size: int, batches: int, rank: int, world_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    last_start, last_window = len(tokens) - 1 - context, max(1, batches * batch_size - 1)
    local = batch_size // world_size
    for batch in range(batches):
        first = batch * batch_size + rank * local
        yield _gather(tokens, np.arange(first, first + local) * last_start // last_window, context)


def _gather(tokens: Tokens, starts: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the windows that begin at ``starts``."""
    rows = np.stack([tokens[start : start + context + 1] for start in starts.tolist()]).astype(np.int64)
    windows_bt = torch.from_numpy(rows)
    return windows_bt[:, :-1].contiguous(), windows_bt[:, 1:].contiguous()


def _check(tokens: Tokens, context: int, batch_size: int, rank: int, world_size: int) -> None:
    positive_int("context", context)
    positive_int("batch_size", batch_size)
    positive_int("world_size", world_size)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
        raise InputError("rank", rank, f"an integer from 0 to {world_size - 1}")
    if batch_size % world_size:
        raise InputError("batch_size", batch_size, f"a multiple of the number of ranks ({world_size})")
    if len(tokens) < context + 1:
        label = getattr(tokens, "label", "the tokens")
        accepted = f"at least {context + 1} tokens (context {context} + 1)"
        raise InputError("data", f"{len(tokens)} tokens", accepted, f"{label} is too short: more text, or a shorter context")
