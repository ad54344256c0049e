"""The consistency check: silent on what is right, and each measure names the layer that was broken."""

from __future__ import annotations

import copy
import math
import pickle
import re
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from laneway.checkpoint import capture
from laneway.checkpoint.tree import Encoder
from laneway.connections import HyperConnection, reference
from laneway.connections.consistency import ConsistencyCheck, ConsistencyError, ConsistencyWarning
from laneway.connections.lora import adapters, add_lora, load_lora_state_dict, lora_state_dict, merge, unmerge
from laneway.connections.lora_layers import LoRALinear
from laneway.connections.measures import Limits
from laneway.connections.picture import Camera
from laneway.core import Extension, InputError, LanewayError
from laneway.models.gpt import GPT, GPTConfig

TARGETS = ("attention.qkv", "ffn.out", "site_ffn.fn")
QKV, OUT, MAP = "blocks.1.attention.qkv", "blocks.0.ffn.out", "blocks.1.site_ffn"


def small_gpt(residual: str = "mhc") -> GPT:
    """A GPT far from its start, so that maps matter."""
    model = GPT(GPTConfig(layers=2, dim=32, context=16, init_std=0.2, residual=residual))
    for module in model.modules():
        if isinstance(module, HyperConnection) and not module.disabled:
            nn.init.normal_(module.fn, std=0.05)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, 16))


def watched(model: GPT | None = None, *, policy: str = "record", targets=TARGETS, **options) -> tuple[GPT, ConsistencyCheck]:
    model = small_gpt() if model is None else model
    check = ConsistencyCheck(model, tokens(), policy, **options)
    add_lora(model, targets, rank=4)
    check.begin()
    return model, check


def spread(model: nn.Module, std: float = 0.02) -> None:
    for layer in adapters(model).values():
        nn.init.normal_(layer.lora.B, std=std)


def seen(check: ConsistencyCheck) -> set[tuple[str, str]]:
    return {(finding.layer, finding.measure) for finding in check.check(1)}


# -- silent where all is right


@pytest.mark.parametrize("residual", ["mhc", "mhc-lite", "kronecker", "orthogonal", "identity", "hc", "residual"])
def test_healthy_adapters_of_every_manifold_raise_no_alarm(residual):
    targets = TARGETS if residual != "residual" else TARGETS[:2]
    model, check = watched(small_gpt(residual), policy="stop", targets=targets)
    spread(model)
    check.check(1)
    merge(model)
    check.check(2)
    unmerge(model)
    check.check(3)
    assert check.findings == []
    assert check.figures["base_difference"] == 0.0
    assert 0 < check.figures["contribution"] < 1


def test_a_check_leaves_no_trace():
    model, check = watched()
    model.blocks[0].eval()
    modes, random = [m.training for m in model.modules()], torch.get_rng_state()
    hooks = [len(m._forward_hooks) for m in model.modules()]
    check.check(1)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert all(not m.observers for m in model.modules() if isinstance(m, HyperConnection))
    assert all(p.grad is None for p in model.parameters())


def test_a_check_leaves_no_trace_when_the_model_fails():
    model, check = watched()
    model.norm.forward = lambda x: x[..., :5]
    with pytest.raises(RuntimeError):
        check.check(1)
    assert all(not m._forward_hooks and not getattr(m, "observers", []) for m in model.modules())
    assert all(layer.lora.enabled for layer in adapters(model).values())


# -- the pieces


def test_figures_of_a_site_are_those_of_its_streams():
    model = small_gpt()
    camera = Camera(model, tokens(), 64)
    got: dict[str, torch.Tensor] = {}
    site = model.blocks[1].site_attention
    site.observers.append(lambda _, x, res: got.update(x=x.flatten(0, 1).double(), res=res.double()))
    state = camera.take().sites["blocks.1.site_attention"]
    x, res = got["x"], got["res"]
    assert torch.allclose(state.log_rms, x.square().mean(-1).sqrt().log())
    assert torch.allclose(state.mean, x.mean(-1) / x.square().mean(-1).sqrt())
    pairs = [torch.cosine_similarity(x[:, i], x[:, j], dim=-1) for i in range(4) for j in range(i)]
    assert torch.allclose(state.similarity, torch.stack(pairs).mean(0))
    assert state.rows == pytest.approx(res.sum(-1).log().abs().max().item(), rel=1e-6)
    assert state.columns == pytest.approx(res.sum(-2).log().abs().max().item(), rel=1e-6)


