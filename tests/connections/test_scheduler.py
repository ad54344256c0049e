"""The scheduler of streams: nothing at first, causal, bounded, on wrapped models, with bad tokens; what stands beside it."""

from __future__ import annotations

import copy
import math
import shutil

import pytest
import torch
from cases import branch_for, error, random_site
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import laneway as lw
from laneway.connections import StreamChain, param_groups
from laneway.connections.control import ControlStack
from laneway.connections.controls import build
from laneway.connections.gates import ConstantStrength
from laneway.connections.paths import paths_of
from laneway.connections.schedule import FixedPriorities, Schedule, SiteScheduler, add_scheduler, schedulers
from laneway.connections.scheduler import NAME, ConnectionScheduler
from laneway.core import Extension, SharesStatistics
from laneway.models.gpt import GPT, GPTConfig

DIM, N = 12, 4
QUICK = Schedule(every=2, directions=2, features=6, sample=24, decay=0.5)
needs_compiler = pytest.mark.skipif(not shutil.which("c++") and not shutil.which("g++"), reason="no C++ compiler")


def quick(**fields):
    return Schedule(**{name: getattr(QUICK, name) for name in ("every", "directions", "features", "sample", "decay")} | fields)


def gpt(seed=0, **fields):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{"vocab_size": 31, "context": 12, "layers": 2, "heads": 2, "dim": 16} | fields))


def batches(steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(31, (4, 13), generator=generator) for _ in range(steps)]


