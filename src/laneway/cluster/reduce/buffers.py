"""Memory that is used again: fresh tensors of some megabytes would fault their pages in inside the receive path."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["Pool", "Scratch"]


class Scratch:
    """Workspaces of one thread, by purpose; each as large as the largest that was asked for."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, purpose: str, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D tensor of any content, good until the same purpose is asked for again."""
        key = (purpose, dtype, device)
        held = self._held.get(key)
        if held is None or held.numel() < length:
            held = self._held[key] = torch.empty(length, dtype=dtype, device=device)
        return held[:length]


class Pool:
    """Buffers that one thread takes and another gives back."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D tensor of at least this length and of any content."""
        with self._lock:
            fits = [each for each in self._free if each.dtype == dtype and each.device == device and each.numel() >= length]
            if fits:
                best = min(fits, key=Tensor.numel)
                self._free = [each for each in self._free if each is not best]
                return best
        return torch.empty(length, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        """Back for others; at most eight are kept, the largest."""
        with self._lock:
            self._free = sorted([*self._free, buffer], key=Tensor.numel)[-8:]