def test_difference_of_outputs_estimates_the_relative_distance():
    model = small_gpt()
    camera = Camera(model, tokens(), 64)
    a, b = torch.randn(4000, 64), torch.randn(4000, 64)
    noisy = a + 1e-3 * b
    estimate = camera._output(noisy).difference(camera._output(a))
    one = Camera(model, tokens(), 4000)
    assert one._output(a).difference(one._output(a)) == 0.0
    assert estimate == pytest.approx(1e-3, rel=0.5)
    assert one._output(noisy).difference(one._output(a)) == pytest.approx(1e-3, rel=0.1)


def test_contribution_is_the_adapters_share():
    model, check = watched(targets="blocks.0.ffn.out")
    spread(model)
    layer, got = model.blocks[0].ffn.out, []
    layer.register_forward_hook(lambda m, args, y: got.append((args[0], y)))
    check.check(1)
    x, y = got[-1]
    base = x @ layer.weight.T
    ratio = ((y - base).norm(dim=-1) / base.norm(dim=-1)).flatten().median().item()
    assert check.figures["contribution"] == pytest.approx(ratio, rel=1e-4)


@pytest.mark.parametrize("residual", ["mhc", "kronecker", "hc"])
def test_shift_of_logits_is_that_of_the_reference(residual):
    model, check = watched(small_gpt(residual), targets="blocks.1.site_ffn.fn")
    spread(model, 0.5)
    site, got = model.blocks[1].site_ffn, []
    nn.init.uniform_(site.scale, 0.5, 2.0)
    site.observers.append(lambda _, x, res: got.append(x.flatten(0, 1).double()))
    check.check(1)
    x, change, scale = got[-1], site.lora.delta().double(), site.scale.double()
    if residual == "hc":
        shift = reference.rms_norm(x, site.norm_eps) @ change.T * torch.cat([scale[:1], scale[1:2], scale[2:].expand(4)])
    else:
        whole = reference.rms_norm(x.flatten(1), site.norm_eps) @ change.T
        shift = torch.cat([whole[:, :4] * scale[0], whole[:, 4:8] * scale[1], whole[:, 8:] * scale[2]], 1)
    assert check.figures["logits"] == pytest.approx(shift.flatten(1).abs().amax(-1).median().item(), rel=1e-5)


def test_drift_counts_deviations_of_the_base():
    _, check = watched()
    before = check.reference.sites["blocks.1.site_ffn"].log_rms
    now = copy.deepcopy(check.reference)
    deviation = 1.4826 * (before - before.median(0).values).abs().median(0).values.clamp_min(0.05 / 1.4826)
    now.sites["blocks.1.site_ffn"].log_rms = before + 3 * deviation
    from laneway.connections.measures import drift

    shifts = {(site, measure): value for site, measure, value in drift(now, check.reference)}
    assert shifts["blocks.1.site_ffn", "rms"] == pytest.approx(3.0, rel=1e-6)
    assert sum(value > 0 for value in shifts.values()) == 1


def test_large_samples_are_cut():
    check = ConsistencyCheck(small_gpt(), torch.randint(0, 256, (64, 16)), tokens=32)
    assert check.camera.sample.shape == (2, 16)
    assert all(len(output.digest) <= 32 for output in check.reference.outputs.values())


# -- each measure finds its mistake and names the layer


def break_base_weight(model):
    model.blocks[0].attention.out.weight.data[0, 0] += 1e-3
    return {("blocks.0.attention.out", "base")}


def break_map(model):
    model.blocks[1].site_ffn._parameters["fn"].data.mul_(1.001)
    return {(MAP, "base")}


def break_double(model):
    layer = model.blocks[0].ffn.out
    layer.weight.data.add_(layer.lora.delta())
    return {(OUT, "base")}