def loss_of(call, batch):
    return cross_entropy(call(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def trained(model, control, tokens, first=1, call=None, lr=3e-2):
    """Losses, and the rows that the control wrote."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    losses, rows = [], []
    for step, batch in enumerate(tokens, first):
        control.on_step_begin(step)
        loss = loss_of(call or model, batch)
        optimizer.zero_grad()
        loss.backward()
        control.on_backward_end(step)
        optimizer.step()
        row = {}
        control.on_step_end(step, row)
        losses.append(loss.item())
        rows.append(row)
    return losses, rows


def decided(control, seed=3):
    """A control that is far from its start: random queries and statistics."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for site in control if isinstance(control, list) else control.sites:
            site.query.normal_(generator=generator)
            site.demand.normal_(generator=generator)
            site.damping.uniform_(0.5, 1, generator=generator)
    return control


def controlled(site, schedule=QUICK, seed=3):
    site.control = SiteScheduler(site, schedule)
    decided([site.control], seed)
    return site


@pytest.mark.parametrize(
    ("form", "residual", "streams"), [("scale", "mhc", 4), ("logits", "mhc", 3), ("logits", "mhc-lite", 4), ("scale", "hc", 3)]
)
def test_at_the_start_it_is_the_same_function_bit_for_bit(form, residual, streams):
    """In a chain and block by block, in fp32 and under autocast; and no number was drawn for it."""
    plain, model = gpt(residual=residual, streams=streams), gpt(residual=residual, streams=streams)
    state = torch.get_rng_state()
    control = ConnectionScheduler(model, quick(form=form))
    assert torch.equal(torch.get_rng_state(), state)
    tokens = batches(1)[0][:, :-1]
    control.on_step_begin(1)  # watching changes nothing either
    for chained in (False, True):
        plain.chained = model.chained = chained
        for narrow in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                assert torch.equal(model(tokens), plain(tokens))
    loss_of(model, batches(1)[0]).backward()
    alive = torch.stack([site.query.grad.norm(dim=-1) for site in control.sites]) > 0
    assert alive.any() if residual == "hc" else alive.all()  # HC begins with equal streams, whose order nothing can tell


def test_without_a_scheduler_nothing_is_left_of_it():
    plain, model = gpt(), gpt()
    control = ConnectionScheduler(model, QUICK)
    trained(model, control, batches(3))
    control.remove()
    assert not schedulers(model)
    model.load_state_dict(plain.state_dict())
    losses = [loss_of(m, batches(1)[0]) for m in (plain, model)]
    assert torch.equal(*losses)
    grads = [torch.autograd.grad(loss, list(m.parameters())) for loss, m in zip(losses, (plain, model), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("form", ["scale", "logits"])
def test_no_token_sees_a_later_one(form):
    model = gpt()
    decided(ConnectionScheduler(model, quick(form=form)))
    tokens = batches(1)[0][:, :-1]
    for at in (1, 6, 11):
        other = tokens.clone()
        other[:, at:] = (other[:, at:] + 1 + torch.randint(29, other[:, at:].shape)) % 31
        before, after = model(tokens), model(other)
        assert torch.equal(before[:, :at], after[:, :at])
        assert not torch.allclose(before[:, at:], after[:, at:])


def test_what_a_step_measures_acts_from_the_next_one_on():
    """Statistics mix all tokens of a step, so none may reach a token of that step; and what they mix does act afterwards."""
    tokens = batches(1)[0]
    other = torch.cat([tokens[:, :6], (tokens[:, 6:] + 1) % 31], 1)
    decisions = []
    for batch in (tokens, other):
        model = gpt()
        control = decided(ConnectionScheduler(model, quick(every=1)))
        control.on_step_begin(1)
        held = [(site.demand.clone(), site.damping.clone()) for site in control.sites]
        outputs = model(tokens[:, :-1])
        assert torch.equal(model(other[:, :-1])[:, :6], outputs[:, :6])  # while it watches
        loss_of(model, batch).backward()
        control.on_backward_end(1)
        assert all(
            torch.equal(a, site.demand) and torch.equal(b, site.damping) for site, (a, b) in zip(control.sites, held, strict=True)
        )
        assert torch.equal(model(tokens[:, :-1]), outputs)
        control.on_step_begin(2)
        assert not torch.equal(model(tokens[:, :-1])[:, :6], outputs[:, :6])
        decisions.append(torch.stack([site.demand for site in control.sites]))
    assert not torch.equal(*decisions)


@pytest.mark.parametrize("form", ["scale", "logits"])
@pytest.mark.parametrize("manifold", ["sinkhorn", "birkhoff", "none"])
@pytest.mark.parametrize("keep", [False, True])
def test_maps_are_what_the_formulas_say(form, manifold, keep):
    """In float64 by hand: priorities, both forms, damping, total."""
    site, x = random_site(DIM, N, manifold, dtype=torch.float64), torch.randn(9, N, DIM).double()
    plain = site(x)[1]
    pre, post = (plain.pre, plain.post) if manifold == "sinkhorn" else (site._pre(site._maps(x)[2]), plain.post)
    schedule = quick(form=form, keep_total=keep, temperature=0.7, demand=0.4, floor=0.1)
    control = controlled(site, schedule).control.double()
    z = x / (x.square().mean(-1, keepdim=True)).sqrt() @ control.sampler.projection * math.sqrt(6 / DIM)
    keys = z @ control.key.T + control.stream
    scores = torch.einsum("kd,tnd->tkn", control.query, keys) / (0.7 * math.sqrt(6)) + 0.4 * control.demand
    w = 4 * (0.1 + (1 - 0.4) * scores.softmax(-1))
    read, write = w.unbind(1)
    if form == "scale":
        new_pre, new_post = pre * read, post * write
    elif manifold == "none":
        new_pre, new_post = pre + read.log(), post + write.log()
    else:
        new_pre = ((pre / (1 - pre)).log() + read.log()).sigmoid()
        new_post = 2 * ((post / (2 - post)).log() + write.log()).sigmoid()
    new_post = new_post * control.damping
    if keep:
        new_post = new_post * post.abs().sum(-1, keepdim=True) / new_post.abs().sum(-1, keepdim=True)
    h, merge = site(x)
    torch.testing.assert_close(merge.post, new_post)
    torch.testing.assert_close(h, torch.einsum("tn,tnc->tc", new_pre, x))
    torch.testing.assert_close(control.priorities(x, torch.float64), w)


def test_a_chain_and_streams_made_again_are_site_after_site():
    sites, branches = [controlled(random_site(DIM, N), seed=i) for i in range(4)], [branch_for(DIM) for _ in range(4)]
    x, gy = torch.randn(9, N, DIM, requires_grad=True), torch.randn(9, N, DIM)
    weights = [p for site in sites for p in site.parameters()]

    def chained(recompute):
        chain = StreamChain(x, recompute)
        for site, branch in zip(sites, branches, strict=True):
            chain.leave(branch(chain.enter(site)))
        return chain.streams()

    y = x
    for site, branch in zip(sites, branches, strict=True):
        h, merge = site(y)
        y = merge(branch(h))
    want = [y, *torch.autograd.grad(y, [x, *weights], gy)]
    first = None
    for recompute in (None, 1, 2, 3):
        y = chained(recompute)
        got = [y, *torch.autograd.grad(y, [x, *weights], gy)]
        assert torch.equal(got[0], want[0])
        assert all(error(a, b) < 3e-5 for a, b in zip(got, want, strict=True))
        first = first or got
        if recompute is not None:
            for a, b in zip(got, first, strict=True):
                assert torch.equal(a, b)


def test_gradients_are_those_of_the_function():
    """Streams and all parameters, in float64: exact but for the summaries, which carry none by design."""
    site = controlled(random_site(4, 3, dtype=torch.float64), quick(features=3, form="logits")).double()
    x = torch.randn(3, 3, 4, dtype=torch.float64)
    names = [name for name, _ in site.named_parameters()]

    def function(*values):
        h, merge = torch.func.functional_call(site, dict(zip(names, values, strict=True)), (x,))
        return merge(torch.tanh(h))

    values = [p.detach().clone().requires_grad_() for p in site.parameters()]
    assert {"control.query", "control.key", "control.stream"} <= set(names)
    assert torch.autograd.gradcheck(function, values, fast_mode=True)


def test_use_is_gradient_times_map():
    """|∂L/∂m · m| summed over tokens and micro-batches, against the gradient of a factor for each token."""
    site, branch = random_site(DIM, N), branch_for(DIM)
    x, gy = torch.randn(2, 7, N, DIM), torch.randn(2, 7, N, DIM)
    site.control = control = SiteScheduler(site, QUICK)
    control.watch(True)
    want = torch.zeros(2, N)
    for part, g in zip(x, gy, strict=True):
        h, merge = site(part)
        merge(branch(h)).backward(g)
        plain = copy.deepcopy(site)
        plain.control = None
        pre, post = (t.detach().requires_grad_() for t in (plain(part)[1].pre, plain(part)[1].post))
        f = branch(torch.einsum("tn,tnc->tc", pre, part))
        y = plain(part)[1].res.detach() @ part + post.unsqueeze(-1) * f.unsqueeze(-2)
        want += torch.stack(
            [(g * m).abs().sum(0) for g, m in zip(torch.autograd.grad(y, [pre, post], g), (pre, post), strict=True)]
        )
    torch.testing.assert_close(control.meter.grad, want.detach(), rtol=1e-4, atol=1e-4)
    assert control.points.isfinite().any()


def test_a_run_decides_within_its_bounds_and_tells():
    model = gpt()
    control = ConnectionScheduler(model, quick(floor=0.06))
    assert isinstance(control, Extension)
    assert isinstance(control, SharesStatistics)
    losses, rows = trained(model, control, batches(12))
    assert all(map(math.isfinite, losses))
    assert rows[0] == {}
    assert rows[1] == rows[2] != {}
    assert set(rows[-1]) == {"priority", "read_priority", "similarity", "damping"}
    for name, low, high in (("priority", 0.06, 1), ("read_priority", 0.06, 1), ("similarity", 0, 1), ("damping", 0.5, 1)):
        numbers = torch.tensor(rows[-1][name])
        assert numbers.shape == (4, 4)
        assert ((numbers >= low - 1e-6) & (numbers <= high)).all()
    for name in ("priority", "read_priority"):
        torch.testing.assert_close(torch.tensor(rows[-1][name]).sum(-1), torch.ones(4))
        assert torch.tensor(rows[-1][name]).std() > 0
    assert any(g < 1 for site in rows[-1]["damping"] for g in site)


class Copies(TorchDispatchMode):
    """Notes what is written to a tensor of the host."""

    def __init__(self, host):
        super().__init__()
        self.host, self.found = host, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name() not in ("aten::_local_scalar_dense", "aten::_to_copy"), func.name()
        if func.name() == "aten::copy_" and args[0].data_ptr() == self.host.data_ptr():
            self.found.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_a_measurement_is_one_copy_to_the_host_read_when_the_step_has_ended(monkeypatch):
    model = gpt()
    control = ConnectionScheduler(model, QUICK)
    trained(model, control, batches(1))
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(t.numel()) or tolist(t))
    with Copies(control._host) as copies:
        control.on_step_begin(2)
    assert copies.found == [4 * 4 * 4]  # numbers told, sites, streams
    assert not reads
    row = {}
    control.on_step_end(2, row)
    control.on_step_end(2, row)
    assert reads == [64]
    for name, want in (("damping", [site.damping for site in control.sites]), ("priority", None)):
        assert want is None or row[name] == [tolist(t) for t in want]
        assert [len(site) for site in row[name]] == [4] * 4


def test_streams_that_are_used_more_come_first_and_copies_yield():
    model = gpt()
    control = ConnectionScheduler(model, quick(decay=0.0))
    sums = control.statistics()[NAME]
    similarity = torch.eye(4).expand(4, 4, 4).clone()
    similarity[:, 0, 1] = similarity[:, 1, 0] = 1.0
    use = torch.tensor([[1.0, 1, 1, 1], [4, 1, 2, 2]]).expand(4, 2, 4)
    parts = similarity, torch.ones(4, 4, 4), use, torch.zeros(4, 2, 5)
    control.apply_statistics({NAME: torch.cat([part.reshape(-1) for part in parts])})
    assert control.statistics()[NAME].shape == sums.shape
    site = control.sites[2]
    read, write = site.priorities(torch.randn(5, 4, 16)).unbind(-2)
    assert torch.equal(read, torch.ones(5, 4))
    assert (write[:, 0] > write[:, 2]).all()
    assert torch.equal(write[:, 2], write[:, 3])
    assert (write[:, 3] > write[:, 1]).all()
    # The pair collides fully; stream 1 is used a quarter as much, so it yields four times as much.
    torch.testing.assert_close(site.damping, torch.tensor([1 / (1 + 0.5 * 0.4 / 3), 1 / (1 + 0.5 * 1.6 / 3), 1.0, 1.0]))


def test_likeness_begins_with_its_first_measurement_and_use_grows():
    """So that streams that are alike yield from the first measurement on; a pair that wasn't compared stays as it was."""
    control = ConnectionScheduler(gpt(), quick(decay=0.75, threshold=0.5, damping=1.0))
    pairs, use = torch.ones(4, 4, 4), torch.tensor([4.0, 1, 2, 1]).expand(4, 2, 4)
    pairs[:, 0, 3] = pairs[:, 3, 0] = 0
    for value, want in ((0.9, 0.9), (0.7, 0.75 * 0.9 + 0.25 * 0.7)):
        parts = value * pairs, pairs, use, torch.zeros(4, 2, 5)
        control.apply_statistics({NAME: torch.cat([part.reshape(-1) for part in parts])})
        for site in control.sites:
            torch.testing.assert_close(site.similarity, want * pairs[0])
            assert (site.damping < 1).all()
    grown = (1 - 0.75**2) * use[0].div(2).log()
    torch.testing.assert_close(control.sites[0].demand, grown)


def test_ranks_that_add_their_sums_agree_on_what_all_tokens_say():
    models = [gpt(), gpt()]
    controls, whole = [ConnectionScheduler(model, QUICK) for model in models], gpt()
    alone = ConnectionScheduler(whole, QUICK)
    for step, batch in enumerate(batches(5), 1):
        for control, model, part in zip([*controls, alone], [*models, whole], [*batch.chunk(2), batch], strict=True):
            control.on_step_begin(step)
            cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), reduction="sum").backward()
            control.on_backward_end(step)
        if alone._pending:
            total = sum(control.statistics()[NAME] for control in controls)
            for control in controls:
                control.apply_statistics({NAME: total})
                control._pending = False
    alone.on_step_begin(6)
    for a, b, c in zip(controls[0].sites, controls[1].sites, alone.sites, strict=True):
        for name in ("demand", "similarity", "damping"):
            assert torch.equal(getattr(a, name), getattr(b, name))
        torch.testing.assert_close(a.demand, c.demand, rtol=0.05, atol=0.05)  # what is alike of two halves and of all
        assert a.demand.abs().sum() > 0


def test_a_resumed_run_is_the_run():
    whole, parts = gpt(), gpt()
    one, two = ConnectionScheduler(whole, QUICK), ConnectionScheduler(parts, QUICK)
    tokens = batches(8)
    want, rows = trained(whole, one, tokens)
    first, _ = trained(parts, two, tokens[:3])  # a measurement is pending
    again = gpt(seed=5)
    third = ConnectionScheduler(again, QUICK)
    again.load_state_dict(parts.state_dict())
    third.load_state_dict(two.state_dict())
    rest, resumed = trained(again, third, tokens[3:], first=4)
    assert first + rest == want
    assert resumed[-1] == rows[-1]


def test_blocks_made_again_are_the_same_run():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    found = []
    for kind in ("plain", "checkpointed", "recomputed"):
        model = gpt()
        control = ConnectionScheduler(model, QUICK)
        if kind == "checkpointed":
            for index, block in enumerate(model.blocks):
                model.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        model.chained, model.recompute = kind == "recomputed", 2 if kind == "recomputed" else 0
        found.append(trained(model, control, batches(6))[0])
    assert found[1] == found[0]
    assert found[2] == pytest.approx(found[0], rel=1e-5)


@needs_compiler
@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("watching", [False, True])
def test_scheduled_sites_compile_without_a_graph_break(watching):
    sites, branches = [controlled(random_site(DIM, N), seed=i) for i in range(2)], [branch_for(DIM) for _ in range(2)]
    x = torch.randn(6, N, DIM, requires_grad=True)

    def run(x):
        for site, branch in zip(sites, branches, strict=True):
            h, merge = site(x)
            x = merge(branch(h))
        return x

    def found(call):
        for site in sites:
            site.control.watch(watching)
        y = call(x)
        grads = torch.autograd.grad(y.square().sum(), [x, *(p for s in sites for p in s.parameters())], retain_graph=True)
        y.square().sum().backward()
        use = [site.control.meter.grad for site in sites] if watching else []
        return [y, *grads, *use]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, b in zip(found(compiled), found(run), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_a_poisoned_token_changes_no_other_and_no_decision(poison):
    site, branch = controlled(random_site(DIM, N)), branch_for(DIM)
    x = torch.randn(40, N, DIM)
    bad = x.clone()
    bad[3, 1] = poison
    results = []
    for streams in (x, bad):
        site.control.watch(True)
        h, merge = site(streams)
        y = merge(branch(h))
        y[torch.arange(40) != 3].sum().backward()
        results.append((y.detach(), site.control.points.clone(), site.control.meter.grad.clone()))
    keep = torch.arange(40) != 3
    assert torch.equal(results[0][0][keep], results[1][0][keep])
    assert results[1][2].isfinite().all()
    assert site.control.seen.isfinite().all()
    torch.testing.assert_close(results[1][2], results[0][2], rtol=1e-5, atol=1e-5)


def test_one_token_and_none():
    model = gpt()
    control = ConnectionScheduler(model, QUICK)
    one = torch.randint(31, (1, 2))
    losses, rows = trained(model, control, [one] * 5)
    assert all(map(math.isfinite, losses))
    assert rows[-1]["similarity"] == [[0.0] * 4] * 4
    assert rows[-1]["damping"] == [[1.0] * 4] * 4
    site = control.sites[0]
    assert site.priorities(torch.randn(0, 4, 16)).shape == (0, 2, 4)


def test_its_parameters_are_the_models_without_decay_and_no_path():
    plain, model = gpt(), gpt()
    control = ConnectionScheduler(model, Schedule(directions=2))
    added = {name for name, _ in model.named_parameters()} - {name for name, _ in plain.named_parameters()}
    assert len(added) == 3 * 4
    extra = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in plain.parameters())
    assert extra == control.parameters == 4 * (4 * 16 + 16**2 + 2 * 16)
    free = {id(p) for group in param_groups(model) if group["weight_decay"] == 0 for p in group["params"]}
    assert all(id(model.get_parameter(name)) in free for name in added)
    assert [path.name for path in paths_of(model)] == [path.name for path in paths_of(plain)]
    model.to(torch.bfloat16)
    assert all(p.dtype == torch.float32 for site in control.sites for p in site.parameters())


def test_two_widths_and_numbers_of_streams_and_another_control_before():
    sites = torch.nn.ModuleList([random_site(DIM, 4), random_site(5, 4), random_site(DIM, 2)])
    sites[1].control = ConstantStrength(4, 0.5)
    control = ConnectionScheduler(sites, QUICK)
    assert isinstance(sites[1].control, ControlStack)
    control.on_step_begin(1)
    for site in sites:
        h, merge = site(torch.randn(30, site.streams, site.dim))
        merge(torch.tanh(h)).square().sum().backward()
    control.on_backward_end(1)
    control.on_step_begin(2)
    row = {}
    control.on_step_end(2, row)
    assert [len(site) for site in row["damping"]] == [4, 4, 2]
    assert all(site.demand.abs().sum() > 0 for site in control.sites)
    assert all((site.similarity.diagonal() > 0).all() for site in control.sites)


@pytest.mark.parametrize("form", ["scale", "logits"])
def test_fixed_priorities_are_the_same_for_every_token(form):
    site, x = random_site(DIM, N), torch.randn(5, N, DIM)
    plain = site(x)[1]
    site.control = FixedPriorities([4, 2, 1, 1], form)
    merge = site(x)[1]
    w = torch.tensor([2.0, 1, 0.5, 0.5])
    pre, post = plain.pre * w, plain.post * w
    if form == "logits":
        pre, post = plain.pre * w / (1 + plain.pre * (w - 1)), plain.post * w / (1 + plain.post / 2 * (w - 1))
    torch.testing.assert_close(merge.pre, pre)
    torch.testing.assert_close(merge.post, post * plain.post.sum(-1, keepdim=True) / post.sum(-1, keepdim=True))
    site.control = FixedPriorities([3, 3, 3, 3], form)
    assert torch.equal(site(x)[1].post, plain.post)


@pytest.mark.parametrize("name", ["scheduler", "scheduler-logits", "priorities"])
def test_controls_by_name(name):
    model = gpt()
    control = build(name, model)
    assert isinstance(control, Extension)
    assert all(map(math.isfinite, trained(model, control, batches(3))[0]))
    control.remove()
    assert all(site.control is None for site in (model.blocks[0].site_attention, model.blocks[1].site_ffn))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.0}, r"temperature: got 0\.0; accepted: a number > 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"floor": 0.25}, r"floor: got 0\.25; accepted: a number > 0 and < 1 / streams = 1 / 4"),
        ({"floor": 0.0}, "floor"),
        ({"form": "scal"}, "form.*did you mean 'scale'"),
        ({"demand": 1.0}, "demand"),
        ({"damping": -0.1}, "damping"),
        ({"damping": float("inf")}, "damping"),
        ({"threshold": 1.0}, "threshold"),
        ({"decay": 1.0}, "decay"),
        ({"every": 0}, "every"),
        *(({name: "x"}, f"{name}: got 'x'") for name in ("temperature", "demand", "damping", "threshold", "decay", "every")),
        *(({name: None}, f"{name}: got None") for name in ("temperature", "floor", "features", "directions", "sample")),
        ({"temperature": True}, "temperature: got True"),
        ({"features": 33}, "features"),
        ({"directions": 6}, r"directions: got 6; accepted: an integer from 1 to below the 6 dimensions"),
        ({"sample": 2}, "sample"),
    ],
)
def test_bad_options_are_named_and_leave_the_model_alone(fields, message):
    model = gpt()
    with pytest.raises(lw.InputError, match=message):
        add_scheduler(model, quick(**fields))
    assert not schedulers(model)


def test_what_has_no_streams_or_a_scheduler_already_is_refused():
    with pytest.raises(lw.InputError, match="model: got 'GPT'; accepted: a model with hyper-connections of two or more streams"):
        ConnectionScheduler(gpt(residual="residual"))
    model = gpt()
    add_scheduler(model, QUICK)
    with pytest.raises(lw.InputError, match="schedule"):
        ConnectionScheduler(model, QUICK)
    for shares in ([1.0, 2, 3], [1.0, 0, 1, 1], [1.0, -1, 1, 1], [1, 1, 1, "x"], [1, 1, 1, math.nan], []):
        with pytest.raises(lw.InputError, match="shares"):
            build("priorities", gpt(), shares=shares)
