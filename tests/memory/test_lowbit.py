"""8-bit blocks: the error is within its bound, and what isn't finite doesn't pass for finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.core import InputError
from laneway.memory.lowbit import BLOCK, decode, encode, error_of


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 40), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.integers(0, 10**6),
)
def test_every_element_is_within_its_blocks_bound(shape: list[int], dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(shape, generator=generator) * 10.0 ** torch.randn(shape, generator=generator)).to(dtype)
    encoded = encode(tensor)
    back = decode(encoded)
    assert (back.shape, back.dtype) == (tensor.shape, dtype)
    assert encoded.nbytes == tensor.numel() + 4 * -(-tensor.numel() // BLOCK)
    exact, found = tensor.flatten().double(), back.flatten().double()
    for start in range(0, tensor.numel(), BLOCK):
        block = exact[start : start + BLOCK]
        bound = float(block.abs().max()) * (1 / 254 + torch.finfo(dtype).eps + 1e-6)
        assert bool(((found[start : start + BLOCK] - block).abs() <= bound + torch.finfo(dtype).tiny).all())


def test_encoding_again_changes_nothing() -> None:
    once = decode(encode(torch.randn(1000)))
    assert torch.allclose(decode(encode(once)), once, rtol=1e-6)


def test_error_of_normal_numbers() -> None:
    """Uniform rounding error: step / √12, with a step of the largest of 128 normal numbers / 127."""
    tensor = torch.randn(500, BLOCK)
    expected = float((tensor.abs().amax(dim=1) / 127 / 12**0.5).square().mean().sqrt()) / float(tensor.square().mean().sqrt())
    assert error_of(tensor) == pytest.approx(expected, rel=0.02)
    assert error_of(torch.zeros(7)) == 0.0


def test_blocks_that_are_not_finite_decode_to_nan() -> None:
    tensor = torch.randn(3 * BLOCK)
    tensor[0], tensor[2 * BLOCK] = float("nan"), float("-inf")
    back = decode(encode(tensor))
    assert bool(back[:BLOCK].isnan().all())
    assert bool(back[2 * BLOCK :].isnan().all())
    assert bool(back[BLOCK : 2 * BLOCK].isfinite().all())


def test_integers_are_refused() -> None:
    with pytest.raises(InputError, match="tensor"):
        encode(torch.arange(3))
