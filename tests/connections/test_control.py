"""Controls of a site's maps: none at all, each map changed, in a row, made again, compiled."""

from __future__ import annotations

import shutil

import pytest
import torch
from cases import branch_for, error, random_site
from torch.utils._python_dispatch import TorchDispatchMode

import laneway as lw
from laneway.connections import StreamChain, reference, site_ops
from laneway.connections.control import ControlStack, StreamControl, attach, controlled_sites, detach, res_token

DIM, N = 12, 4
needs_compiler = pytest.mark.skipif(not shutil.which("c++") and not shutil.which("g++"), reason="no C++ compiler")


class Change(StreamControl):
    """Changes the named maps by trained numbers: pre and post times a factor for each stream, H_res towards the identity."""

    def __init__(self, names: str, streams: int = N) -> None:
        super().__init__()
        self.names = names.split()
        self.factor = torch.nn.Parameter(torch.rand(2, streams) + 0.5)
        self.toward = torch.nn.Parameter(torch.rand(()))

    def forward(self, site, x, pre, post, res):
        factor, toward = self.factor.to(pre.dtype), self.toward.to(pre.dtype)
        if "pre" in self.names:
            pre = pre * factor[0]
        if "post" in self.names:
            post = post * factor[1]
        if "res" in self.names:
            res = (1 - toward) * res + toward * torch.eye(res.shape[-1], dtype=res.dtype, device=res.device)
        return pre, post, res


class Ops(TorchDispatchMode):
    """Names of the ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def through(site, x, branch):
    h, merge = site(x)
    return merge(branch(h))


def grads_of(y, x, modules, gy):
    return [y, *torch.autograd.grad(y, [x, *(p for module in modules for p in module.parameters())], gy, allow_unused=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_control_a_site_is_its_two_ops(dtype):
    """Same ops in the same order, forward and backward, and the same bits as calling them by hand."""
    site, branch = random_site(DIM, N), branch_for(DIM)
    x, gy = torch.randn(2, 5, N, DIM).to(dtype).requires_grad_(), torch.randn(2, 5, N, DIM).to(dtype)

    def by_hand(x):
        h, maps, carry, *_ = site_ops.mhc_pre(x, None, *site.arguments)
        return site_ops.mhc_post(x, carry, branch(h), maps)

    found = []
    for run in (lambda x: through(site, x, branch), by_hand):
        with Ops() as ops:
            found.append((grads_of(run(x), x, [site], gy), ops.names))
    (got, got_ops), (want, want_ops) = found
    assert got_ops == want_ops
    assert "laneway::mhc_pre" in got_ops
    assert "laneway::mhc_post_backward" in got_ops
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("manifold", ["sinkhorn", "birkhoff", "none"])
def test_a_control_that_changes_nothing_changes_no_bit(manifold):
    site, branch = random_site(DIM, N, manifold), branch_for(DIM)
    x, gy = torch.randn(7, N, DIM, requires_grad=True), torch.randn(7, N, DIM)
    want = grads_of(through(site, x, branch), x, [site], gy)
    parameters = [site.fn, site.base, site.scale]
    site.control = Change("")
    y = through(site, x, branch)
    for a, b in zip([y, *torch.autograd.grad(y, [x, *parameters], gy)], want, strict=True):
        assert torch.equal(a, b)


def expected(site, x, branch, gy, control):
    """The same in float64 by the reference."""
    x, fn, base, scale, factor, toward = leaves = [
        t.detach().double().requires_grad_() for t in (x, site.fn, site.base, site.scale, control.factor, control.toward)
    ]
    pre, post, res = reference.map_logits(x, fn, base, scale, site.norm_eps)
    pre, post = reference.pre_map(pre), reference.post_map(post)
    res = reference.sinkhorn(reference.cap_logits(res, site.cap), site.iterations)
    pre = pre * factor[0] if "pre" in control.names else pre
    post = post * factor[1] if "post" in control.names else post
    res = (1 - toward) * res + toward * torch.eye(N).double() if "res" in control.names else res
    y = reference.post_mix(x, branch(reference.pre_mix(x, pre)), post, res)
    return [y, *torch.autograd.grad(y, leaves, gy.double(), allow_unused=True)]


@pytest.mark.parametrize("names", ["pre", "post", "res", "pre post res"])
@pytest.mark.parametrize("lead", [(7,), (2, 3), ()])
def test_each_map_changed_is_the_changed_function(names, lead):
    """Outputs and gradients, of the control's own parameters too, against float64."""
    site, branch, control = random_site(DIM, N), branch_for(DIM), Change(names)
    x, gy = torch.randn(*lead, N, DIM, requires_grad=True), torch.randn(*lead, N, DIM)
    site.control = control
    y = through(site, x, branch)
    leaves = [x, site.fn, site.base, site.scale, control.factor, control.toward]
    got = [y, *torch.autograd.grad(y, leaves, gy, allow_unused=True)]
    for index, (a, b) in enumerate(zip(got, expected(site, x, branch, gy, control), strict=True)):
        assert (a is None) == (b is None), index
        assert a is None or error(a, b) < 2e-5, index


