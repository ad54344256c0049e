"""Saved tensors that move as 8-bit integers: fewer bytes on the way, with an error that is measured.

A storage is coded piece by piece (``lowbit``), so that the temporaries stay small beside it. What could suffer most stays exact:
integers, fp64, storages that one tensor does not fill, tensors with an infinity or NaN, and tensors without a positive value
(log-probabilities and masks, whose small error would be a large one after the exponential).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

from laneway.memory.lowbit import BLOCK, Encoded, decode, encode

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PIECE, DEVICE_PIECE = 1 << 14, 1 << 20  # elements that are coded at a time on the CPU and elsewhere, multiples of BLOCK
SAMPLE = 8  # one in so many coded tensors of a pass is compared with what it was
SCALE = 4  # bytes


class Int8:
    """The codec of one kind of storage.

    Attributes:
        dtype: of the elements.
        nbytes: of the storage.
        stored: bytes that it takes coded: one an element, and a scale for every 128 of them.
    """

    def __init__(self, dtype: torch.dtype, nbytes: int) -> None:
        self.dtype, self.nbytes = dtype, nbytes
        self.count = nbytes // dtype.itemsize
        self.data_bytes = -(-self.count // SCALE) * SCALE
        self.stored = self.data_bytes + -(-self.count // BLOCK) * SCALE

    @classmethod
    def of(cls, tensor: Tensor) -> Int8 | None:
        """For the storage behind ``tensor``; None where its bytes stay as they are. Waits for the device."""
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if tensor.dtype not in DTYPES or not whole:
            return None
        found = cls(tensor.dtype, tensor.untyped_storage().nbytes())
        if found.stored >= found.nbytes:
            return None
        least, most = torch.aminmax(found._values(tensor.untyped_storage()))
        return found if bool((least.isfinite() & most.isfinite() & (most > 0)).item()) else None

    def encode(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """The coded bytes, on the same device: [count] int8, then the scales."""
        values = self._values(storage)
        coded = torch.empty(self.stored, dtype=torch.uint8, device=storage.device)
        data, scales = self._parts(coded)
        step = _step(storage.device)
        with torch.no_grad():
            for at in range(0, self.count, step):
                piece = encode(values[at : at + step])
                data[at : at + step] = piece.data
                scales[at // BLOCK : at // BLOCK + piece.scales.numel()] = piece.scales
        return coded.untyped_storage()

    def decode(self, coded: torch.UntypedStorage, storage: torch.UntypedStorage) -> None:
        """Fill ``storage`` with what was coded."""
        values, pieces = self._values(storage), self._pieces(coded)
        with torch.no_grad():
            for at, piece in pieces:
                values[at : at + piece.data.numel()] = decode(piece)

    def error(self, coded: torch.UntypedStorage, storage: torch.UntypedStorage) -> Tensor:
        """‖decoded − exact‖ / ‖exact‖ (Frobenius), [] fp64."""
        values = self._values(storage)
        wrong = torch.zeros((), dtype=torch.float64, device=storage.device)
        norm = torch.zeros_like(wrong)
        with torch.no_grad():
            for at, piece in self._pieces(coded):
                exact = values[at : at + piece.data.numel()]
                wrong += vector_norm(decode(piece).float().sub_(exact), dtype=torch.float64).square()
                norm += vector_norm(exact, dtype=torch.float64).square()
        return (wrong / norm).sqrt()

    def _pieces(self, coded: torch.UntypedStorage) -> list[tuple[int, Encoded]]:
        data, scales = self._parts(torch.empty(0, dtype=torch.uint8, device=coded.device).set_(coded))
        found, step = [], _step(coded.device)
        for at in range(0, self.count, step):
            part = data[at : at + step]
            block = at // BLOCK
            found.append((at, Encoded(part, scales[block : block + -(-part.numel() // BLOCK)], part.shape, self.dtype)))
        return found

    def _parts(self, coded: Tensor) -> tuple[Tensor, Tensor]:
        return coded[: self.count].view(torch.int8), coded[self.data_bytes :].view(torch.float32)

    def _values(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, 0, (self.count,), (1,))


def _step(device: torch.device) -> int:
    return PIECE if device.type == "cpu" else DEVICE_PIECE


class CodingErrors:
    """The errors of a sample of the tensors that were coded in a pass: one in ``SAMPLE``, another one each pass."""

    def __init__(self) -> None:
        self._passes = self._coded = 0
        self._found: list[Tensor] = []

    def begin(self) -> None:
        """A pass begins."""
        self._passes += 1
        self._coded, self._found = 0, []

    def see(self, codec: Int8, coded: torch.UntypedStorage, storage: torch.UntypedStorage) -> None:
        """A storage was coded."""
        if (self._coded + self._passes) % SAMPLE == 0 or not self._found:
            self._found.append(codec.error(coded, storage))
        self._coded += 1

    def mean_and_most(self) -> tuple[float, float] | None:
        """Of the pass; None where nothing was coded."""
        if not self._found:
            return None
        errors = torch.stack(self._found)
        return float(errors.mean()), float(errors.max())
