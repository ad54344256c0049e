"""Precision: maps are fp32 whatever the sub-layers are, and fp8 products are as exact as e4m3 allows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import laneway as lw
from laneway.connections import precision
from laneway.connections.precision import FP8Linear, fp8_linear, fp8_missing, quantise, require_fp8, use_fp8
from laneway.models.gpt import GPT, RESIDUALS, GPTConfig

fp8 = pytest.mark.skipif(fp8_missing("cpu") is not None, reason=str(fp8_missing("cpu")))
SMALL = {"dim": 32, "layers": 2, "heads": 2, "context": 16}
WIDE_RESULTS = {"laneway::pre_mix": (1, 3, 4), "laneway::sinkhorn": (0,)}  # logits, z, r; H_res
WIDE_INPUTS = {"laneway::pre_mix": (1, 2, 3), "laneway::sinkhorn": (0,), "laneway::post_mix": (3, 4)}
WIDE_INPUTS |= {"laneway::sinkhorn_backward": (0, 1), "laneway::post_mix_backward": (3, 4)}
WIDE_INPUTS |= {"laneway::pre_mix_backward": (2, 4, 5, 6, 7, 8)}
# The ops of a whole site: parameters, maps, z and r; the gradients of maps and parameters.
WIDE_INPUTS |= {"laneway::mhc_pre": (2, 3, 4), "laneway::mhc_post": (3,), "laneway::mhc_cross": (3, 5, 6, 7)}
WIDE_INPUTS |= {"laneway::mhc_pre_backward": (3, 5, 6, 7, 8, 9, 10), "laneway::mhc_post_backward": (3,)}
WIDE_INPUTS |= {"laneway::mhc_cross_backward": (3, 6, 9, 10, 11, 12, 13, 14)}
WIDE_RESULTS |= {"laneway::mhc_pre": (1, 3, 4), "laneway::mhc_cross": (2, 4, 5), "laneway::mhc_pre_backward": (1, 2, 3)}
WIDE_RESULTS |= {"laneway::mhc_post_backward": (1,), "laneway::mhc_cross_backward": (2, 3, 4, 5)}


class Dtypes(TorchDispatchMode):
    """Records the dtypes of what belongs to the maps, at every op of a site that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        name = op.name().removesuffix(".default")
        if name in WIDE_INPUTS:
            outputs = result if isinstance(result, tuple | list) else (result,)
            tensors = [args[i] for i in WIDE_INPUTS[name]] + [outputs[i] for i in WIDE_RESULTS.get(name, ())]
            self.seen.setdefault(name, set()).update(t.dtype for t in tensors)
        return result


def loss_of(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("residual", ["mhc", "hc", "orthogonal"])
@pytest.mark.parametrize("how", ["autocast", "model.to(bfloat16)", "both"])
def test_maps_are_fp32_in_every_op_forward_and_backward(residual, how):
    model, tokens = GPT(GPTConfig(**SMALL, residual=residual)), torch.randint(0, 256, (2, 16))
    if how != "autocast":
        model.to(torch.bfloat16)
    streams = []
    model.readout.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0].dtype))
    with Dtypes() as dtypes:
        with torch.autocast("cpu", torch.bfloat16, enabled=how != "model.to(bfloat16)"):
            loss = loss_of(model, tokens)
        loss.backward()
    ops = {"laneway::pre_mix", "laneway::pre_mix_backward"}  # of the read-out, too
    own = ("mhc_pre", "mhc_cross", "mhc_post") if residual == "mhc" else ("post_mix",)
    ops |= {f"laneway::{name}{end}" for name in own for end in ("", "_backward")}
    assert set(dtypes.seen) == ops, "every op was seen"
    assert dtypes.seen == {name: {torch.float32} for name in ops}
    assert streams == [torch.bfloat16], "the streams themselves are narrow"


