"""Gates: bounds, where they are one exactly, and what a model keeps of them."""

from __future__ import annotations

import pytest
import torch
from cases import random_site
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import laneway as lw
from laneway.connections.control import ControlStack, attach
from laneway.connections.controls import build
from laneway.connections.gates import FORMS, REFERENCES, ConstantStrength, FixedGate, excess, gate_of, restore_gates
from laneway.connections.manifolds import MANIFOLDS
from laneway.connections.schedule import FixedPriorities, Schedule, add_scheduler

NUMBERS = st.floats(0, 2.0**100, width=32)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=8),
    st.floats(0, 1),
    st.sampled_from(FORMS),
    st.sampled_from(REFERENCES),
)
def test_a_gate_is_in_zero_one_and_one_where_it_must_be(pairs, strength, form, reference):
    curvature, median = torch.tensor(pairs, dtype=torch.float32).unbind(1)
    gate = gate_of(excess(curvature, median, reference), strength, form)
    assert (gate > 0).all()
    assert (gate <= 1).all()
    assert (gate[curvature <= median] == 1).all()
    assert (gate_of(excess(curvature, median, reference), 0.0, form) == 1).all()
    if form == "saturating":
        assert (gate >= 1 - strength - 1e-6).all()


def test_formulas():
    curvature, median = torch.tensor([0.2, 0.6, 0.4, 0.1]), torch.tensor([0.2, 0.3, 0.1, 0.1])
    own, peers = excess(curvature, median), excess(curvature, median, "peers")
    torch.testing.assert_close(own, torch.tensor([0.0, 1.0, 3.0, 0.0]))
    torch.testing.assert_close(peers, torch.tensor([0.0, 1.0, 1.0, 0.0]))  # the median of all paths is 0.2
    torch.testing.assert_close(gate_of(own, 0.5), torch.tensor([1.0, 0.75, 0.625, 1.0]))
    torch.testing.assert_close(gate_of(own, 0.5, "exponential"), torch.exp(torch.tensor([0.0, -0.5, -1.5, 0.0])))
    unknown = torch.tensor([float("nan"), 0.5]), torch.tensor([float("nan"), float("nan")])
    assert excess(*unknown).tolist() == [0, 0]
    assert excess(torch.tensor([5e-4]), torch.tensor([0.0])).item() == 0  # flat, whatever chance made of the median


def test_the_gate_multiplies_writes_and_moves_res_doubly_stochastically():
    site, x = random_site(8, 4), torch.randn(5, 4, 8)
    _, plain = site(x)
    site.control = FixedGate(4, res=True)
    site.control.gate.copy_(torch.tensor([1.0, 0.5, 0.25, 0.85]))
    _, merge = site(x)
    assert torch.equal(merge.post, plain.post * site.control.gate)
    torch.testing.assert_close(merge.res, 0.65 * plain.res + 0.35 * torch.eye(4))
    for dim in (-1, -2):
        torch.testing.assert_close(merge.res.sum(dim) - 1, 0.65 * (plain.res.sum(dim) - 1), rtol=1e-4, atol=1e-6)
    site.control.gate.fill_(1)
    assert torch.equal(site(x)[1].res, plain.res)


def test_constant_strength():
    site, x = random_site(8, 4), torch.randn(5, 4, 8)
    plain = site(x)[1].post
    site.control = ConstantStrength(4, 0.75)
    assert torch.equal(site(x)[1].post, plain * 0.75)
    site.control = ConstantStrength(4, 1)
    assert torch.equal(site(x)[1].post, plain)
    for bad in (0, -0.1, 1.1, float("nan"), "much", True):
        with pytest.raises(lw.InputError, match="strength: got"):
            ConstantStrength(4, bad)


def test_what_is_refused():
    for bad in (-0.01, 1.01, float("nan"), "auto", None):
        with pytest.raises(lw.InputError, match=r"strength: got .*; accepted: a number from 0 to 1"):
            gate_of(torch.ones(1), bad)
    with pytest.raises(lw.InputError, match=r"form: got 'saturated'.*did you mean 'saturating'"):
        gate_of(torch.ones(1), 0.5, "saturated")
    with pytest.raises(lw.InputError, match="reference: got 'all'"):
        excess(torch.ones(1), torch.ones(1), "all")


