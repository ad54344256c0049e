"""Compute: parameters and FLOPs of known models, efficiency by shape, what each dial must do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.cluster.architecture import Architecture
from laneway.cluster.costs import Calibration, flops_per_token, parameters_of
from laneway.cluster.costs.layers import Share, beside_host, layer_work, optimizer_seconds, readout_work
from laneway.cluster.costs.matmul import Machine, efficiency, matmul_seconds, peak_flops
from laneway.cluster.topology import Device
from laneway.core import InputError

A100 = Device("A100", {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12}, 80e9, 2.039e12, 400, "test")
FAST = Calibration(dispatch_s=0.0, kernel_s=0.0)
MACHINE = Machine.of(A100, "bf16", FAST)
LAYER = Architecture(24, 2048, 16, 16, 8192, 51200)


@pytest.mark.parametrize(
    ("arch", "billions"),
    [
        (Architecture(96, 12288, 96, 96, 4 * 12288, 51200), 174.6),
        (Architecture(30, 3072, 32, 32, 4 * 3072, 51200), 3.56),
        (Architecture(48, 8192, 64, 64, 4 * 8192, 51200), 39.1),
        (Architecture(32, 4096, 32, 8, 14336, 128256, gated=True, tied=False), 8.03),
        (Architecture(80, 8192, 64, 8, 28672, 128256, gated=True, tied=False), 70.6),
        (Architecture(32, 4096, 32, 8, 14336, 32000, gated=True, tied=False, experts=8, experts_per_token=2), 46.7),
    ],
)
def test_parameters_of_known_models(arch: Architecture, billions: float) -> None:
    assert parameters_of(arch) / 1e9 == pytest.approx(billions, rel=0.003)


def test_flops_per_token_as_published() -> None:
    """Narayanan et al. 2021, equation 3, without recomputation: 72·l·h²·(1 + s/(6h) + V/(12·l·h))."""
    layers, hidden, seq_len, vocab = 96, 12288, 2048, 51200
    wanted = 72 * layers * hidden**2 * (1 + seq_len / (6 * hidden) + vocab / (12 * layers * hidden))
    arch = Architecture(layers, hidden, 96, 96, 4 * hidden, vocab)
    assert flops_per_token(arch, seq_len) == pytest.approx(wanted, rel=1e-9)


def test_only_active_experts_count() -> None:
    moe = Architecture(8, 1024, 16, 16, 4096, 32000, experts=64, experts_per_token=1)
    dense = replace(moe, experts=0, experts_per_token=0)
    assert flops_per_token(moe, 512) == pytest.approx(flops_per_token(dense, 512), rel=0.02)
    assert parameters_of(moe) > 20 * parameters_of(replace(dense, vocab=1))


@given(m=st.integers(1, 20000), n=st.integers(1, 20000), k=st.integers(1, 20000))
@settings(max_examples=60, deadline=None)
def test_a_product_is_never_faster_than_its_two_bounds(m: int, n: int, k: int) -> None:
    seconds = matmul_seconds(m, n, k, MACHINE)
    assert seconds >= 2.0 * m * n * k / MACHINE.flops
    assert seconds >= 2 * (m * k + k * n + m * n) / MACHINE.bandwidth * (1 - 1e-12)
    assert 0 < efficiency(m, n, k, 1, 108, 32.0) <= 1


def test_tiles_waves_and_short_inner_dimensions() -> None:
    assert efficiency(8192, 8192, 8192, 1, 108, 32.0) > 0.9
    assert efficiency(129, 4096, 4096, 1, 108, 32.0) < efficiency(128, 4096, 4096, 1, 108, 32.0)
    one_wave, two_waves = efficiency(256, 128 * 108, 4096, 1, 108, 0.0), efficiency(256, 128 * 109, 4096, 1, 108, 0.0)
    assert one_wave == 1.0
    assert two_waves < 0.95
    assert efficiency(4096, 4096, 64, 1, 108, 32.0) < 0.75 * efficiency(4096, 4096, 4096, 1, 108, 32.0)
    assert matmul_seconds(1, 4096, 4096, MACHINE) > 0.9 * 2 * 4096 * 4096 / MACHINE.bandwidth


@given(share=st.floats(0, 3))
def test_host_and_device_beside_each_other(share: float) -> None:
    both = beside_host(1.0, share)
    assert max(1.0, share) <= both <= 1.0 + share
    assert beside_host(1.0, 0.0, 0.5) == pytest.approx(1.0)


def share(**change: object) -> Share:
    return replace(Share(2, 2048, 1, 1, 1, False), **change)  # ty: ignore


def test_backward_is_twice_forward() -> None:
    work = layer_work(LAYER, share(), MACHINE, replace(FAST, flash_attention=False)).whole
    assert work.backward == pytest.approx(2 * work.forward, rel=0.1)


def test_a_layer_takes_what_its_flops_take() -> None:
    """24·s·b·h² and attention at a sixth of it: within the elementwise share of the ideal."""
    work = layer_work(LAYER, share(), MACHINE, FAST).whole
    ideal = 2 * 2048 * (24 * 2048**2) / MACHINE.flops
    assert ideal < work.forward < 1.6 * ideal


@pytest.mark.parametrize("streams", [2, 4, 8])
def test_streams_cost_their_traffic(streams: int) -> None:
    """Two sites of (3n + 2)·C elements a token forward, and no less."""
    plain = layer_work(LAYER, share(), MACHINE, FAST).whole
    wide = layer_work(replace(LAYER, streams=streams), share(), MACHINE, FAST).whole
    floor = 2 * 2 * 2048 * (3 * streams + 2) * 2048 * 2 / MACHINE.bandwidth
    assert floor <= wide.forward - plain.forward < 1.6 * floor
    assert wide.backward - plain.backward >= 2 * floor


def test_dials_of_a_layer() -> None:
    whole = layer_work(LAYER, share(), MACHINE, FAST).whole.forward
    split = layer_work(LAYER, share(tp=4), MACHINE, FAST).whole.forward
    assert whole / 4 < split < whole / 2
    assert layer_work(LAYER, share(tp=4, sequence_parallel=True), MACHINE, FAST).whole.forward < split
    assert layer_work(LAYER, share(cp=4), MACHINE, FAST).whole.forward < whole / 3
    unfused = layer_work(LAYER, share(), MACHINE, replace(FAST, flash_attention=False)).whole.forward
    assert unfused > whole
    eager = Machine.of(A100, "bf16", replace(FAST, elementwise_factor=2.5))
    assert layer_work(LAYER, share(), eager, FAST).whole.forward > whole
    moe = replace(LAYER, experts=8, experts_per_token=2)
    assert layer_work(moe, share(), MACHINE, FAST).whole.forward > 1.3 * whole
    assert readout_work(LAYER, share(tp=4), MACHINE, FAST).forward < readout_work(LAYER, share(), MACHINE, FAST).forward
    assert optimizer_seconds(1e9, MACHINE) == pytest.approx(34e9 / MACHINE.bandwidth)


def test_precision_and_missing_peaks() -> None:
    assert peak_flops(A100, "fp8") == 312e12
    assert peak_flops(A100, "fp32") == 156e12
    with pytest.raises(InputError, match=r"device\.flops"):
        peak_flops(replace(A100, flops={}), "bf16")
    hopper = replace(A100, name="H100", flops={"bf16": 989e12, "fp8": 1979e12})
    narrow = Machine.of(hopper, "fp8", FAST)
    assert narrow.wide_flops < narrow.flops
    assert Machine.of(hopper, "bf16", FAST).flops / 989e12 < MACHINE.flops / 312e12
