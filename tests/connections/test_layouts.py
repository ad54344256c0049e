"""Weights of other libraries in ours: names, orientation, order of rows, and what is refused.

Each oracle is the library's own module where it runs on a CPU (transformers, lucidrains), else its published formulas written
down here (Megatron-Core, Liger). Maps are asymmetric, and every comparison is repeated with H_res's logits transposed, which has
to be far off.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases import branch_for, error
from torch import Tensor

import laneway as lw
from laneway.connections import layouts
from laneway.connections.layout_kinds import LAYOUTS, turn
from laneway.core import InputError

N, C = 4, 32
ALL = tuple(layouts.DIFFERENCES)
every_layout = pytest.mark.parametrize("layout", list(LAYOUTS))


def stored(layout: str, spread: float = 1.0, prefix: str = "") -> dict[str, Tensor]:
    """A site as the library stores it, random and asymmetric."""
    state = {}
    for name, shape in LAYOUTS[layout].shapes(N, C).items():
        narrow = spread / (N * C) ** 0.5 if C in shape or N * C in shape else spread
        state[prefix + name] = narrow * torch.randn(shape)
        if "scale" in name or "alpha_p" in name or name == "alpha_res":
            state[prefix + name] = 0.5 + torch.rand(shape)
        if name == "norm.gamma":
            state[prefix + name] = torch.zeros(shape)
    return state


def ours(layout: str, state: dict[str, Tensor], x: Tensor, branch, transposed: bool = False) -> Tensor:
    """Our site after the import; ``transposed``: with H_res's logits the other way round."""
    loaded = layouts.load_layout(state, layout, streams=N, accept=ALL)
    if transposed:
        loaded |= {name: turn(loaded[name], N) for name in ("fn", "base")}
    site = lw.HyperConnection(C, N, **layouts.site_options(layout))
    site.load_state_dict(loaded)
    h, merge = site(x)
    return merge(branch(h)).detach()


def agrees(layout: str, state: dict[str, Tensor], theirs: Tensor, x: Tensor, branch, bound: float) -> None:
    assert error(ours(layout, state, x, branch), theirs.double()) < bound
    assert error(ours(layout, state, x, branch, transposed=True), theirs.double()) > 100 * bound


def megatron(t: dict[str, Tensor], x: Tensor, branch, *, turned: bool) -> Tensor:
    """Megatron-Core's formulas: r = 1 / (‖x‖/√K + ε), rows pre, post, res; H_resᵀ x, or in its first versions H_res x."""
    flat = x.flatten(-2)
    r = 1 / (flat.norm(dim=-1, keepdim=True) / flat.shape[-1] ** 0.5 + 1e-6)
    alpha = torch.cat([t["alpha_pre"].expand(N), t["alpha_post"].expand(N), t["alpha_res"].expand(N * N)])
    maps = r * (flat @ t["mapping_proj.weight"].T) * alpha + t["bias"]
    m = maps[..., 2 * N :].unflatten(-1, (N, N))
    if turned:
        m = m.softmax(-1) + 1e-6
        for step in range(20):
            m = m if step == 0 else m / (m.sum(-1, keepdim=True) + 1e-6)
            m = m / (m.sum(-2, keepdim=True) + 1e-6)
        m = m.transpose(-1, -2)
    else:
        m = (m - m.amax(-1, keepdim=True)).exp()
        for _ in range(20):
            m = m / m.sum(-1, keepdim=True).clamp(min=1e-6)
            m = m / m.sum(-2, keepdim=True).clamp(min=1e-6)
    pre = maps[..., :N].sigmoid() + (1e-6 if turned else 0.0)
    f = branch((pre[..., None] * x).sum(-2))
    return m @ x + 2 * maps[..., N : 2 * N].sigmoid()[..., None] * f[..., None, :]