def break_scaling(model):
    model.blocks[0].ffn.out.lora.scaling *= 2
    return {(OUT, "law")}


def break_size(model):
    model.blocks[1].attention.qkv.lora.B.data.mul_(1e3)
    return {(QKV, "contribution")}


def break_map_size(model):
    model.blocks[1].site_ffn.lora.B.data.mul_(1e4)
    return {(MAP, "logits")}


def break_finite(model):
    model.blocks[1].attention.qkv.lora.A.data[0, 0] = math.inf
    return {(QKV, "finite"), (MAP, "finite")}


def break_train_base(model):
    model.norm.weight.requires_grad_(True)
    return {("norm.weight", "trainable")}


def break_train_adapter(model):
    model.blocks[0].ffn.out.lora.A.requires_grad_(False)
    return {(OUT, "trainable")}


def break_share(model):
    model.blocks[1].attention.qkv.lora.B = model.blocks[0].attention.qkv.lora.B
    return {(QKV, "shared")}


def break_tie(model):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone(), requires_grad=False)
    return {("head", "tied")}


def break_dropout(model):
    model.blocks[0].ffn.out.lora.dropout.forward = lambda x: nn.functional.dropout(x, 0.5)
    return {(OUT, "law")}


def break_dtype(model):
    site = model.blocks[1].site_attention
    site.fn.data = site.fn.data.bfloat16()
    return {("blocks.1.site_attention", "dtype")}


def break_dead(model):
    for factor in (model.blocks[0].ffn.out.lora.A, model.blocks[0].ffn.out.lora.B):
        factor.data.zero_()
    return {(OUT, "dead")}


def break_sign(model):
    model.blocks[0].ffn.out.lora.scaling = -1.0
    return {(OUT, "scaling"), (OUT, "law")}


BREAKS = [value for name, value in sorted(globals().items()) if name.startswith("break_")]


@pytest.mark.parametrize("damage", BREAKS, ids=lambda f: f.__name__.removeprefix("break_"))
def test_a_mistake_is_found_and_its_layer_named(damage):
    model, check = watched()
    spread(model)
    assert seen(check) == set()
    expected = damage(model)
    assert expected <= seen(check)


def test_a_matrix_off_the_manifold_is_found_at_its_site():
    model, check = watched()
    site = model.blocks[1].site_attention
    inner = site.res

    class Off(nn.Module):
        def forward(self, h):
            return 1.01 * inner(h)

    site.res = Off()
    found = seen(check)
    assert {("blocks.1.site_attention", "rows"), ("blocks.1.site_attention", "base")} <= found
    assert ("blocks.1.site_ffn", "rows") not in found


def test_columns_that_no_longer_converge_are_found():
    model, check = watched(targets=TARGETS[:2])
    site = model.blocks[0].site_attention
    nn.init.normal_(site.fn, std=3.0)
    site.cap = None
    site.res.iterations = 1
    assert ("blocks.0.site_attention", "columns") in seen(check)


def test_orthogonal_maps_are_held_to_orthogonality():
    model, check = watched(small_gpt("orthogonal"))
    inner = model.blocks[0].site_ffn.res
    model.blocks[0].site_ffn.res = torch.nn.Sequential(inner, torch.nn.Threshold(0.0, 0.0))
    assert ("blocks.0.site_ffn", "orthogonal") in seen(check)


def test_drifted_streams_are_found_by_site():
    model, check = watched(limits=Limits(contribution=1e9))
    spread(model)
    model.blocks[0].ffn.out.lora.B.data.mul_(1e3)
    found = {finding.layer for finding in check.check(1) if finding.measure in ("rms", "mean", "similarity")}
    assert found
    assert all(layer.startswith("blocks.1.") for layer in found)  # the sites after the layer, none before it


def test_a_gradient_that_is_not_finite_is_found_before_the_update():
    model, check = watched()
    model(tokens()).square().mean().backward()
    model.blocks[0].ffn.out.lora.B.grad[0, 0] = math.nan
    check.on_backward_end(1)
    assert [(f.step, f.layer, f.measure) for f in check.findings] == [(1, OUT, "gradient")]