@pytest.mark.parametrize("manifold", ["birkhoff", "kronecker", "orthogonal", "identity", "none"])
def test_other_manifolds_take_the_changed_maps(manifold):
    """y and its gradient by the maps that the site says it used."""
    site, branch = random_site(DIM, N, manifold).double(), branch_for(DIM)
    x = torch.randn(5, N, DIM, dtype=torch.float64, requires_grad=True)
    _, plain = site(x)
    site.control = Change("pre post res").double()
    h, merge = site(x)
    f = branch(h)
    y = merge(f)
    torch.testing.assert_close(merge.post, plain.post * site.control.factor[1])
    torch.testing.assert_close(y, reference.post_mix(x, f, merge.post, merge.res))
    assert torch.autograd.gradcheck(lambda x: through(site, x, branch), (x[:2].detach().requires_grad_(),), fast_mode=True)


def stack(length, names, **options):
    sites, branches = [random_site(DIM, N, **options) for _ in range(length)], [branch_for(DIM) for _ in range(length)]
    for site in sites:
        site.control = Change(names)
    return sites, branches


def chained(sites, branches, x, recompute=None):
    chain = StreamChain(x, recompute)
    for site, branch in zip(sites, branches, strict=True):
        chain.leave(branch(chain.enter(site)))
    return chain.streams()


