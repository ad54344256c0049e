"""``GradientDropper``: an all-reduce over a slow level in which most entries of a gradient stay at home for a step.

Each member owns a part of the vector. It sends every other owner the entries of that one's part that are large; the owner sums
what came and sends all members the entries of the sum that are large; what either leaves out is its **residual** and joins its
next gradient (two-sided error feedback: DoubleSqueeze, arXiv 1905.05957; thresholds: Deep Gradient Compression, arXiv
1712.01887). The sum is thinned again because members keep different entries: the sum of four thinned gradients is nearly dense.

**Nothing is lost.** For each entry, Σ over members of gradient + old residual = result + Σ over members of new residual. With
residuals in fp64 that holds exactly, without a rounding, as long as what meets at an entry (gradients of the members, residuals)
spans less than 2^28. With residuals in fp32 each addition rounds once, and what is sent plus what stays is the sum, bit for bit.

**Sizes are fixed** by the vector's length, the share and the wire (sizes.py), so members exchange messages without first telling
each other sizes, and a step with large gradients can't send more than was planned.

**Not finite.** Where a member's values for a part are not all finite, the result of that part is NaN on all members, for the loop
to skip the step, and their residuals of the part stay as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from threading import local
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laneway.cluster.drop.exchange import Members
from laneway.cluster.drop.pieces import Piece, Pieces
from laneway.cluster.drop.residuals import Residuals
from laneway.cluster.drop.rounds import Round
from laneway.cluster.drop.sizes import UNITS, check_drop, exchange_bytes
from laneway.cluster.drop.state import adopt_state, check_state, load_state, save_state
from laneway.cluster.reduce.scheme import WIRES
from laneway.core import InputError, choice, positive_int

__all__ = ["GradientDropper"]

Key = Pieces | Sequence[Piece] | str | tuple[Pieces | Sequence[Piece] | str, int, int]
"""What lies in a vector: pieces, or the name of a parameter; with (first, last + 1): that part of it."""
RESIDUALS = {"fp64": torch.float64, "fp32": torch.float32}


class GradientDropper:
    """Sums gradients over a group and sends only a part of them in each step.

    Args:
        drop: share of entries (or blocks) that stays at home, 0 to below 1; a call may name another.
        wire: how values travel, "fp32", "bf16" or "int8"; what rounding takes from them goes to the residual.
        unit: what is kept or dropped as one: "entries", "blocks" of 64, or "auto": blocks from a share of 0.8 on.
        feedback: keep what was not sent. Without it, dropped entries are lost: for comparison only.
        residual: "fp64" (8 bytes for each entry of this rank's shards, exact) or "fp32" (4 bytes, rounds once a step).
        smoothing: weight of earlier steps in the scale of a parameter.
        sample: entries of a vector that are looked at to find thresholds, at least 32 of each parameter.
        warmup: steps in which the kept share falls from nearly all to 1 − drop, geometrically.

    Attributes:
        sent_bytes: bytes of messages that this rank has sent.
        dense_bytes: what the same exchanges would have sent with all entries in fp32.
        calls: exchanges.

    Raises:
        InputError: a value out of range.
    """

    def __init__(
        self,
        drop: float = 0.0,
        *,
        wire: str = "fp32",
        unit: str = "auto",
        feedback: bool = True,
        residual: str = "fp64",
        smoothing: float = 0.9,
        sample: int = 4096,
        warmup: int = 0,
    ) -> None:
        self.drop, self.wire, self.unit = check_drop(drop), choice("wire", wire, WIRES), choice("unit", unit, UNITS)
        self.warmup = positive_int("warmup", warmup, 0)
        dtype = RESIDUALS[choice("residual", residual, RESIDUALS)] if feedback else None
        self._residuals = Residuals(positive_int("sample", sample, 32), check_drop(smoothing, "smoothing"), dtype)
        self._rooms = local()
        self.sent_bytes = self.dense_bytes = self.calls = 0

    @property
    def step(self) -> int:
        """Steps begun before this one: a new one begins with the first vector that comes again."""
        return self._residuals.step

    def all_reduce(
        self,
        shard: Tensor,
        group: dist.ProcessGroup,
        key: Key,
        *,
        drop: float | None = None,
        wire: str | None = None,
    ) -> Tensor:
        """Sum over the group, in place; the result has the same bits on all members.

        Args:
            shard: fp32 [n], contiguous, of the same n on all members.
            group: with explicit timeout; only one thread uses it at a time.
            key: what lies in the shard, n entries; or (what lies in a longer vector, first, last + 1) where the shard is a part.
            drop, wire: of this call; None: the dropper's. The same on all members.

        Returns: ``shard``.

        Raises:
            InputError: another kind of tensor, or a key of another length.
        """
        pieces = _pieces(key, shard)
        wanted = self.drop if drop is None else check_drop(drop)
        wire = self.wire if wire is None else choice("wire", wire, WIRES)
        if shard.numel() == 0:
            return shard
        members = Members(group, shard.device)
        slot = self._residuals.slot(pieces, shard.device)
        share = self.share(wanted)
        if len(members) == 1:
            share, wire = 0.0, "fp32"
        self.sent_bytes += Round(shard, slot, members, share, wire, self.unit, self._rooms.__dict__).run()
        self.dense_bytes += exchange_bytes(shard.numel(), len(members), members.place, 0.0)
        self.calls += 1
        return shard

    def share(self, drop: float) -> float:
        """The share that is dropped in this step, where ``drop`` is what warm-up leads to."""
        ahead = (self.step + 1) / (self.warmup + 1)
        return drop if ahead >= 1 else 1 - (1 - drop) ** ahead

    def planned_bytes(self, entries: int, members: int, place: int, *, drop: float | None = None, wire: str | None = None) -> int:
        """Bytes that a call in this step sends, exactly.

        Args:
            entries: of the shard.
            members: of the group.
            place: this rank's in the group.
            drop, wire: as in the call.

        Raises:
            InputError: a value out of range.
        """
        if members == 1:
            return 0
        share = self.share(self.drop if drop is None else check_drop(drop))
        return exchange_bytes(entries, members, place, share, self.wire if wire is None else wire, self.unit)

    def carry_into(self, flat: Tensor, key: Key) -> int:
        """Add residuals of which this rank no longer holds the shard to its own gradients, before the first level.

        The sum over the ranks is then what it would have been. Costs nothing where there are none.

        Args:
            flat: gradients of this rank alone, not yet divided or reduced, [n], any float type; residuals are in the units of
                what ``all_reduce`` was given, so a mean must be taken after the sum. They round to its type.
            key: what lies in it.

        Returns: how many entries were added.

        Raises:
            InputError: a key of another length.
        """
        return self._residuals.carry_into(flat, _pieces(key, flat, None))

    def release(self) -> None:
        """Stop dropping: from now on ``carry_into`` adds all residuals to gradients. Not while a call is under way."""
        self._residuals.release()

    def residuals(self) -> list[tuple[Piece, Tensor]]:
        """What this rank has not sent, by runs of parameters; copies, zeros left out."""
        slots = [each for slot in self._residuals.slots.values() for each in slot.strays()]
        return slots + [(piece, run.clone()) for piece, run in self._residuals.strays]

    def thresholds(self) -> dict[Piece, float]:
        """Each parameter's scale as smoothed over the steps: its entries are kept from a multiple of it on, common to all."""
        found = self._residuals.slots.values()
        pairs = [(slot.pieces.pieces, slot.pattern.scales().tolist()) for slot in found]
        return {piece: scale for pieces, scales in pairs for piece, scale in zip(pieces, scales, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on bit for bit: tensors (copies), names and numbers. It differs between ranks."""
        return save_state(self._residuals)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo of ``state_dict``; what was there before is gone. Vectors may have changed since: residuals go by parameter.

        Raises:
            InputError: no such state.
        """
        load_state(self._residuals, check_state(state))

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Take over the residuals of a rank that there no longer is: ``carry_into`` adds them to this rank's gradients.

        Each old rank's state must be loaded or adopted by exactly one new rank (old rank r by r mod the new number, say).
        Residuals are parts of sums: where the loss is a mean over ranks, they weigh old number / new number of what they did.

        Raises:
            InputError: no such state.
        """
        adopt_state(self._residuals, check_state(state))


def _pieces(key: Any, tensor: Tensor, dtype: torch.dtype | None = torch.float32) -> Pieces:
    """The key as pieces, if it fits the tensor."""
    if tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.is_floating_point() or dtype not in (None, tensor.dtype):
        wanted = "any float type" if dtype is None else "float32"
        raise InputError("tensor", f"{tensor.dtype} {list(tensor.shape)}", f"one contiguous dimension of {wanted}")
    ranged = isinstance(key, tuple) and len(key) == 3 and isinstance(key[1], int)
    whole, low, high = key if ranged else (key, 0, tensor.numel())
    if isinstance(whole, str) and whole:
        whole = Pieces.of({whole: high})
    elif isinstance(whole, list | tuple):
        whole = Pieces(tuple(whole))
    if not isinstance(whole, Pieces):
        raise InputError("key", key, "a parameter's name, or the Pieces that lie in the tensor")
    found = _shard(whole, low, high) if ranged else whole
    if found.numel != tensor.numel():
        raise InputError("key", f"{found.numel} entries", f"as many as the tensor has, {tensor.numel()}")
    return found


@lru_cache(maxsize=4096)
def _shard(pieces: Pieces, low: int, high: int) -> Pieces:
    return pieces.shard(low, high)
