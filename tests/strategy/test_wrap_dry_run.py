"""175 billion parameters on 256 and 4096 fake ranks: each rank holds what a count by hand says."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from laneway.cluster.architecture import Architecture
from laneway.cluster.layout import Layout
from laneway.core import InputError, LanewayError
from laneway.strategy.decoder import decoder
from laneway.strategy.dry_run import dry_run

GPT3 = Architecture(layers=96, hidden=12288, heads=96, kv_heads=96, ffn=4 * 12288, vocab=51200)
WIDE = Architecture(layers=96, hidden=12288, heads=96, kv_heads=8, ffn=32768, vocab=51200, gated=True, tied=False, streams=4)


def shapes(arch: Architecture, tp: int, layers: int, first: bool, last: bool) -> list[tuple[int, ...]]:
    """Shapes of a rank's parameters before they are sharded, counted from the architecture alone."""
    c, d, n = arch.hidden, arch.hidden // arch.heads, arch.streams
    kv = arch.kv_heads * d
    block: list[tuple[int, ...]] = [(c,), (c,), (c // tp, c), (kv // tp, c), (kv // tp, c), (c, c // tp)]
    block += [(arch.ffn // tp, c)] * (2 if arch.gated else 1) + [(c, arch.ffn // tp)]
    if n > 1:
        maps = 2 * n + n * n
        block += [(maps, n * c), (maps,), (3,)] * 2
    found = layers * block
    if first:
        found.append((arch.vocab // tp, c))
    if last:
        found.append((c,))
        if n > 1:
            found += [(n, n * c), (n,), (1,)]
        if not first or not arch.tied:
            found.append((arch.vocab // tp, c))
    return found


def held(arch: Architecture, layout: Layout, layers: int, first: bool, last: bool) -> int:
    """Elements on the rank with the largest shards: rows are divided, rounded up."""
    split = shapes(arch, layout.tp, layers, first, last)
    return sum(math.ceil(shape[0] / layout.dp_shard) * math.prod(shape[1:]) for shape in split)


CASES = [
    (GPT3, Layout(tp=8, pp=8, dp_shard=4), 12),
    (GPT3, Layout(tp=8, pp=16, dp_shard=8, dp_replicate=4, sequence_parallel=True, recompute="full"), 6),
    (WIDE, Layout(tp=8, pp=8, dp_shard=32, dp_replicate=2, chunks=2), 12),
]


@pytest.mark.parametrize(
    ("arch", "layout", "layers"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_a_rank_holds_what_a_count_says(arch, layout, layers):
    found = dry_run(layout, arch, layout.world)
    count = held(arch, layout, layers, first=True, last=False)
    assert (found.parameters_on_rank, found.bytes_on_rank) == (count, 4 * count)
    assert found.layers_on_rank == layers
    assert found.groups == {"pp": layout.pp, "dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "cp": 1, "tp": 8}
    assert 0 < found.seconds < 120
    assert 1e7 < found.peak_bytes < 4e9  # of this process: no weight has storage
    assert not dist.is_initialized()


def test_the_last_rank_holds_the_read_out():
    layout = Layout(tp=2, pp=2, dp_shard=2)
    arch = Architecture(layers=3, hidden=64, heads=8, kv_heads=4, ffn=96, vocab=40, gated=True, tied=True, streams=4)
    for rank, (layers, first) in {0: (2, True), layout.world - 1: (1, False)}.items():
        whole = shapes(arch, 2, layers, first, not first)
        # chunks of ceil(rows / ranks): the last rank has what is left
        last = [(max(0, shape[0] - math.ceil(shape[0] / 2)), *shape[1:]) for shape in whole]
        want = held(arch, layout, layers, True, False) if first else sum(map(math.prod, last))
        assert dry_run(layout, arch, rank=rank).parameters_on_rank == want


def test_gpt3_has_175_billion_parameters():
    assert sum(p.numel() for p in decoder(GPT3).parameters()) == pytest.approx(175e9, rel=0.01)


@pytest.mark.parametrize(("kv_heads", "gated"), [(4, True), (2, False), (1, True)])
def test_a_decoder_of_any_shape_computes_and_is_causal(kv_heads, gated):
    arch = Architecture(layers=2, hidden=16, heads=4, kv_heads=kv_heads, ffn=24, vocab=19, gated=gated, streams=3)
    model = decoder(arch, context=8, device="cpu")
    tokens = torch.randint(0, 19, (2, 8))
    logits = model(tokens)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 19
    assert torch.equal(model(changed)[:, :5], logits[:, :5])
    assert not torch.equal(model(changed)[:, 5:], logits[:, 5:])
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_grouped_attention_is_attention_with_repeated_heads():
    arch = Architecture(layers=1, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=19, gated=True)
    grouped = decoder(arch, context=8, device="cpu").double()
    whole = decoder(Architecture(1, 16, 4, 4, 24, 19, gated=True), context=8, device="cpu").double()
    state = grouped.state_dict()
    q, k, v = state["blocks.0.attention.qkv.weight"].split([16, 8, 8])
    k, v = (part.view(2, 4, 16).repeat_interleave(2, 0).flatten(0, 1) for part in (k, v))
    whole.load_state_dict(state | {"blocks.0.attention.qkv.weight": torch.cat([q, k, v])})
    tokens = torch.randint(0, 19, (2, 8))
    torch.testing.assert_close(grouped(tokens), whole(tokens), rtol=1e-12, atol=1e-12)


def test_what_can_not_be_tried_out_is_refused():
    small = Architecture(1, 64, 8, 8, 96, 40)
    with pytest.raises(LanewayError, match=r"the plan needs 8 processes \(dp_shard 8\), but 4 run"):
        dry_run(Layout(dp_shard=8), small, 4)
    assert not dist.is_initialized()
    with pytest.raises(InputError, match="rank: got 8; accepted: 0 to 7"):
        dry_run(Layout(dp_shard=8), small, rank=8)
    with pytest.raises(InputError, match=r"arch.experts"):
        dry_run(Layout(), Architecture(1, 8, 2, 2, 8, 11, experts=2, experts_per_token=1))
    with pytest.raises(InputError, match=r"layout.tp: got 3; accepted: a divisor of the model's heads = 8"):
        dry_run(Layout(tp=3), small)