@pytest.mark.parametrize("names", ["post", "res", "pre post res"])
@pytest.mark.parametrize("single_pass", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chain_and_streams_made_again_are_site_after_site(names, single_pass, dtype):
    sites, branches = stack(4, names, single_pass=single_pass)
    x, gy = torch.randn(9, N, DIM).to(dtype).requires_grad_(), torch.randn(9, N, DIM).to(dtype)
    y, pre = x, None
    for site, branch in zip(sites, branches, strict=True):
        h, merge = site(y, pre)
        y, pre = merge(branch(h)), merge.pre if single_pass else None
    want = grads_of(y, x, sites, gy)
    chain = grads_of(chained(sites, branches, x), x, sites, gy)
    assert torch.equal(chain[0], want[0])
    for a, b in zip(chain, want, strict=True):
        assert (a is None) == (b is None)
        if dtype == torch.float32:  # sums of gradients in another order: narrow streams round them apart
            assert a is None or error(a, b.double()) < 2e-5
    for recompute in (1, 2, 3):
        for a, b in zip(grads_of(chained(sites, branches, x, recompute), x, sites, gy), chain, strict=True):
            assert a is b is None or torch.equal(a, b)


class Writes(StreamControl):
    """H_post times fixed numbers, which a site may also be told as a factor."""

    def __init__(self, told: bool) -> None:
        super().__init__()
        self.told = told
        self.numbers = torch.linspace(0.3, 1.2, N)
        self.whole = torch.cat([torch.ones(N), self.numbers, torch.ones(N * N)])

    def write_factor(self, site, x):
        return self.whole if self.told else None

    def forward(self, site, x, pre, post, res):
        return pre, post * self.numbers, res


@pytest.mark.parametrize(("manifold", "single_pass"), [("sinkhorn", False), ("sinkhorn", True), ("birkhoff", False)])
def test_a_factor_of_writes_is_the_changed_map_bit_for_bit(manifold, single_pass):
    sites, branches = stack(3, "", manifold=manifold, single_pass=single_pass)
    x, gy, found = torch.randn(9, N, DIM, requires_grad=True), torch.randn(9, N, DIM), []
    for told in (False, True):
        for site in sites:
            site.control = Writes(told)
        with Ops() as ops:
            found.append(grads_of(chained(sites, branches, x), x, sites, gy))
        if manifold == "sinkhorn":
            assert ("aten::cat" not in ops.names) == told
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_recompute_keeps_no_more_streams_where_post_and_res_are_controlled():
    def kept(names):
        sites, branches = stack(6, names)
        storages = {}

        def pack(t):
            if t.shape[-2:] == (N, DIM):
                storages[t.untyped_storage()._cdata] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            chained(sites, branches, torch.randn(16, N, DIM, requires_grad=True), 3).sum().backward()
        return len(storages)

    assert kept("post res") == kept("") == 2


def test_derivatives_of_both_orders_through_a_changed_res():
    site, control = random_site(3, 2, dtype=torch.float64), Change("pre post res", 2).double()
    site.control = control
    x = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)

    def function(x, toward):
        with torch.no_grad():
            control.toward.copy_(toward)
        return torch.func.functional_call(_Whole(site), {"site.control.toward": toward}, (x,))

    toward = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, toward))
    assert torch.autograd.gradgradcheck(function, (x, toward))


class _Whole(torch.nn.Module):
    def __init__(self, site):
        super().__init__()
        self.site = site

    def forward(self, x):
        return through(self.site, x, torch.tanh)


