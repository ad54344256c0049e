"""The curvature constraint on a model, step by step: off, on, on several ranks, made again, compiled, with bad tokens."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import fields

import pytest
import torch
from cases import random_site
from torch.nn.functional import cross_entropy

import laneway as lw
from laneway.connections.constraint import CurvatureConstraint, Measurement, Rule
from laneway.connections.control import ControlStack
from laneway.connections.controls import CONTROLS, build
from laneway.connections.tuning import AutoSettings, AutoStrength
from laneway.core import Extension, SharesStatistics
from laneway.models.gpt import GPT, GPTConfig

QUICK = Measurement(every=2, sample=24, neighbours=5, projection=6, decay=0.5, window=3)
needs_compiler = pytest.mark.skipif(not shutil.which("c++") and not shutil.which("g++"), reason="no C++ compiler")


def gpt(seed=0, **fields):
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocab_size=31, context=12, layers=2, heads=2, dim=16, **fields))


def batches(steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(31, (4, 13), generator=generator) for _ in range(steps)]


def trained(model, control, tokens, first=1, call=None, lr=3e-2):
    """Losses, and the rows that the control wrote."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    losses, rows = [], []
    for step, batch in enumerate(tokens, first):
        if control is not None:
            control.on_step_begin(step)
        logits = (model if call is None else call)(batch[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        row = {"loss": loss.item(), "grad_norm": 1.0}
        if control is not None:
            control.on_backward_end(step)
        optimizer.step()
        if control is not None:
            control.on_step_end(step, row)
        losses.append(loss.item())
        rows.append(row)
    return losses, rows


def primed(control):
    """Nearly flat measurements before the first, so that the real ones close the gates."""
    sums = control.statistics()["curvature"]
    for _ in range(3):
        control.apply_statistics({"curvature": torch.ones_like(sums) * torch.tensor([0.05, 1]).repeat_interleave(len(sums) // 2)})
    return control


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("rule", [Rule(), Rule(form="exponential", reference="peers", res=True)])
@pytest.mark.parametrize("residual", ["mhc", "mhc-lite", "hc"])
def test_at_strength_zero_a_run_is_the_run_without(rule, residual):
    """Bit for bit, though curvature is measured."""
    plain, gated = gpt(residual=residual), gpt(residual=residual)
    control = CurvatureConstraint(gated, 0.0, measurement=QUICK, rule=rule)
    want, _ = trained(plain, None, batches(5))
    got, rows = trained(gated, control, batches(5))
    assert got == want
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(gated), strict=True))
    assert all(k > 0 for site in rows[-1]["curvature"] for k in site)


def test_gates_close_where_curvature_rises_and_only_there():
    model = gpt()
    control = CurvatureConstraint(model, 0.5, measurement=QUICK)
    paths = 4 * 4
    for value in (0.2, 0.2, 0.2):
        control.apply_statistics(
            {"curvature": torch.full((2 * paths,), 10.0) * torch.tensor([value, 1]).repeat_interleave(paths)}
        )
    sums = torch.full((2 * paths,), 10.0)
    sums[:paths] *= 0.2
    sums[3], sums[5] = 10 * 0.8, 10 * 0.1
    control.apply_statistics({"curvature": sums})
    control.on_step_begin(1)
    gate = control.gate
    curvature, median = control.curvature, control.moving.median
    assert gate[3] == 1 - 0.5 * (1 - median[3] / curvature[3])
    assert gate[3] < 0.75
    assert (gate[[i for i in range(paths) if i != 3]] == 1).all()
    site, x = model.blocks[0].site_attention, torch.randn(5, 4, 16)
    gated = site(x)[1].post
    control.remove()
    assert torch.equal(gated, site(x)[1].post * gate[:4])


@pytest.mark.parametrize("name", [name for name in CONTROLS if name.startswith("curvature")])
def test_a_gated_run_trains_and_tells(name):
    model = gpt()
    options = {} if name == "curvature-auto" else {"strength": 1.0}
    control = primed(build(name, model, measurement=QUICK, **options))
    assert isinstance(control, Extension)
    assert isinstance(control, SharesStatistics)
    losses, rows = trained(model, control, batches(12))
    assert all(math.isfinite(loss) for loss in losses)
    assert [len(rows[-1][key]) for key in ("curvature", "gate")] == [4, 4]
    assert all(0 < g <= 1 for row in rows for site in row["gate"] for g in site)
    assert any(g < 1 for row in rows for site in row["gate"] for g in site)
    assert json.loads(json.dumps(rows)) == rows
    control.remove()
    assert all(site.control is None for site in (model.blocks[0].site_attention, model.blocks[1].site_ffn))


def test_ranks_that_add_their_sums_agree():
    """Two halves of a batch, summed, make the gates that each rank then has; the curvature is that of all tokens."""
    models = [gpt(), gpt()]
    controls = [CurvatureConstraint(model, 0.7, measurement=QUICK) for model in models]
    apart = []
    for step, batch in enumerate(batches(6), 1):
        for control, model, half in zip(controls, models, batch.chunk(2), strict=True):
            control.on_step_begin(step)
            model(half[:, :-1]).sum().backward()
            control.on_backward_end(step)
        if control._pending:
            each = [control.statistics()["curvature"] for control in controls]
            total = sum(each)
            apart.append(not torch.equal(*each))
            for control in controls:
                control.apply_statistics({"curvature": total})
                control._pending = False
    for control in controls:
        control.on_step_begin(7)
    assert torch.equal(controls[0].gate, controls[1].gate)
    assert torch.equal(controls[0].curvature, controls[1].curvature)
    assert torch.isfinite(controls[0].curvature).all()
    assert apart == [True] * 3


def test_a_run_goes_on_exactly():
    tokens = batches(9)
    whole = gpt()
    want, rows = trained(whole, CurvatureConstraint(whole, 0.8, final=1.0, steps=9, measurement=QUICK), tokens)
    for cut in (3, 4):  # before and after a measurement is applied
        first = gpt()
        control = CurvatureConstraint(first, 0.8, final=1.0, steps=9, measurement=QUICK)
        trained(first, control, tokens[:cut])
        second = gpt(seed=5)
        other = CurvatureConstraint(second, 0.8, final=1.0, steps=9, measurement=Measurement(**{**QUICK.__dict__, "seed": 9}))
        second.load_state_dict(first.state_dict())
        other.load_state_dict(control.state_dict())
        got, later = trained(second, other, tokens[cut:], first=cut + 1)
        assert got == want[cut:]
        assert later == rows[cut:]


def test_streams_made_again_and_checkpointed_blocks_are_the_same_run():
    from torch.utils.checkpoint import checkpoint

    def run(prepare):
        model = gpt()
        control = primed(CurvatureConstraint(model, 1.0, measurement=QUICK))
        return trained(model, control, batches(7), call=prepare(model))

    def chained(model):
        model.chained, model.recompute = True, 2
        return model

    def checkpointed(model):
        return lambda tokens: checkpoint(model, tokens, use_reentrant=False)

    want = run(lambda model: model)
    assert any(g < 1 for site in want[1][-1]["gate"] for g in site)
    assert run(checkpointed) == want
    assert run(chained)[0] == pytest.approx(want[0], rel=1e-4)


@needs_compiler
@pytest.mark.compiler
def test_gated_sites_compile():
    """Steps that watch and steps that don't, in one graph each."""
    sites = torch.nn.ModuleList([random_site(16, 4)])
    xs = torch.randn(4, 20, 4, 16)

    def through(x):
        h, merge = sites[0](x)
        return merge(torch.tanh(h))

    def run(call):
        control = primed(CurvatureConstraint(sites, 1.0, measurement=QUICK))
        found = []
        for step, x in enumerate(xs, 1):
            control.on_step_begin(step)
            found.append(call(x))
            control.on_backward_end(step)
        control.remove()
        return [*found, control.curvature, control.gate]

    compiled = run(torch.compile(through, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(compiled, run(through), rtol=1e-4, atol=1e-5)
    assert (compiled[-1] < 1).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_token_changes_no_other_and_leaves_the_gates_finite(poison):
    sites = torch.nn.ModuleList([random_site(16, 4) for _ in range(2)])
    control = CurvatureConstraint(sites, 1.0, measurement=QUICK)
    x = torch.randn(20, 4, 16)
    bad = x.clone()
    bad[7, 2, 5] = poison

    def run(x):
        for site in sites:
            h, merge = site(x)
            x = merge(torch.tanh(h))
        return x

    def step(number, x):
        control.on_step_begin(number)
        y = run(x)
        control.on_backward_end(number)
        return y

    others = [i for i in range(20) if i != 7]
    assert torch.equal(step(1, bad)[others], run(x)[others])
    assert torch.isfinite(control.statistics()["curvature"]).all()
    assert control.statistics()["curvature"][8:].tolist() == [20, 20, 19, 20] + [19] * 4  # tokens: of 24 places 20 are used
    step(2, x)
    step(3, bad)
    y = step(4, x)
    assert torch.isfinite(y).all()
    assert torch.isfinite(control.gate).all()


def test_one_token_is_no_cloud():
    model = gpt()
    control = CurvatureConstraint(model, 1.0, measurement=QUICK)
    for step in range(1, 4):
        control.on_step_begin(step)
        model(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
        control.on_backward_end(step)
    row = {}
    control.on_step_end(3, row)
    assert row["curvature"] == [[None] * 4] * 4
    assert (control.gate == 1).all()


def test_a_single_stream_has_no_maps_but_may_be_given_them():
    with pytest.raises(lw.InputError, match="model: got 'GPT'; accepted: a model with hyper-connections"):
        CurvatureConstraint(gpt(residual="residual"))
    with pytest.raises(lw.InputError, match="model: got 'GPT'"):
        build("constant", gpt(streams=1))
    site = torch.nn.Sequential(random_site(16, 1))
    control = CurvatureConstraint(site, 0.5, measurement=QUICK)
    control.on_step_begin(1)
    site[0](torch.randn(20, 1, 16))
    control.on_backward_end(1)
    control.on_step_begin(2)
    assert torch.isfinite(control.curvature).all()


def test_two_widths_and_another_control_before():
    sites = torch.nn.ModuleList([random_site(16, 4), random_site(24, 2), lw.HyperConnection(8, 1)])
    build("constant", sites, strength=0.5)
    control = build("curvature", sites, measurement=QUICK)
    assert isinstance(sites[0].control, ControlStack)
    control.on_step_begin(1)
    for site in sites[:2]:
        site(torch.randn(3, 10, site.streams, site.dim))
    control.on_backward_end(1)
    control.on_step_begin(2)
    assert torch.isfinite(control.curvature).tolist() == [True] * 6
    control.remove()
    x = torch.randn(3, 4, 16)
    half = sites[0](x)[1].post
    sites[0].control = None
    assert torch.equal(half, sites[0](x)[1].post * 0.5)


def test_the_controller_is_given_the_steps_numbers():
    model = gpt()
    auto = AutoStrength(AutoSettings(fast=2, slow=3, wait=2))
    control = CurvatureConstraint(model, auto, measurement=QUICK)
    for step in range(1, 20):
        control.on_step_begin(step)
        control.on_step_end(step, {"loss": 3.0 * 1.1**step, "grad_norm": 2.0**step})
    assert auto.value > 0.5
    assert control._current == pytest.approx(auto.value, abs=0.11)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"strength": 1.5}, "strength: got 1.5; accepted: a number from 0 to 1"),
        ({"strength": float("nan")}, "strength: got nan"),
        ({"strength": -0.01}, "strength: got -0.01"),
        ({"strength": True}, "strength: got True"),
        ({"strength": "half"}, "strength: got 'half'"),
        ({"final": 2.0, "steps": 5}, "final: got 2.0"),
        ({"strength": abs, "final": 0.5}, "final: got 0.5; accepted: None where strength is a function"),
        ({"measurement": Measurement(projection=17)}, "projection: got 17; accepted: an integer from 1 to 16"),
        ({"measurement": Measurement(sample=12)}, "sample: got 12; accepted: more tokens than neighbours = 12"),
        ({"measurement": Measurement(neighbours=1)}, "neighbours: got 1"),
        ({"measurement": Measurement(every=0)}, "every: got 0"),
        ({"measurement": Measurement(seed=-1)}, "seed: got -1"),
        ({"measurement": Measurement(window=0)}, "window: got 0"),
        ({"measurement": Measurement(sample=5, neighbours=5)}, "sample: got 5; accepted: more tokens than neighbours = 5"),
        ({"measurement": Measurement(seed=2**63)}, r"seed: got .*; accepted: an integer from 0 to below 2\*\*63"),
        ({"measurement": Measurement(decay="slow")}, "decay: got 'slow'"),
        ({"rule": Rule(form="hard")}, "form: got 'hard'"),
    ],
)
def test_bad_options_are_named_and_leave_the_model_alone(given, message):
    model = gpt()
    with pytest.raises(lw.InputError, match=message):
        CurvatureConstraint(model, **given)
    assert model.blocks[0].site_attention.control is None


MADE = {
    Rule: lambda model, config: CurvatureConstraint(model, rule=config),
    Measurement: lambda model, config: CurvatureConstraint(model, measurement=config),
    AutoSettings: lambda model, config: CurvatureConstraint(model, AutoStrength(config)),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_field_of_another_type_is_named(kind):
    model = gpt()
    for name in (field.name for field in fields(kind)):
        for wrong in ("no", [1], 1 if name == "res" else True):
            with pytest.raises(lw.InputError, match=rf"{name}: got {re.escape(repr(wrong))}; accepted: "):
                MADE[kind](model, kind(**{name: wrong}))
    assert model.blocks[0].site_attention.control is None


def test_a_function_of_the_step_that_leaves_the_range_is_named():
    control = CurvatureConstraint(gpt(), lambda step: step / 2, measurement=QUICK)
    control.on_step_begin(2)
    with pytest.raises(lw.InputError, match=r"strength: got 1\.5"):
        control.on_step_begin(3)


def test_an_unknown_control_is_named():
    with pytest.raises(lw.InputError, match=r"name: got 'curvatur'.*did you mean 'curvature'"):
        build("curvatur", gpt())


def test_a_small_batch_measures_a_part_of_the_sample():
    strides = [Measurement().stride(tokens) for tokens in (14, 512, 1023, 1024, 10**6)]
    assert strides == [2, 2, 1, 1, 1]
    assert Measurement(sample=256).stride(2048) == 2
    assert Measurement(sample=16).stride(64) == 1
