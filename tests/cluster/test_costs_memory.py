"""Bytes on a device: the published formulas, and what each dial must do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.cluster.architecture import Architecture
from laneway.cluster.costs import memory_of, parameters_of
from laneway.cluster.costs.memory import activation_bytes_of_layer, in_flight, parameters_on_device
from laneway.cluster.layout import Layout

GPT3 = Architecture(96, 12288, 96, 96, 4 * 12288, 51200)


@given(
    heads=st.sampled_from([8, 16, 96]),
    width=st.sampled_from([64, 128]),
    tp=st.sampled_from([1, 2, 8]),
    seq_len=st.sampled_from([512, 2048]),
    batch=st.integers(1, 8),
)
@settings(max_examples=30, deadline=None)
def test_activations_of_a_layer_as_published(heads: int, width: int, tp: int, seq_len: int, batch: int) -> None:
    """Korthikanti et al. 2022, equations 1 to 6."""
    h, a, s, b, t = heads * width, heads, seq_len, batch, tp
    arch = Architecture(4, h, a, a, 4 * h, 1000)
    layout = Layout(tp=t, micro_batch=b)
    sbh = s * b * h

    def found(**change: object) -> float:
        return activation_bytes_of_layer(arch, replace(layout, **change), s, flash=False)  # ty: ignore

    assert found() == pytest.approx(sbh * (10 + 24 / t + 5 * a * s / (h * t)))
    assert found(sequence_parallel=True) == pytest.approx(sbh / t * (34 + 5 * a * s / h))
    assert found(recompute="selective") == pytest.approx(sbh * (10 + 24 / t))
    assert found(recompute="selective", sequence_parallel=True) == pytest.approx(34 * sbh / t)
    assert found(recompute="full") == pytest.approx(2 * sbh)
    assert activation_bytes_of_layer(arch, layout, s, flash=True) == found(recompute="selective")


def test_in_flight() -> None:
    assert in_flight(100, 8) == 8
    assert in_flight(3, 8) == 3
    assert in_flight(100, 8, 3) == pytest.approx(8 * (1 + 7 / 24))
    assert in_flight(100, 1, 1) == 1


def test_states_by_stage_of_zero() -> None:
    layouts = {zero: Layout(dp_shard=64, zero=zero) for zero in (1, 2, 3)}
    found = {zero: memory_of(GPT3, layout, seq_len=2048) for zero, layout in layouts.items()}
    count = parameters_of(GPT3)
    assert found[1].optimizer == pytest.approx(12 * count / 64, rel=1e-3)
    assert found[1].parameters == pytest.approx(2 * count, rel=1e-3)
    assert found[1].gradients == pytest.approx(4 * count, rel=1e-3)
    assert found[2].gradients == pytest.approx(4 * count / 64, rel=1e-3)
    assert found[3].parameters == pytest.approx(2 * count / 64, rel=1e-3)
    assert found[3].total < found[2].total < found[1].total
    replicated = memory_of(GPT3, Layout(dp_replicate=64, zero=3), seq_len=2048)
    assert replicated.optimizer == pytest.approx(12 * count, rel=1e-3)


@pytest.mark.parametrize(
    ("arch", "layout", "states"),
    [
        (Architecture(48, 6144, 64, 64, 4 * 6144, 51200), Layout(tp=8, micro_batch=4, zero=1), 49.0e9),
        (GPT3, Layout(tp=8, pp=8, zero=1), 49.9e9),
    ],
)
def test_states_of_published_models(arch: Architecture, layout: Layout, states: float) -> None:
    """18 bytes a parameter (weight, fp32 gradient, Adam's states) over tp and pp: Korthikanti et al.'s 22B and 175B."""
    found = memory_of(arch, layout, seq_len=2048)
    assert found.parameters + found.gradients + found.optimizer == pytest.approx(states, rel=0.03)


@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    streams=st.sampled_from([2, 4]),
    flash=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_more_streams_need_more(tp: int, pp: int, recompute: str, streams: int, flash: bool) -> None:
    arch = Architecture(16, 1024, 16, 16, 4096, 32000)
    layout = Layout(tp=tp, pp=pp, recompute=recompute)  # ty: ignore
    plain = memory_of(arch, layout, seq_len=1024, flash=flash)
    wide = memory_of(replace(arch, streams=streams), layout, seq_len=1024, flash=flash)
    assert wide.activations > plain.activations
    assert wide.parameters > plain.parameters
    if recompute == "full":
        kept = activation_bytes_of_layer(arch, layout, 1024, flash=flash)
        assert activation_bytes_of_layer(replace(arch, streams=streams), layout, 1024, flash=flash) == streams * kept


def test_recomputation_in_order() -> None:
    layout = Layout(tp=8, pp=8)
    found = [
        memory_of(GPT3, replace(layout, recompute=kind), seq_len=2048, flash=False).activations
        for kind in ("full", "selective", "none")
    ]
    assert found == sorted(found)
    assert found[0] < found[2]


def test_experts_are_divided_by_their_own_degree() -> None:
    moe = Architecture(8, 1024, 16, 16, 2048, 32000, gated=True, experts=16, experts_per_token=2)
    dense, experts, _ = parameters_on_device(moe, Layout(dp_shard=8, ep=8))
    assert experts == pytest.approx(8 * 3 * 1024 * 2048 * 16 / 8)
    assert dense < experts
    whole = memory_of(moe, Layout(dp_shard=8), seq_len=512)
    spread = memory_of(moe, Layout(dp_shard=8, ep=8), seq_len=512)
    assert whole.parameters == pytest.approx(spread.parameters)
    assert spread.buffers < whole.buffers


def test_untied_read_out_and_precisions() -> None:
    tied, untied = replace(GPT3, tied=True), replace(GPT3, tied=False)
    layout = Layout(tp=8, zero=1)
    assert memory_of(untied, layout, seq_len=128).parameters > memory_of(tied, layout, seq_len=128).parameters
    states = {p: memory_of(GPT3, replace(layout, precision=p), seq_len=128).parameters for p in ("bf16", "fp32", "fp8")}  # ty: ignore
    assert states["fp32"] == 2 * states["bf16"] == states["fp8"]
    half = memory_of(GPT3, replace(layout, grad_bytes=2), seq_len=128)
    assert half.gradients == memory_of(GPT3, layout, seq_len=128).gradients / 2