@pytest.mark.parametrize("residual", [name for name in RESIDUALS if name != "residual"])
def test_parameters_of_sites_stay_fp32_and_so_do_their_gradients(residual):
    model = GPT(GPTConfig(**SMALL, residual=residual)).to(torch.bfloat16)
    loss_of(model, torch.randint(0, 256, (2, 16))).backward()
    sites = [m for m in model.modules() if isinstance(m, lw.HyperConnection | lw.StreamReadout)]
    maps = {id(p) for site in sites for p in site.parameters()}
    assert maps
    for parameter in model.parameters():
        want = torch.float32 if id(parameter) in maps else torch.bfloat16
        assert parameter.dtype == parameter.grad.dtype == want


def fp8_bound(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Largest possible error of each output, as the module states it; float64."""

    def off(t: torch.Tensor) -> torch.Tensor:
        return torch.maximum(t.abs() * 2**-4, t.abs().max() / 448 * 2**-10)

    ex, ew = off(x), off(w)
    return ex @ w.abs().T + x.abs() @ ew.T + ex @ ew.T


@fp8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [0.0, 2.0], ids=["alike", "of many sizes"])
def test_fp8_product_keeps_its_stated_bound(dtype, spread):
    x, w = ((torch.randn(s) * torch.exp(spread * torch.randn(s)) / 128).to(dtype) for s in ((40, 64), (48, 64)))
    y, wide = fp8_linear(x, w), (x.double(), w.double())
    assert y.dtype == dtype
    exact, bound = wide[0] @ wide[1].T, fp8_bound(*wide)
    rounding = torch.finfo(dtype).eps * (exact.abs() + bound) + torch.finfo(dtype).tiny + 1e-5 * wide[0].abs() @ wide[1].T.abs()
    assert ((y.double() - exact).abs() <= bound + rounding).all()


@fp8
def test_fp8_error_is_that_of_rounding_in_plain_pytorch():
    x, w = torch.randn(200, 128), torch.randn(64, 128)
    exact = x.double() @ w.double().T
    plain = [(t / (t.abs().max() / 448)).to(torch.float8_e4m3fn).float() * (t.abs().max() / 448) for t in (x, w)]
    own, theirs = ((y.double() - exact).norm() / exact.norm() for y in (fp8_linear(x, w), plain[0] @ plain[1].T))
    assert own <= 2 * theirs
    assert own > 0.2 * theirs, "the factors were rounded"


@fp8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_gradient_is_that_of_the_product_that_was_run(dtype):
    x, w, b = torch.randn(3, 5, 32, dtype=dtype), torch.randn(16, 32), torch.randn(16)
    given = [t.requires_grad_() for t in (x, w, b)]
    gy = torch.randn(3, 5, 16, dtype=dtype)
    fp8_linear(*given).backward(gy)
    (x8, sx), (w8, sw) = quantise(x.detach()), quantise(w.detach())
    rounded = [x8.double() * sx.double(), w8.double() * sw.double(), b.detach().double()]
    wanted = [t.requires_grad_() for t in rounded]
    F.linear(*wanted).backward(gy.double())
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(given, wanted, strict=True):
        assert a.grad.dtype == a.dtype
        assert (a.grad.double() - b.grad).abs().max() <= bound * b.grad.abs().max()


@fp8
def test_fp8_keeps_one_byte_a_number_for_the_backward():
    x, w, kept = torch.randn(64, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        fp8_linear(x, w)
    assert sum(t.numel() * t.element_size() for t in kept) == x.numel() + w.numel() + 2 * 4


@fp8
def test_fp8_has_no_second_derivative():
    x, w = torch.randn(4, 16, requires_grad=True), torch.randn(16, 16)
    (g,) = torch.autograd.grad(fp8_linear(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.square().sum().backward()


@fp8
def test_fp8_does_not_care_how_its_factors_lie_in_memory():
    x, w = torch.randn(32, 6), torch.randn(32, 16)
    assert torch.equal(fp8_linear(x.t(), w.t()), fp8_linear(x.t().contiguous(), w.t().contiguous()))


@fp8
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e-40, 3e38])
def test_fp8_edges(value):
    """Zeros stay zeros, what is not finite is not hidden, very small and very large numbers neither vanish nor overflow."""
    y = fp8_linear(torch.full((2, 16), value), torch.eye(16))
    if value in (0.0, 1e-40):
        assert (y - value).abs().max() <= 1e-38
    elif value == 3e38:
        torch.testing.assert_close(y, torch.full((2, 16), value))
    else:
        assert not y.isfinite().any()


@fp8
@pytest.mark.parametrize("shape", [(16,), (0, 16), (2, 0, 16), (2, 3, 4, 16)])
def test_fp8_takes_any_leading_dims(shape):
    x, w = torch.randn(shape, requires_grad=True), torch.randn(32, 16)
    y = fp8_linear(x, w)
    assert y.shape == (*shape[:-1], 32)
    y.sum().backward()
    assert x.grad.shape == x.shape


@fp8
@pytest.mark.parametrize(
    ("x", "weight", "field"),
    [
        (torch.ones(2, 16, dtype=torch.float64), torch.ones(16, 16), "x"),
        (torch.ones(2, 24), torch.ones(16, 24), "weight"),
        (torch.ones(2, 16), torch.ones(10, 16), "weight"),
    ],
)
def test_fp8_refuses_what_it_cannot_multiply(x, weight, field):
    with pytest.raises(lw.InputError) as caught:
        fp8_linear(x, weight)
    assert caught.value.field == field


@pytest.mark.parametrize("device", ["meta", "mps", "xpu"])
def test_other_devices_are_refused_by_name(device):
    with pytest.raises(lw.InputError) as caught:
        require_fp8(device)
    assert caught.value.field == "device"
    assert repr(device) in str(caught.value)
    assert "compute capability 8.9 or later" in str(caught.value)


@pytest.mark.parametrize(
    ("capability", "fine"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)]
)
def test_the_capability_of_a_gpu_decides(capability, fine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    assert (fp8_missing("cuda:0") is None) == fine
    if not fine:
        with pytest.raises(lw.InputError, match=rf"'cuda:0'.*A GPU has compute capability {capability[0]}.{capability[1]}"):
            require_fp8("cuda:0")


@fp8
def test_a_network_with_fp8_projections_learns_and_keeps_its_parameters():
    torch.manual_seed(0)
    model, tokens = GPT(GPTConfig(**SMALL)), torch.randint(0, 256, (2, 16))
    before, plain = dict(model.named_parameters()), loss_of(model, tokens)
    names = use_fp8(model.blocks)
    assert len(names) == 8
    assert all(type(model.blocks.get_submodule(name)) is FP8Linear for name in names)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert type(model.head) is nn.Linear
    optimizer, losses = torch.optim.AdamW(lw.param_groups(model), lr=3e-3), []
    for _ in range(20):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - plain.item()) < 0.05
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


@fp8
def test_projections_of_odd_sizes_stay_as_they_are():
    layers = nn.Sequential(nn.Linear(16, 24), nn.Linear(16, 32))
    assert use_fp8(layers) == ["1"]
    assert type(layers[0]) is nn.Linear


def test_nothing_changes_where_fp8_is_refused():
    layers = nn.Sequential(nn.Linear(16, 16, device="meta"))
    with pytest.raises(lw.InputError, match="meta"):
        use_fp8(layers)
    assert type(layers[0]) is nn.Linear


def test_a_torch_without_an_fp8_product_on_the_cpu_is_said(monkeypatch):
    def none(*args, **kwargs):
        raise NotImplementedError

    monkeypatch.setattr(torch, "_scaled_mm", none)
    precision._cpu_lacks.cache_clear()
    try:
        with pytest.raises(lw.InputError, match="no fp8 product for the CPU"):
            fp8_linear(torch.ones(2, 16), torch.ones(16, 16))
    finally:
        precision._cpu_lacks.cache_clear()