def test_gates_go_where_the_weights_go():
    """A plain model refuses the weights of a gated one; with its gates restored it is the same function."""
    model = torch.nn.Sequential(random_site(8, 4), random_site(8, 4))
    model[0].control = FixedGate(4, res=True)
    model[0].control.gate.uniform_(0.2, 1)
    model[1].control = ControlStack([ConstantStrength(4, 0.5), ConstantStrength(4, 0.9)])
    state, x = model.state_dict(), torch.randn(5, 4, 8)
    fresh = torch.nn.Sequential(random_site(8, 4), random_site(8, 4))
    with pytest.raises(RuntimeError, match=r"control\.gate"):
        fresh.load_state_dict(state)
    assert restore_gates(fresh, state) == 3
    fresh.load_state_dict(state)
    for a, b in zip(model, fresh, strict=True):
        want, got = a(x)[1], b(x)[1]
        assert torch.equal(got.post, want.post)
        assert torch.equal(got.res, want.res)
    plain = torch.nn.Sequential(random_site(8, 4))
    assert restore_gates(plain, plain.state_dict()) == 0
    assert plain[0].control is None


OTHERS = {
    "scheduler": lambda model: add_scheduler(model, Schedule(directions=2, sample=8)),
    "priorities": lambda model: attach(model, lambda site, place: FixedPriorities([1 + place, 2, 3, 4])),
}


@pytest.mark.parametrize("order", [("gate", "scheduler"), ("scheduler", "gate"), ("priorities", "gate", "scheduler", "gate")])
def test_gates_among_other_controls_come_back_to_their_places(order):
    """The others are built first; what each site decides is then the same, bit for bit."""
    model = torch.nn.Sequential(random_site(8, 4), random_site(8, 4))
    fresh = torch.nn.Sequential(random_site(8, 4), random_site(8, 4))
    for name in order:
        if name == "gate":
            attach(model, lambda site, place: FixedGate(site.streams, res=place == 0))
        else:
            OTHERS[name](model)
            OTHERS[name](fresh)
    with torch.no_grad():
        for part in model.modules():
            for name in ("gate", "query", "damping"):
                if isinstance(value := getattr(part, name, None), torch.Tensor):
                    value.uniform_(0.2, 1)
    state, x = model.state_dict(), torch.randn(5, 4, 8)
    for _ in range(2):  # gates of the first time make way for those of the second
        assert restore_gates(fresh, state) == 2 * order.count("gate")
    fresh.load_state_dict(state)
    for a, b in zip(model, fresh, strict=True):
        assert [type(part) for part in b.control.controls] == [type(part) for part in a.control.controls]
        for want, got in zip((a(x)[0], *_maps(a, x)), (b(x)[0], *_maps(b, x)), strict=True):
            assert torch.equal(got, want)


def _maps(site, x):
    merge = site(x)[1]
    return merge.pre, merge.post, merge.res


def test_a_gate_behind_controls_that_are_not_there_is_named():
    model, fresh = torch.nn.Sequential(random_site(8, 4)), torch.nn.Sequential(random_site(8, 4))
    build("priorities", model)
    build("curvature", model, strength=0.5)
    with pytest.raises(lw.InputError, match=r"state: got '0\.control\.controls\.1\.gate'.*build the other controls first"):
        restore_gates(fresh, model.state_dict())
    assert fresh[0].control is None
    fresh[0].control = ControlStack([ControlStack([FixedGate(4)])])
    with pytest.raises(lw.InputError, match=r"state: got '0\.control\.controls\.0\.controls\.0\.gate'"):
        restore_gates(model, fresh.state_dict())


@pytest.mark.parametrize("manifold", MANIFOLDS)
def test_a_moved_res_stays_where_the_manifold_has_it_or_is_refused(manifold):
    """On every manifold, in float64 and far from the start: what holds of H_res holds of the moved one."""
    sites, x = nn.ModuleList([random_site(6, 4, manifold, dtype=torch.float64)]), torch.randn(9, 4, 6).double()
    if manifold == "orthogonal":
        with pytest.raises(lw.InputError, match="res: got True; accepted: False for sites with manifold 'orthogonal'"):
            build("curvature-res", sites)
        assert sites[0].control is None
        build("curvature", sites)
        sites[0](x)
        sites[0].control = FixedGate(4, res=True)
        with pytest.raises(lw.InputError, match="orthogonal"):
            sites[0](x)
        return
    build("curvature-res", sites).remove()
    plain = sites[0](x)[1].res
    sites[0].control = FixedGate(4, res=True)
    sites[0].control.gate.uniform_(0.2, 0.9)
    moved, keep = sites[0](x)[1].res, sites[0].control.gate.double().mean()
    torch.testing.assert_close(moved, plain * keep + torch.eye(4).double() * (1 - keep))
    if manifold != "none":
        assert (moved >= 0).all()
        for dim in (-1, -2):
            assert ((moved.sum(dim) - 1).abs() <= (plain.sum(dim) - 1).abs() + 1e-12).all()
