"""Where the parts of paths lie in the gradients that were found. It stays as long as the same parameters have gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laneway.connections.kernels.cpu.gradients import SEGMENT, Segments
from laneway.connections.path_parts import Part, Parts

Integers = NDArray[np.int64]


class Table:
    """Of the parts that this rank adds to a sum, in the order of ``found``.

    Args:
        found: the parts of each gradient.
        paths: how many there are.
    """

    def __init__(self, found: Sequence[Parts], paths: int) -> None:
        self.found, self._paths = list(found), paths
        lines = [(place, part) for place, parts in enumerate(found) if parts.counts for part in parts.parts if part.size]
        self.parts: list[Part] = [part for _, part in lines]
        self.owners = [part.path for part in self.parts]
        self._which = np.array([place for place, _ in lines], np.int64)
        self._starts = np.array([part.start * part.piece.width for part in self.parts], np.int64)
        self._segments = np.zeros(len(lines), SEGMENT)
        self._segments["size"], self._segments["path"] = [part.size for part in self.parts], self.owners
        self._padded: Tensor | None = None
        self._strides: dict[int, tuple[Integers, Integers]] = {}
        self._sampled: dict[int, Tensor] = {}

    def of(self, found: Sequence[Parts]) -> bool:
        """Whether the table is that of these parts."""
        return len(found) == len(self.found) and all(a is b for a, b in zip(found, self.found, strict=True))

    def segments(self, gradients: Sequence[Tensor]) -> Segments | None:
        """What compiled kernels read; None where they can't: other types than fp32 and bf16, gaps,
        or gradients elsewhere than in the host's memory."""
        if not all(g.is_cpu and g.dtype in (torch.float32, torch.bfloat16) and g.is_contiguous() for g in gradients):
            return None
        begins = np.array([g.data_ptr() for g in gradients], np.uint64)
        sizes = np.array([g.itemsize for g in gradients], np.int64)
        self._segments["data"] = begins[self._which] + (self._starts * sizes[self._which]).astype(np.uint64)
        self._segments["narrow"] = sizes[self._which] == 2
        return self._segments

    def views(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The parts themselves, flat."""
        return [
            gradients[place].reshape(-1)[start : start + part.size]
            for place, start, part in zip(self._which.tolist(), self._starts.tolist(), self.parts, strict=True)
        ]

    def by_path(self, values: Tensor) -> Tensor:
        """A number of each part, one or more → [paths, most parts of a path], zero where there is none."""
        # By index and in a fixed order: a scattered sum may differ in its last bits between two ranks.
        return torch.cat([values, values.new_zeros(1)])[self._places(values.device)]

    def _places(self, device: torch.device) -> Tensor:
        if self._padded is None:
            of_path: list[list[int]] = [[] for _ in range(self._paths)]
            for place, path in enumerate(self.owners):
                of_path[path].append(place)
            width = max(map(len, of_path))
            padded = [places + [len(self.owners)] * (width - len(places)) for places in of_path]
            self._padded = torch.tensor(padded, device=device)
        return self._padded

    def strides(self, sample: int) -> tuple[Integers, Integers]:
        """First and distance of the values of each part that a sample of its whole piece has."""
        if sample not in self._strides:
            steps = np.array([part.stride(sample) for part in self.parts], np.int64)
            self._strides[sample] = -np.array([part.offset for part in self.parts], np.int64) % steps, steps
        return self._strides[sample]

    def sampled(self, sample: int, device: torch.device) -> Tensor:
        """The path of each value where the samples of all parts lie one behind the other."""
        if sample not in self._sampled:
            lines = zip(*self.strides(sample), self.parts, strict=True)
            sizes = [len(range(first, part.size, step)) for first, step, part in lines]
            self._sampled[sample] = torch.repeat_interleave(torch.tensor(self.owners), torch.tensor(sizes)).to(device)
        return self._sampled[sample]
