"""Parameters stay wide, out of weight decay, and whole under FSDP2."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import random_site

import laneway as lw
from laneway.models.gpt import GPT, GPTConfig

CASTS = {
    "to": lambda m: m.to(torch.bfloat16),
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),
    "inside another module": lambda m: torch.nn.Sequential(m).to(torch.bfloat16)[0],
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("manifold", ["sinkhorn", "birkhoff", "kronecker"])
def test_casts_leave_the_maps_bit_for_bit(cast, manifold):
    site = random_site(8, 4, manifold)
    before = copy.deepcopy(site.state_dict())
    site = CASTS[cast](site)
    for name, value in site.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name])
    h, merge = site(torch.randn(3, 4, 8).bfloat16())
    assert merge(h).dtype == torch.bfloat16


def test_the_rest_of_a_model_is_cast():
    model = GPT(GPTConfig(dim=32, layers=1, context=8)).to(torch.bfloat16)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes["embedding.weight"] == torch.bfloat16
    maps = [name for name in dtypes if name.rsplit(".", 1)[1] in ("fn", "base", "scale")]
    assert len(maps) == 9
    assert all(dtypes[name] == torch.float32 for name in maps)
    assert model(torch.randint(0, 256, (1, 8))).dtype == torch.bfloat16


def test_double_widens():
    site = lw.HyperConnection(8, 4).double()
    assert site.fn.dtype == torch.float64


def test_meta_device_and_to_empty():
    site = lw.HyperConnection(8, 4, device="meta")
    assert site.fn.is_meta
    site = site.to_empty(device="cpu")
    site.reset_parameters()
    assert torch.equal(site.base, lw.HyperConnection(8, 4).base)


def test_bf16_weights_load_into_fp32_maps():
    site, other = random_site(8, 4), lw.HyperConnection(8, 4)
    other.load_state_dict({k: v.bfloat16() for k, v in site.state_dict().items()})
    assert other.fn.dtype == torch.float32


def test_maps_narrowed_by_force_are_refused():
    site = lw.HyperConnection(8, 4)
    site.fn.data = site.fn.data.bfloat16()
    with pytest.raises(TypeError, match="shard_connections"):
        site(torch.randn(2, 4, 8))


def test_param_groups_cover_everything_once():
    model = GPT(GPTConfig(dim=32, layers=2, context=8))
    decay, keep = lw.param_groups(model, 0.1)
    assert (decay["weight_decay"], keep["weight_decay"]) == (0.1, 0.0)
    every = [id(p) for p in (*decay["params"], *keep["params"])]
    assert sorted(every) == sorted(id(p) for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    kept = {names[id(p)] for p in keep["params"]}
    assert {n for n in names.values() if "site" in n or "readout" in n or "norm" in n or "embedding" in n} == kept
    assert all(p.ndim == 2 for p in decay["params"])


def test_param_groups_skip_frozen_and_name_bad_input():
    site = lw.HyperConnection(8, 4)
    site.fn.requires_grad_(False)
    (only,) = lw.param_groups(site)
    assert [p is site.fn for p in only["params"]] == [False, False]
    with pytest.raises(lw.InputError, match="weight_decay: got -1"):
        lw.param_groups(site, -1)


def test_deepcopy_is_independent():
    site = random_site(8, 4)
    twin = copy.deepcopy(site)
    with torch.no_grad():
        twin.fn.zero_()
    assert site.fn.any()


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def _sharded(one_rank, first) -> GPT:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = GPT(GPTConfig(dim=32, layers=1, context=8))
    if first:
        lw.shard_connections(model, one_rank)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=one_rank, mp_policy=policy)
    fully_shard(model, mesh=one_rank, mp_policy=policy)
    return model


@pytest.mark.distributed
def test_fsdp_mixed_precision_keeps_the_maps_in_fp32(one_rank):
    model, seen = _sharded(one_rank, first=True), []
    hook = model.blocks[0].site_attention.register_forward_hook(lambda m, *_: seen.append(m.fn.dtype))
    model(torch.randint(0, 256, (2, 8))).sum().backward()
    hook.remove()
    assert seen == [torch.float32]
    gradient = model.blocks[0].site_attention.fn.grad.full_tensor()
    assert gradient.dtype == torch.float32
    assert gradient.any()


@pytest.mark.distributed
def test_fsdp_that_would_narrow_the_maps_is_refused(one_rank):
    model = _sharded(one_rank, first=False)
    with pytest.raises(TypeError, match="shard_connections"):
        model(torch.randint(0, 256, (2, 8)))


@pytest.mark.parametrize("manifold", ["sinkhorn", "birkhoff", "kronecker", "orthogonal", "identity", "none"])
def test_a_narrow_default_dtype_leaves_the_maps_and_their_start_wide(manifold):
    wide = lw.HyperConnection(8, 4, manifold, site=3), lw.StreamReadout(8, 4)
    torch.set_default_dtype(torch.bfloat16)
    try:
        narrow = lw.HyperConnection(8, 4, manifold, site=3), lw.StreamReadout(8, 4)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(wide, narrow, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            assert q.dtype == torch.float32
            assert torch.equal(p, q)


@pytest.mark.distributed
@pytest.mark.parametrize("recompute", [0, 3])
def test_a_chain_under_fsdp_is_the_plain_model_bit_for_bit(one_rank, recompute):
    """Blocks hand the streams on, sites shard by themselves, and streams are made again while FSDP frees and gathers."""
    from torch.distributed.fsdp import fully_shard

    tokens = torch.randint(0, 256, (2, 8))
    results = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = GPT(GPTConfig(dim=32, layers=3, context=8))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("site_ffn.fn"):
                    parameter.normal_(std=0.1)
        if sharded:
            lw.shard_connections(model, one_rank)
            for block in model.blocks:
                fully_shard(block, mesh=one_rank)
            fully_shard(model, mesh=one_rank)
            model.chained, model.recompute = True, recompute
        loss = model(tokens).square().mean()
        loss.backward()
        grads = [p.grad.full_tensor() if sharded else p.grad for p in model.parameters()]
        results.append([loss.detach(), *grads])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
