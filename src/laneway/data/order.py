"""A shuffle that needs no memory: a keyed permutation of 0 … count−1, computed item by item.

A balanced Feistel network permutes the numbers of 2k bits whatever its round function; a result outside the range is
permuted again until it falls inside (cycle walking), which keeps it a permutation of the range. At most 4 tries are
expected per item, as the network's domain is below 4 × count for count > 16. Nothing is drawn from a library's random
generator, so the order for a seed is the same on every machine and in every version.
"""

from __future__ import annotations

import hashlib

import numpy as np

ROUNDS = 8
_MIN_HALF_BITS = 2  # a smaller domain would leave too few different shuffles of a handful of items


class Permutation:
    """Permutation number ``key`` of the integers below ``count``; calling it maps an int64 array of positions to items."""

    def __init__(self, count: int, key: bytes) -> None:
        self.count = count
        half_bits = max(_MIN_HALF_BITS, (max(count - 1, 1).bit_length() + 1) // 2)
        self._shift = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        raw = hashlib.blake2b(key, digest_size=8 * ROUNDS, person=b"laneway order").digest()
        self._keys = np.frombuffer(raw, dtype="<u8")

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Items at ``positions`` (each in 0 … count−1); same shape, int64."""
        items = self._network(positions.astype(np.uint64))
        while (outside := items >= self.count).any():
            items[outside] = self._network(items[outside])
        return items.astype(np.int64)

    def _network(self, items: np.ndarray) -> np.ndarray:
        left, right = items >> self._shift, items & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._shift) | right


def _mix(value: np.ndarray) -> np.ndarray:
    """Scramble 64-bit words (the finaliser of SplitMix64: Steele, Lea & Flood 2014); uint64 arithmetic wraps."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def number(key: bytes, below: int) -> int:
    """A number in 0 … below−1 that depends on nothing but ``key``."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=16, person=b"laneway number").digest(), "little") % below