def liger(t: dict[str, Tensor], x: Tensor, branch) -> Tensor:
    """Liger's formulas: φ [nC, m], h_res [out, in] by softmax over in, columns last, ε inside, none in H_pre."""
    flat = x.flatten(-2)
    mix = (flat @ t["phi"]) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
    pre, post, res = mix.split([N, N, N * N], dim=-1)
    b_pre, b_post, b_res = t["b"].split([N, N, N * N])
    m = (res * t["alpha_res"] + b_res).unflatten(-1, (N, N)).softmax(-1) + 1e-6
    m = m / (m.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        m = m / (m.sum(-1, keepdim=True) + 1e-6)
        m = m / (m.sum(-2, keepdim=True) + 1e-6)
    f = branch(((pre * t["alpha_pre"] + b_pre).sigmoid()[..., None] * x).sum(-2))
    post = 2 * (post * t["alpha_post"] + b_post).sigmoid()
    return torch.einsum("...oi,...ic->...oc", m, x) + post[..., None] * f[..., None, :]


def lucidrains(t: dict[str, Tensor], x: Tensor, branch) -> Tensor:
    """The package's own module."""
    mhc = pytest.importorskip("hyper_connections.mHCv2", reason="needs the `peers` extra: hyper-connections")
    module = mhc.ManifoldConstrainedHyperConnections(N, dim=C, layer_index=0, sinkhorn_iters=20)
    module.load_state_dict(t)
    h, merge = module(x)
    return merge(branch(h)).detach()


@pytest.mark.peers
@pytest.mark.parametrize("layout", ["transformers", "deepseek-v4"])
def test_v4_is_the_same_function(layout):
    v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4", reason="needs the `peers` extra")
    config = SimpleNamespace(hc_mult=N, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=C)
    module, state = v4.DeepseekV4HyperConnection(config), stored(layout, 2.0)
    module.load_state_dict(state)
    x, branch = torch.randn(1, 50, N, C), branch_for(C)
    post, comb, h = module(x)
    theirs = post.unsqueeze(-1) * branch(h).unsqueeze(-2) + comb.transpose(-1, -2) @ x
    agrees(layout, state, theirs.detach(), x, branch, 1e-5)


def test_megatron_differs_by_the_place_of_its_norm_epsilon_alone():
    state, x, branch = stored("megatron", 2.0), torch.randn(50, N, C), branch_for(C)
    agrees("megatron", state, megatron(state, x, branch, turned=True), x, branch, 1e-5)


def test_megatron_untransposed_agrees_where_sinkhorn_has_converged():
    state, x, branch = stored("megatron-untransposed", 0.4), torch.randn(50, N, C), branch_for(C)
    agrees("megatron-untransposed", state, megatron(state, x, branch, turned=False), x, branch, 1e-5)


def test_liger_agrees_where_sinkhorn_has_converged():
    state, x, branch = stored("liger", 0.4), torch.randn(50, N, C), branch_for(C)
    agrees("liger", state, liger(state, x, branch), x, branch, 2e-5)


@pytest.mark.peers
def test_lucidrains_agrees_where_sinkhorn_has_converged_and_streams_have_one_size():
    state, branch = stored("lucidrains", 0.4), branch_for(C)
    x = torch.nn.functional.normalize(torch.randn(1, 50, N, C), dim=-1) * C**0.5
    agrees("lucidrains", state, lucidrains(state, x, branch), x, branch, 1e-5)


@pytest.mark.peers
def test_lucidrains_norm_weight_goes_into_the_projection():
    state, branch = stored("lucidrains", 0.4), branch_for(C)
    state["norm.gamma"] = 0.3 * torch.randn(C)
    x = torch.nn.functional.normalize(torch.randn(1, 50, N, C), dim=-1) * C**0.5
    agrees("lucidrains", state, lucidrains(state, x, branch), x, branch, 1e-5)


@pytest.mark.parametrize(
    ("layout", "oracle"),
    [("megatron-untransposed", lambda *given: megatron(*given, turned=False)), ("liger", liger)],
)
def test_the_other_order_of_sinkhorn_is_a_real_difference(layout, oracle):
    """Strong logits, not converged: importing them silently would change the network."""
    state, x, branch = stored(layout, 4.0), torch.randn(50, N, C), branch_for(C)
    assert error(ours(layout, state, x, branch), oracle(state, x, branch).double()) > 1e-3


@every_layout
def test_export_of_an_import_is_the_same_bit_for_bit(layout):
    state = stored(layout, prefix="decoder.a.") | {"decoder.other": torch.zeros(1)}
    loaded = layouts.load_layout(state, layout, streams=N, prefix="decoder.a.", accept=ALL)
    saved = layouts.save_layout(loaded, layout, streams=N, prefix="decoder.a.", accept=ALL)
    assert saved.keys() == state.keys() - {"decoder.other"}
    for name, value in saved.items():
        assert value.shape == state[name].shape
        assert torch.equal(value, state[name]), name


@every_layout
def test_import_of_an_export_is_the_same_bit_for_bit(layout):
    site = lw.HyperConnection(C, N)
    with torch.no_grad():
        for p in site.parameters():
            p.normal_()
    state = site.state_dict()
    if layout == "lucidrains":  # has room for one block that all streams share
        state = layouts.load_layout(stored(layout), layout, streams=N, accept=ALL)
    saved = layouts.save_layout(state, layout, streams=N, accept=ALL)
    loaded = layouts.load_layout(saved, layout, streams=N, accept=ALL)
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_half_precision_projections_come_back_as_they_were():
    state = stored("liger")
    state["phi"] = state["phi"].half()
    loaded = layouts.load_layout(state, "liger", streams=N, accept=ALL)
    assert loaded["fn"].dtype == torch.float32
    saved = layouts.save_layout(loaded, "liger", streams=N, accept=ALL, dtype=torch.float16)
    assert saved["phi"].dtype == torch.float16
    assert saved["b"].dtype == torch.float32
    assert torch.equal(saved["phi"], state["phi"])


@pytest.mark.parametrize("layout", [name for name, kind in LAYOUTS.items() if kind.head])
def test_a_learned_head_is_carried_over(layout):
    state = {"p.fn": torch.randn(N, N * C), "p.base": torch.randn(N), "p.scale": torch.rand(1)}
    loaded = layouts.load_layout(state, layout, streams=N, prefix="p.", part="head")
    lw.StreamReadout(C, N).load_state_dict(loaded)
    saved = layouts.save_layout(loaded, layout, streams=N, prefix="p.", part="head")
    assert all(torch.equal(saved[name], state[name]) for name in state)


def test_results_share_nothing_with_the_checkpoint():
    state = stored("megatron")
    loaded = layouts.load_layout(state, "megatron", streams=N, accept=["norm_eps"])
    loaded["fn"].zero_()
    assert state["mapping_proj.weight"].any()


PREFIXES = {
    "laneway": ["blocks.0.site_attention.", "blocks.0.site_ffn."],
    "transformers": ["model.layers.0.attn_hc.", "model.layers.0.ffn_hc."],
    "deepseek-v4": ["layers.0.hc_attn_", "layers.0.hc_ffn_"],
    "megatron": ["decoder.layers.0.self_attention_hyper_connection.", "decoder.layers.0.mlp_hyper_connection."],
    "megatron-untransposed": ["decoder.layers.0.self_attention_hyper_connection."],
    "liger": ["layers.0."],
    "lucidrains": ["layers.0.0.", ""],
}


@every_layout
def test_sites_are_found_and_told_apart(layout):
    state = {"embedding.weight": torch.zeros(3, 3), "fn_other": torch.zeros(1)}
    for prefix in PREFIXES[layout]:
        state |= stored(layout, prefix=prefix)
    assert layouts.sites(state, layout) == PREFIXES[layout]
    assert layouts.detect(state) == (["megatron", "megatron-untransposed"] if "megatron" in layout else [layout])


def test_the_first_megatron_is_told_by_its_unused_norm():
    state = stored("megatron-untransposed") | {"norm.weight": torch.ones(N * C)}
    assert layouts.detect(state) == ["megatron-untransposed"]


def test_nothing_is_found_in_something_else():
    assert layouts.detect({"weight": torch.zeros(2, 2), "phi": torch.zeros(2)}) == []


@pytest.mark.parametrize("layout", [name for name, kind in LAYOUTS.items() if kind.differences])
def test_a_function_that_differs_is_refused_until_each_difference_is_named(layout):
    state, named = stored(layout), list(layouts.differences(layout))
    for given in ([], named[:-1]):
        with pytest.raises(InputError) as caught:
            layouts.load_layout(state, layout, streams=N, accept=given)
        assert caught.value.field == "accept"
        assert layouts.differences(layout)[named[-1]] in str(caught.value)
    loaded = layouts.load_layout(state, layout, streams=N, accept=named)
    with pytest.raises(InputError):
        layouts.save_layout(loaded, layout, streams=N)


def test_a_norm_weight_has_to_be_accepted_as_well():
    state = stored("lucidrains") | {"norm.gamma": torch.ones(C)}
    with pytest.raises(InputError, match="norm_weight"):
        layouts.load_layout(state, "lucidrains", streams=N, accept=["sinkhorn_order", "stream_norm"])


def test_a_projection_that_lucidrains_has_no_place_for_is_refused():
    state = {name: torch.randn(p.shape) for name, p in lw.HyperConnection(C, N).state_dict().items()}
    with pytest.raises(InputError, match="share one block"):
        layouts.save_layout(state, "lucidrains", streams=N, accept=ALL)


@pytest.mark.parametrize(
    ("change", "field", "part"),
    [
        ({"layout": "megatorn"}, "layout", "did you mean 'megatron'?"),
        ({"streams": 0}, "streams", "an integer ≥ 1"),
        ({"streams": 3}, "state_dict.mapping_proj.weight", "[15, "),
        ({"prefix": "layers.0."}, "state_dict", "sites begin with ''"),
        ({"accept": ["norm_epsilon"]}, "accept", "did you mean 'norm_eps'?"),
        ({"part": "tail"}, "part", "one of site, head"),
        ({"part": "head"}, "state_dict", "fn, base, scale"),
    ],
)
def test_bad_input_is_one_clear_error(change, field, part):
    given = {"layout": "megatron", "streams": N, "accept": ALL} | change
    with pytest.raises(InputError) as caught:
        layouts.load_layout(stored("megatron"), given.pop("layout"), **given)
    assert caught.value.field == field
    assert part in str(caught.value)


def test_libraries_without_a_head_say_so():
    with pytest.raises(InputError, match="stores no learned read-out"):
        layouts.load_layout({}, "liger", streams=N, part="head")


def test_saving_checks_what_it_is_given():
    with pytest.raises(InputError, match="no scale"):
        layouts.save_layout({"fn": torch.zeros(24, 8), "base": torch.zeros(24)}, "transformers", streams=N)
    with pytest.raises(InputError, match=r"state\.base"):
        layouts.save_layout({"fn": torch.zeros(24, 8), "base": torch.zeros(8), "scale": torch.ones(3)}, "megatron", streams=N)
