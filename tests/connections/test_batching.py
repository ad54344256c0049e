"""Under vmap every model computes what it computes alone, and nothing crosses from one to another."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import random_site
from torch.func import functional_call, stack_module_state, vmap

from laneway.connections import StreamReadout, batching
from laneway.connections.control import StreamControl

MODELS, TOKENS, STREAMS, DIM = 3, 5, 4, 6
KINDS = [("sinkhorn", {}), ("sinkhorn", {"eps": 1e-6, "cap": None}), ("none", {}), ("birkhoff", {}), ("orthogonal", {})]


class Two(torch.nn.Module):
    """Two sites with a sub-layer between them, so that the fused crossing runs, and a read-out."""

    def __init__(self, manifold: str, options: dict, dtype: torch.dtype) -> None:
        super().__init__()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.first, self.second = (random_site(DIM, STREAMS, manifold, dtype=wide, **options) for _ in range(2))
        self.between = torch.nn.Linear(DIM, DIM, bias=False, dtype=wide)
        self.readout = StreamReadout(DIM, STREAMS)
        self.readout.to(wide)
        torch.nn.init.normal_(self.readout.fn, std=0.3)

    def branch(self, h):
        return torch.tanh(self.between(h.to(self.between.weight.dtype))).to(h.dtype)

    def forward(self, x):
        h, merge = self.first(x)
        h, merge = merge.into(self.second, self.branch(h))
        return self.readout(merge(self.branch(h)))


def together(models, x):
    """Outputs [R, …] and the gradients of x and of the stacked parameters, for the sum of squares."""
    parameters, buffers = stack_module_state(models)
    x = x.clone().requires_grad_()
    y = vmap(lambda p, b, x: functional_call(models[0], (p, b), (x,)))(parameters, buffers, x)
    names = list(parameters)
    gx, *grads = torch.autograd.grad(y.float().square().sum(), [x, *(parameters[n] for n in names)])
    return y.detach(), gx, dict(zip(names, grads, strict=True))


def alone(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gx, *grads = torch.autograd.grad(y.float().square().sum(), [x, *parameters])
    return y.detach(), gx, dict(zip(names, grads, strict=True))


def close(a, b, tolerance):
    assert a.dtype == b.dtype
    scale = b.double().abs().max().clamp_min(1e-12)
    assert (a.double() - b.double()).abs().max() <= tolerance * scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("manifold", "options"), KINDS, ids=str)
def test_each_model_is_as_alone(manifold, options, dtype):
    models = [Two(manifold, options, dtype) for _ in range(MODELS)]
    x = torch.randn(MODELS, 2, TOKENS, STREAMS, DIM).to(dtype)
    y, gx, grads = together(models, x)
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 6e-3}[dtype]
    for index, model in enumerate(models):
        one, one_gx, one_grads = alone(model, x[index])
        close(y[index], one, tolerance)
        close(gx[index], one_gx, tolerance)
        for name, grad in one_grads.items():
            close(grads[name][index], grad, tolerance)


def test_single_pass_sites_take_weights_of_their_own_model():
    models = [random_site(DIM, STREAMS, single_pass=True) for _ in range(MODELS)]
    x, pre = torch.randn(MODELS, TOKENS, STREAMS, DIM), torch.rand(MODELS, TOKENS, STREAMS)
    parameters, buffers = stack_module_state(models)
    h = vmap(lambda p, b, x, w: functional_call(models[0], (p, b), (x, w))[0])(parameters, buffers, x, pre)
    for index, model in enumerate(models):
        close(h[index], model(x[index], pre[index])[0], 1e-5)


@pytest.mark.parametrize("manifold", ["sinkhorn", "none", "birkhoff"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_poisoned_model_stays_alone(manifold, value):
    models = [Two(manifold, {}, torch.float32) for _ in range(MODELS)]
    x = torch.randn(MODELS, TOKENS, STREAMS, DIM)
    poisoned = x.clone()
    poisoned[1, 0, 2, 3] = value
    before, after = together(models, x), together(models, poisoned)
    for index in (0, 2):
        assert torch.equal(before[0][index], after[0][index])
        assert torch.equal(before[1][index], after[1][index])
        for name in before[2]:
            assert torch.equal(before[2][name][index], after[2][name][index])


class Towards(StreamControl):
    """Moves H_res towards the identity and weakens the writes, as a gate does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keep", torch.rand(()))

    def forward(self, site, x, pre, post, res):
        return pre, post * self.keep, res * self.keep + torch.eye(site.streams) * (1 - self.keep)


class Reads(Towards):
    """Changes what the sub-layer reads too, so that h is mixed anew."""

    def forward(self, site, x, pre, post, res):
        pre, post, res = super().forward(site, x, pre, post, res)
        return pre * (0.5 + self.keep * torch.arange(site.streams)), post, res


def test_a_rule_of_another_number_of_results_is_refused():
    with pytest.raises(RuntimeError, match="not the 2 results"):
        batching._rule(1, 2)(lambda x: x)(type("Info", (), {"batch_size": 2}), (0,), torch.ones(2, 3))


@pytest.mark.parametrize("control", [Towards, Reads])
@pytest.mark.parametrize("manifold", ["sinkhorn", "birkhoff"])
def test_controls_see_their_own_model(manifold, control):
    models = [Two(manifold, {}, torch.float32) for _ in range(MODELS)]
    for model in models:
        model.first.control, model.second.control = control(), control()
    x = torch.randn(MODELS, TOKENS, STREAMS, DIM)
    y, gx, grads = together(models, x)
    for index, model in enumerate(models):
        one, one_gx, one_grads = alone(copy.deepcopy(model), x[index])
        close(y[index], one, 1e-4)
        close(gx[index], one_gx, 1e-4)
        for name, grad in one_grads.items():
            close(grads[name][index], grad, 1e-4)
