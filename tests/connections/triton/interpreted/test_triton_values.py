"""Every function of the contract, forward and backward, against float64 ``reference.py`` and its autograd.

bf16 of the interpreter is truncated, not rounded: results in it are within 2⁻⁷. A sum of fp32 numbers is within BITS32 of the
largest. Products of bf16 streams with fp32 numbers go through two bf16 parts: within 2⁻¹⁵ of the sum of their absolute values
(2⁻⁷ of the high part is left, 2⁻⁸ of that is lost), and what follows from them within PARTS.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from oracle import Case, case, error, finished_maps, post, pre

from laneway.connections.kernels.triton import backend, launch

BITS32, BITS16, PARTS = 4e-6, 2.0**-7, 2e-4
F32, B16 = torch.float32, torch.bfloat16
PAPER = {"eps": 0.0, "cap": 8.0, "iterations": 20}
V4 = {"eps": 1e-6, "cap": 0.0, "iterations": 20}
SHORT = {"eps": 0.0, "cap": 8.0, "iterations": 3}

CASES = [
    (31, 4, 72, F32, False, PAPER),
    (3, 4, 33, B16, True, V4),
    (33, 3, 33, B16, False, SHORT),
    (2, 5, 72, F32, True, {"eps": 0.0, "cap": 0.0, "iterations": 3}),
    (1, 8, 33, F32, False, {"eps": 1e-6, "cap": 8.0, "iterations": 3}),
    (127, 1, 40, F32, True, {"eps": 0.0, "cap": 8.0, "iterations": 1}),
    (2, 2, 100, B16, True, SHORT),
]
NAMES = [f"T{t}-n{n}-C{c}-{str(d)[6:]}{'-carried' if k else ''}-{o['iterations']}" for t, n, c, d, k, o in CASES]


@pytest.fixture(scope="module", params=CASES, ids=NAMES)
def c(request) -> Iterator[Case]:
    """A case, cut into two spans from 65 columns on. Workspaces are small enough to be used again within a call."""
    tokens, n, width, dtype, carried, options = request.param
    seed = torch.seed() % 2**32
    torch.manual_seed(seed)
    print(f"torch.manual_seed({seed})  # the case")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "SPAN", 64)
        patch.setattr(launch, "SCRATCH_PROGRAMS", 1)
        patch.setattr(launch, "PROJECTION_TOKENS", 32)
        yield case(tokens, n, width, dtype, carried=carried, **options)


@pytest.fixture(scope="module")
def forward(c):
    """What ``pre`` returns: h, maps, z, r."""
    return backend.pre(c.x, c.carried, *c.parameters, *c.forward_options)


@pytest.fixture(scope="module")
def old(c):
    """Finished maps of a site before."""
    return finished_maps(*c.x.shape[:2])


@pytest.fixture(scope="module")
def crossed(c, old):
    """What ``cross`` returns: y, then h, maps, z, r of y."""
    return backend.cross(c.x, c.f, old, c.carried, *c.parameters, *c.forward_options)


def close(got, want, c: Case, name: str) -> None:
    """Within the bound of its dtype and of what it is made from."""
    bound = BITS16 if got.dtype == B16 else BITS32 if c.x.dtype == F32 else PARTS
    assert error(got, want) <= bound, name


def test_pre(c, forward):
    w = c.wide()
    for name, mine, true in zip(("h", "maps", "z", "r"), forward, pre(w.x, w), strict=True):
        close(mine, true, c, name)


def test_projection_keeps_its_stated_bound(c, forward):
    *_, z, r = forward
    wide, fn = c.x.double().flatten(1), c.fn.double()
    exact, size = r.double()[:, None] * (wide @ fn.T), r.double()[:, None] * (wide.abs() @ fn.abs().T)
    parts, rounding = (2.0**-15 if c.x.dtype == B16 else 0.0), 2.0**-24 * 16
    assert ((z.double() - exact).abs() <= (parts + rounding) * size).all()


def test_post_and_cross(c, old, crossed):
    y, *rest = crossed
    close(y, post(c.x.double(), c.f.double(), old.double()), c, "y")
    assert torch.equal(y, backend.post(c.x, c.f, old)), "y is that of post, bit for bit"
    for mine, other in zip(rest, backend.pre(y, c.carried, *c.parameters, *c.forward_options), strict=True):
        assert torch.equal(mine, other), "the rest is that of pre of the rounded y, bit for bit"


def test_post_backward(c, old):
    gy = torch.randn_like(c.x)
    f, wide = c.f.double().requires_grad_(), old.double().requires_grad_()
    want = torch.autograd.grad(post(c.x.double(), f, wide), (f, wide), gy.double())
    got = backend.post_backward(gy, c.x, c.f, old)
    for name, mine, true in zip(("gf", "gmaps"), got, want, strict=True):
        close(mine, true, c, name)
    assert not got[1][:, : c.x.shape[1]].any()


def inputs_of_gradient(w: Case):
    return [w.x, *w.parameters, *([] if w.carried is None else [w.carried])]


def test_pre_backward(c, forward):
    n, w = c.x.shape[1], c.wide()
    h, maps, z, r = forward
    gy, gh, gmaps = torch.randn_like(c.x), torch.randn_like(h), torch.randn_like(maps)
    true_h, true_maps, *_ = pre(w.x, w)
    mixed = torch.einsum("noi,nic->noc", true_maps[:, 2 * n :].unflatten(1, (n, n)).detach(), w.x)
    true = torch.autograd.grad(
        (true_h, true_maps, mixed), inputs_of_gradient(w), (gh.double(), gmaps.double(), gy.double())
    )  # fmt: skip
    got = backend.pre_backward(gy, gh, gmaps, c.x, c.carried, *c.parameters, maps, z, r, *c.backward_options)
    assert (got[4] is None) == (c.carried is None)
    for name, mine, want in zip(("gx", "gfn", "gbase", "gscale", "gcarried"), got, true, strict=False):
        close(mine, want, c, name)


CROSSED = (2, 3, 6)  # n ≤ LARGEST_FUSED and above, one span and two, both dtypes, carried and not


@pytest.mark.parametrize("c", [CASES[k] for k in CROSSED], ids=[NAMES[k] for k in CROSSED], indirect=True)
def test_cross_backward(c, old, crossed):
    """What the two sites' functions, which are tested above, return one after the other: bit for bit."""
    y, h, new, z, r = crossed
    gnext, gh, gmaps = torch.randn_like(y), torch.randn_like(h), torch.randn_like(new)
    at_next = (y, c.carried, *c.parameters, new, z, r, *c.backward_options)
    g, gfn, gbase, gscale, gcarried = backend.pre_backward(gnext, gh, gmaps, *at_next)
    want = (g, *backend.post_backward(g, c.x, c.f, old), gfn, gbase, gscale, gcarried)
    got = backend.cross_backward(gnext, None, gh, gmaps, c.x, c.f, old, *at_next)
    for mine, other in zip(got, want, strict=True):
        assert (mine is None and other is None) or torch.equal(mine, other)