def test_an_adapter_that_the_optimizer_does_not_know_is_found():
    model, check = watched(every=1)
    moving = [p for name, p in model.named_parameters() if p.requires_grad and OUT not in name]
    optimizer = torch.optim.SGD(moving, 1e-3)
    for step in (1, 2):
        model(tokens()).square().mean().backward()
        check.on_backward_end(step)
        optimizer.step()
        check.on_step_end(step, {})
        model.zero_grad()
    assert {(f.layer, f.measure) for f in check.findings} == {(OUT, "still")}


def test_adapters_that_are_not_new_are_found_at_the_beginning():
    model = small_gpt()
    check = ConsistencyCheck(model, tokens(), "record")
    add_lora(model, TARGETS, rank=4)
    nn.init.normal_(model.blocks[1].attention.qkv.lora.B, std=0.02)
    assert [(f.layer, f.measure) for f in check.begin()] == [(QKV, "start")]
    assert ConsistencyCheck(small_gpt(), tokens(), "record").findings == []


def test_an_adapter_on_a_tied_matrix_is_found():
    model = small_gpt()
    check = ConsistencyCheck(model, tokens(), "record")
    model.head.__class__ = LoRALinear
    model.head.adapt(4, 8.0, 0.0)
    assert ("head", "tied") in {(f.layer, f.measure) for f in check.begin()}


# -- records: over processes


@dataclass
class Saved:
    """A base, its fine-tuned adapters, and what a check of them saved."""

    base: GPT
    adapter: dict[str, torch.Tensor]
    state: dict[str, Any]
    sample: torch.Tensor

    def resumed(self) -> set[tuple[str, str]]:
        """What another process finds: in order, the base's record, then the adapters'."""
        model = copy.deepcopy(self.base)
        check = ConsistencyCheck(model, self.sample, "record")
        check.load_state_dict(self.state)
        add_lora(model, TARGETS, rank=4)
        load_lora_state_dict(model, self.adapter)
        check.begin()
        return {(f.layer, f.measure) for f in check.findings}


@pytest.fixture
def saved() -> Saved:
    base = small_gpt()
    model, check = watched(copy.deepcopy(base))
    spread(model)
    return Saved(base, {k: v.clone() for k, v in lora_state_dict(model).items()}, check.state_dict(), check.camera.sample)


def test_the_same_adapters_on_the_same_base_raise_no_alarm(saved):
    assert saved.resumed() == set()


def test_another_base_is_found_when_the_record_is_loaded(saved):
    saved.base.blocks[1].attention.out.weight.data.mul_(1.01)
    assert ("blocks.1.attention.out", "base") in saved.resumed()


def test_adapters_of_another_layer_are_found(saved):
    swap = {"blocks.0": "blocks.1", "blocks.1": "blocks.0"}
    saved.adapter = {swap[key[:8]] + key[8:]: value for key, value in saved.adapter.items()}
    assert ("blocks.0.attention.qkv", "record") in saved.resumed()


def test_another_scaling_is_found(saved):
    saved.adapter = {key: value * 2 if key.endswith("ffn.out.lora.alpha") else value for key, value in saved.adapter.items()}
    assert {layer for layer, measure in saved.resumed() if measure == "record"} == {OUT, OUT.replace("0", "1")}


def test_a_resume_that_loads_the_model_after_the_check_was_made_raises_no_alarm():
    """As the training loop does it: everything is built afresh, then model and extensions get their state."""
    model, check = watched()
    spread(model)
    weights, state = copy.deepcopy(model.state_dict()), check.state_dict()
    fresh = small_gpt()
    again = ConsistencyCheck(fresh, check.camera.sample, "stop")
    add_lora(fresh, TARGETS, rank=4)
    again.begin()
    fresh.load_state_dict(weights)
    again.load_state_dict(state)
    again.check(1)
    assert again.findings == []


def test_a_record_of_another_sample_is_refused(saved):
    check = ConsistencyCheck(saved.base, saved.sample.flip(0), "record")
    with pytest.raises(InputError, match="the sample with which the record was made"):
        check.load_state_dict(saved.state)


