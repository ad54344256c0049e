"""What the compiler makes of every launch, for a GPU that is not there: nothing here says how fast it runs.

The launches are those the backend makes (laneway.bench.triton_aot records them), so sizes and constants are the real ones.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="no triton here (it is published for Linux)")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are never compiled", allow_module_level=True)

from laneway.bench import triton_aot
from laneway.core import InputError

SHARED_BYTES = 227 * 1024  # for one program of sm_90
REGISTERS = 255  # for one thread
COUNTS = (1, 2, 15, 16, 17, 32, 33, 100, 128, 1000)
B16, F32 = torch.bfloat16, torch.float32


def keys(tokens: int, dtype: torch.dtype) -> set[str]:
    return {triton_aot.key(launch, 90) for launch in triton_aot.launches(4, 64, dtype, tokens)}


@pytest.mark.parametrize("dtype", [B16, F32])
def test_no_token_count_is_compiled_for(dtype):
    """Triton's own cache keys, over all functions: ten token counts make no more of them than one."""
    seen = {tokens: keys(tokens, dtype) for tokens in COUNTS}
    assert set.union(*seen.values()) == seen[1000]  # from 257 tokens on the gradient of φ is summed in two stages
    assert all(seen[tokens] == seen[1] for tokens in COUNTS[:-1])
    assert len(seen[1000]) == len(seen[1]) + 1


def test_iterations_are_not_compiled_for():
    few, many = ({triton_aot.key(x, 90) for x in triton_aot.launches(4, 64, F32, 5, iterations=k)} for k in (1, 33))
    assert few == many


def test_the_width_decides_how_a_token_is_cut():
    """Programs a token: a function of C, whatever the token count."""
    from laneway.connections.kernels.triton.launch import Site

    spans = {(n, c): Site.of(torch.empty(n, 4, c)).spans for n in (1, 4096) for c in (33, 512, 513, 7168)}
    assert spans == {(n, c): s for n in (1, 4096) for c, s in ((33, 1), (512, 1), (513, 2), (7168, 14))}


def check(rows: list[triton_aot.Row], streams: int) -> None:
    for row in rows:
        assert row["registers"] <= REGISTERS, row
        assert row["shared_bytes"] <= SHARED_BYTES, row
        assert row["tf32_products"] == 0, row
        if streams <= 4:
            assert row["spill_store_bytes"] == row["spill_load_bytes"] == 0, row
    if rows[0]["dtype"] == "bfloat16":
        products = {"streams", "gradient", "projection_gradient"}
        assert {row["kernel"] for row in rows if row["bf16_products"]} == products, "tensor cores do the products of bf16"


@pytest.mark.timeout(600)
def test_a_boundary_of_bf16_streams_compiles_without_spills():
    """``cross`` and ``cross_backward``, four streams of width 4096, for sm_90."""
    found = [x for x in triton_aot.launches(4, 4096, B16, 48) if x.function in ("cross", "cross_backward")]
    check([triton_aot.row(x, 4, 4096, B16, 90) for x in triton_aot.distinct(found, 90)], 4)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("streams", "dtype"), [(4, B16), (4, F32), (8, B16), (8, F32)])
def test_every_launch_compiles(streams, dtype):
    """Up to four streams without spills; eight may spill, and do."""
    check(triton_aot.rows([(streams, 4096, dtype)]), streams)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("dtype", [B16, F32])
def test_every_launch_compiles_for_rocm(dtype):
    rows = triton_aot.rows([(4, 4096, dtype)], architecture="gfx942")
    assert {row["kernel"] for row in rows} >= {"streams", "gradient", "finish", "finish_backward", "projection_gradient"}
    assert all(row["tf32_products"] == 0 and row["shared_bytes"] <= 64 * 1024 for row in rows)


def test_an_interpreting_process_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(InputError, match="TRITON_INTERPRET: got '1'; accepted: unset"):
        triton_aot.rows()