def test_the_token_is_registered_soundly():
    x, res = torch.randn(5, 3, 8, requires_grad=True), torch.rand(5, 3, 3, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(res_token, (x, res), test_utils=checks)


def test_autocast_and_no_grad():
    """Maps reach a control in fp32 under autocast, and nothing needs a graph."""
    seen = []

    class Look(StreamControl):
        def forward(self, site, x, pre, post, res):
            seen.extend([t.dtype for t in (pre, post, res)] + [(pre @ pre.mT).dtype])
            return pre * 1.5, post, res

    site, x = random_site(DIM, N), torch.randn(3, N, DIM).bfloat16()
    site.control = Look()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        h, merge = site(x)
        y = merge(h)
    assert seen == [torch.float32] * 4
    assert h.dtype == y.dtype == torch.bfloat16


@needs_compiler
@pytest.mark.compiler
def test_controlled_sites_compile_without_a_graph_break():
    sites, branches = stack(2, "pre post res")
    x, gy = torch.randn(6, N, DIM, requires_grad=True), torch.randn(6, N, DIM)
    compiled = torch.compile(lambda x: chained(sites, branches, x), fullgraph=True, backend="aot_eager")
    for a, b in zip(grads_of(compiled(x), x, sites, gy), grads_of(chained(sites, branches, x), x, sites, gy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_stack_goes_in_order_and_parts_come_off():
    model = torch.nn.ModuleList([random_site(DIM, N), lw.HyperConnection(DIM, 1), random_site(DIM, N)])
    first = attach(model, lambda site, place: Change("post"))
    second = attach(model, lambda site, place: Change("post"))
    third = attach(model, lambda site, place: Change("res"))
    assert len(controlled_sites(model)) == len(first) == 2
    assert list(model[0].control.controls) == [first[0], second[0], third[0]]
    assert model[1].control is None
    x = torch.randn(5, N, DIM)
    _, merge = model[0](x)
    detach(model, third)
    assert list(model[0].control.controls) == [first[0], second[0]]
    detach(model, second)
    assert model[0].control is first[0]
    post = model[0](x)[1].post
    detach(model)
    assert model[0].control is model[2].control is None
    plain = model[0](x)[1].post
    assert torch.equal(post, plain * first[0].factor[1])
    assert torch.equal(merge.post, plain * first[0].factor[1] * second[0].factor[1])


def test_what_is_refused():
    with pytest.raises(lw.InputError, match=r"controls: got \[\]; accepted: one or more StreamControl"):
        ControlStack([])
    with pytest.raises(lw.InputError, match=r"controls: got \['Linear'\]"):
        ControlStack([torch.nn.Linear(1, 1)])
    with pytest.raises(lw.InputError, match="model: got 'Linear'; accepted: a model with hyper-connections"):
        attach(torch.nn.Linear(1, 1), lambda site, place: Change("post"))

    class Narrow(StreamControl):
        def forward(self, site, x, pre, post, res):
            return pre, post.bfloat16(), res

    site = random_site(DIM, N)
    site.control = Narrow()
    with pytest.raises(lw.InputError, match=r"Narrow\(…\): got 'post \[3, 4\] torch.bfloat16'; accepted: \[3, 4\] torch.float32"):
        site(torch.randn(3, N, DIM))
    with pytest.raises(NotImplementedError):
        StreamControl()(site, *[torch.zeros(())] * 4)


def test_a_single_stream_has_nothing_to_control():
    """A plain residual never calls its control; one stream with maps does."""
    plain, x = lw.HyperConnection(DIM, 1), torch.randn(3, 1, DIM)
    plain.control = Change("pre post res", 1)
    assert torch.equal(through(plain, x, torch.tanh), x + torch.tanh(x))
    site = random_site(DIM, 1)
    want = site(x)[1].post
    site.control = Change("post", 1)
    assert torch.equal(site(x)[1].post, want * site.control.factor[1])


class Reads(StreamControl):
    """Another H_pre, token by token, out of the one that it is given and a parameter."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(streams, dtype=torch.float64))

    def forward(self, site, x, pre, post, res):
        return pre * (1 + torch.tanh(self.weight * pre)), post, res


@pytest.mark.parametrize("manifold", ["sinkhorn", "birkhoff"])
@pytest.mark.parametrize("way", ["one by one", "chain", "recomputed"])
def test_gradients_under_another_pre_are_those_of_the_function(manifold, way):
    """In float64, of the streams and of all parameters; second derivatives too where streams are kept."""
    sites = torch.nn.ModuleList([random_site(3, 3, manifold, dtype=torch.float64, iterations=3) for _ in range(2)])
    for site in sites:
        site.control = Reads(3)
    names = [name for name, _ in sites.named_parameters()]

    def function(x, *values):
        for name, value in zip(names, values, strict=True):
            owner, _, key = name.rpartition(".")
            sites.get_submodule(owner)._parameters[key] = value
        chain = StreamChain(x, 2 if way == "recomputed" else None)
        for site in sites:
            if way == "one by one":
                h, merge = site(x)
                x = merge(torch.sin(h))
            else:
                chain.leave(torch.sin(chain.enter(site)))
        return x if way == "one by one" else chain.streams()

    x = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    values = [p.detach().clone().requires_grad_() for p in sites.parameters()]
    assert torch.autograd.gradcheck(function, (x, *values), fast_mode=True)
    if way == "chain" and manifold == "sinkhorn":
        assert torch.autograd.gradgradcheck(function, (x, *values), fast_mode=True)


def test_another_pre_writes_nothing_as_wide_as_the_streams():
    """In the backward pass: x's gradient is written once, by the pass that writes it without a control."""

    class Wide(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.numel() >= x.numel() and out._base is None and out.is_contiguous():
                made.append(func.name())
            return out

    counts = []
    for controlled in (False, True):
        site, made = random_site(8, 4), []
        x = torch.randn(6, 4, 8, requires_grad=True)
        site.control = Reads(4).float() if controlled else None
        h, merge = site(x)
        y = merge(torch.sin(h))
        with Wide():
            y.backward(torch.ones_like(y))
        counts.append([name for name in made if name != "aten::view"])
    assert counts[0] == counts[1]