def test_frozen_adapters_are_right_where_nothing_trains():
    model = small_gpt()
    check = ConsistencyCheck(model, (tokens(),), "stop", training=False)
    add_lora(model, TARGETS, rank=4)
    model.requires_grad_(False)
    check.begin()
    check.check(1)
    assert check.findings == []


def test_the_state_is_what_a_checkpoint_can_hold():
    model, check = watched()
    assert Encoder({"extras": check.state_dict()}, 0).tensors
    assert capture(model, None, {"extensions": [check.state_dict()]})["extras"]


# -- policies and the extension


def test_stop_raises_with_layer_measure_value_and_what_is_accepted():
    model, check = watched(policy="stop")
    model.blocks[0].attention.out.weight.data.mul_(2.0)
    with pytest.raises(ConsistencyError) as caught:
        check.check(7)
    error = caught.value
    assert isinstance(error, LanewayError)
    first = error.findings[0]
    assert (first.step, first.layer, first.measure) == (7, "blocks.0.attention.out", "base")
    assert isinstance(first.value, float)
    assert first.value > 0.3
    for part in ("step 7", "blocks.0.attention.out", "base", "accepted: a relative difference ≤"):
        assert part in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_warn_warns_once_a_layer_and_measure():
    model, check = watched(policy="warn")
    model.blocks[0].attention.out.weight.data.mul_(2.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check.check(1)
    assert any(re.search(r"blocks\.0\.attention\.out: base", str(one.message)) for one in said)
    assert all(one.category is ConsistencyWarning for one in said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check.check(2)
    assert len({(f.layer, f.measure) for f in check.findings}) == len(check.findings) == len(said)


def test_record_says_nothing_and_keeps_the_first_step():
    model, check = watched()
    model.blocks[0].attention.out.weight.data.mul_(2.0)
    check.check(1)
    check.check(2)
    assert {f.step for f in check.findings} == {1}
    assert [f.measure for f in check.findings].count("base") == 1


def test_it_is_an_extension_that_checks_when_due():
    model, check = watched(every=4)
    assert isinstance(check, Extension)
    rows = []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    for step in range(1, 9):
        check.on_step_begin(step)
        model(tokens()).square().mean().backward()
        check.on_backward_end(step)
        optimizer.step()
        optimizer.zero_grad()
        rows.append({})
        check.on_step_end(step, rows[-1])
    assert [index + 1 for index, row in enumerate(rows) if row] == [1, 4, 8]
    assert set(rows[0]) == {"lora_contribution", "lora_logits", "lora_drift", "lora_base_difference"}
    assert check.findings == []


def test_begin_comes_by_itself():
    model = small_gpt()
    check = ConsistencyCheck(model, tokens())
    add_lora(model, TARGETS, rank=4)
    nn.init.normal_(model.blocks[1].attention.qkv.lora.B, std=0.02)
    with pytest.raises(ConsistencyError, match="start"):
        check.on_step_begin(1)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"policy": "halt"}, "one of stop, warn, record"),
        ({"every": 0}, "an integer ≥ 1"),
        ({"tokens": 0}, "an integer ≥ 1"),
    ],
)
def test_bad_options(options, part):
    with pytest.raises(InputError) as caught:
        ConsistencyCheck(small_gpt(), tokens(), **options)
    assert part in str(caught.value)


def test_a_base_with_narrow_maps_is_refused():
    model = small_gpt()
    model.blocks[0].site_ffn.fn.data = model.blocks[0].site_ffn.fn.data.bfloat16()
    with pytest.raises(ConsistencyError, match=r"blocks\.0\.site_ffn: dtype: fn is torch\.bfloat16"):
        ConsistencyCheck(model, tokens(), "record")


def test_it_must_come_before_the_adapters_and_needs_some():
    model = small_gpt()
    with pytest.raises(InputError, match="a model with adapters"):
        ConsistencyCheck(model, tokens()).begin()
    add_lora(model, TARGETS, rank=4)
    with pytest.raises(InputError, match="before adapters are added"):
        ConsistencyCheck(model, tokens())
