"""Sites in a row: chains, single-pass sites, and streams that are made again in the backward pass."""

from __future__ import annotations

import pytest
import torch
from cases import branch_for, error, random_site

import laneway as lw
from laneway.connections import reference
from laneway.connections.chain import StreamChain, block_length

DIM, N = 24, 4


def net(sites, branches, x, recompute=None, chained=True):
    if not chained:
        for site, branch in zip(sites, branches, strict=True):
            h, merge = site(x)
            x = merge(branch(h))
        return x
    chain = StreamChain(x, recompute)
    for site, branch in zip(sites, branches, strict=True):
        chain.leave(branch(chain.enter(site)))
    return chain.streams()


def stack(length, n=N, dim=DIM, **options):
    return [random_site(dim, n, **options) for _ in range(length)], [branch_for(dim) for _ in range(length)]


def results(sites, branches, x, gy, **options):
    x = x.clone().requires_grad_()
    y = net(sites, branches, x, **options)
    return [y, *torch.autograd.grad(y, [x, *(p for site in sites for p in site.parameters())], gy)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("lead", [(7,), (2, 33), (0,), ()])
def test_a_chain_is_site_after_site_bit_for_bit(dtype, lead):
    sites, branches = stack(3)
    x, gy = torch.randn(*lead, N, DIM).to(dtype), torch.randn(*lead, N, DIM).to(dtype)
    for a, b in zip(results(sites, branches, x, gy, chained=False), results(sites, branches, x, gy), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("single_pass", [False, True])
@pytest.mark.parametrize("recompute", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recompute_changes_no_bit(dtype, recompute, single_pass):
    sites, branches = stack(5, single_pass=single_pass)
    x, gy = torch.randn(2, 9, N, DIM).to(dtype), torch.randn(2, 9, N, DIM).to(dtype)
    kept, again = results(sites, branches, x, gy), results(sites, branches, x, gy, recompute=recompute)
    for a, b in zip(kept, again, strict=True):
        assert torch.equal(a, b)


def test_recompute_with_other_manifolds_between():
    sites, branches = stack(5)
    sites[2] = random_site(DIM, N, "birkhoff")
    sites[4] = lw.HyperConnection(DIM, N, disable=True)
    x, gy = torch.randn(9, N, DIM), torch.randn(9, N, DIM)
    for a, b in zip(results(sites, branches, x, gy), results(sites, branches, x, gy, recompute=2), strict=True):
        assert torch.equal(a, b)


def test_recompute_twice_through_the_same_graph():
    sites, branches = stack(4)
    x = torch.randn(9, N, DIM, requires_grad=True)
    y = net(sites, branches, x, recompute=2)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y.sum(), x)[0])


def kept_bytes(length, recompute, tokens=16):
    """Bytes of streams [tokens, n, C] that the graph of a forward pass keeps, and how often each saved tensor was unpacked."""
    sites, branches = stack(length)
    storages, unpacked = {}, {}

    def pack(t):
        if t.shape[-2:] == (N, DIM):
            storages[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return len(unpacked), unpacked.setdefault(len(unpacked), [t, 0])[0]

    def unpack(packed):
        unpacked[packed[0]][1] += 1
        return packed[1]

    x = torch.randn(tokens, N, DIM, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = net(sites, branches, x, recompute)
        y.sum().backward()
    return sum(storages.values()), [count for _, count in unpacked.values()]


def test_sixty_sites_keep_a_sixth_of_the_streams():
    """Kept at 60 sites: one state in six. With the six of the block being recomputed that stays under 32 % (Eq. 20's table)."""
    length = block_length(60, N)
    assert length == 6
    every, _ = kept_bytes(60, None)
    some, unpacked = kept_bytes(60, length)
    assert every == 60 * 16 * N * DIM * 4
    assert some == every // 6
    assert (some + 6 * 16 * N * DIM * 4) / every <= 0.32
    assert max(unpacked) == 1  # hooks that fetch from far away are asked once


@pytest.mark.parametrize(("sites", "length"), [(60, 6), (86, 8), (122, 9), (1, 1), (2, 1)])
def test_block_length_is_the_papers(sites, length):
    def cost(k):
        return N * -(-sites // k) + (N + 2) * k

    assert block_length(sites, N) == length
    assert cost(length) == min(map(cost, range(1, sites + 1)))


def test_single_pass_is_the_published_function():
    """Each h is mixed by the pre-map of the site before, the first by a one-hot on stream 0 (float64, by the reference)."""
    sites, branches = stack(3, single_pass=True)
    x, gy = torch.randn(11, N, DIM), torch.randn(11, N, DIM)
    got = results(sites, branches, x, gy)

    leaf_x = x.double().requires_grad_()
    wide = [[p.detach().double().requires_grad_() for p in (s.fn, s.base, s.scale)] for s in sites]
    y, pre = leaf_x, torch.eye(N).double()[:1].expand(11, N)
    for parameters, branch in zip(wide, branches, strict=True):
        next_pre, post, res = reference.map_logits(y, *parameters, 1e-6)
        f = branch(reference.pre_mix(y, pre))
        y = reference.post_mix(y, f, reference.post_map(post), reference.sinkhorn(reference.cap_logits(res, 8.0)))
        pre = reference.pre_map(next_pre)
    want = [y, *torch.autograd.grad(y, [leaf_x, *(p for one in wide for p in one)], gy.double(), allow_unused=True)]
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert error(a, torch.zeros_like(a).double() if b is None else b) < 1e-5, index


def test_single_pass_site_by_site_is_the_chain():
    sites, branches = stack(3, single_pass=True)
    x = torch.randn(11, N, DIM)
    y, pre = x, None
    for site, branch in zip(sites, branches, strict=True):
        h, merge = site(y, pre)
        y, pre = merge(branch(h)), merge.pre
    assert torch.equal(y, net(sites, branches, x))


def test_what_single_pass_refuses():
    with pytest.raises(lw.InputError, match=r"single_pass: got True; accepted: False for manifold 'birkhoff'"):
        lw.HyperConnection(8, 4, "birkhoff", single_pass=True)
    site = lw.HyperConnection(8, 4)
    with pytest.raises(lw.InputError, match="pre: got"):
        site(torch.randn(3, 4, 8), torch.rand(3, 4))
    with pytest.raises(lw.InputError, match=r"pre: got \[3, 4\]; accepted: \[2, 4\]"):
        lw.HyperConnection(8, 4, single_pass=True)(torch.randn(2, 4, 8), torch.rand(3, 4))


def test_calls_out_of_order_are_refused():
    sites, _ = stack(2)
    chain = StreamChain(torch.randn(3, N, DIM))
    with pytest.raises(lw.InputError, match="chain: got 'leave'; accepted: enter"):
        chain.leave(torch.randn(3, DIM))
    h = chain.enter(sites[0])
    with pytest.raises(lw.InputError, match="chain: got 'enter'; accepted: leave"):
        chain.enter(sites[1])
    with pytest.raises(lw.InputError, match="chain: got 'streams'; accepted: leave"):
        chain.streams()
    with pytest.raises(lw.InputError, match="f: got"):
        chain.leave(h[:1])
    with pytest.raises(lw.InputError, match="recompute: got 0"):
        StreamChain(torch.randn(3, N, DIM), recompute=0)


def test_a_freed_graph_is_said_so():
    sites, branches = stack(4)
    x = torch.randn(9, N, DIM, requires_grad=True)
    y = net(sites, branches, x, recompute=4)
    y.sum().backward()
    with pytest.raises(RuntimeError):
        y.sum().backward()


def test_nothing_of_a_block_outlives_its_backward():
    """No reference cycle: what a block keeps goes when the graph goes, without the garbage collector."""
    import gc
    import weakref

    sites, branches = stack(4)
    kept = []
    x = torch.randn(9, N, DIM, requires_grad=True)
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(weakref.ref(t)), t)[1], lambda t: t):
            y = net(sites, branches, x, recompute=2)
        y.sum().backward()
        del y
        parameters = {id(x), *(id(p) for s in sites for p in s.parameters())}
        assert not [r for r in kept if r() is not None and id(r()) not in parameters]
    finally:
        gc.enable()


def test_observers_see_every_site_of_a_chain():
    sites, branches = stack(3)
    seen = []
    for site in sites:
        site.observers.append(lambda site, x, res: seen.append((site, x.shape, res.shape)))
    for recompute in (None, 2):
        net(sites, branches, torch.randn(2, 5, N, DIM), recompute)
    assert seen == 2 * [(site, (2, 5, N, DIM), (10, N, N)) for site in sites]
