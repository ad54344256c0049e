"""Which kernels serve, who decides it, and what happens where they can't."""

from __future__ import annotations

import types

import pytest
import torch
from site_cases import Case

import laneway as lw
from laneway.connections import backends
from laneway.connections.kernels import plain
from laneway.connections.kernels.cpu import build

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


@pytest.fixture
def fresh():
    backends.reset()
    yield
    backends.reset()


def streams(n=4, dtype=torch.float32):
    return torch.randn(3, n, 8, dtype=dtype)


@needs_compiler
@pytest.mark.compiler
def test_auto_takes_the_compiled_kernels_where_they_serve():
    from laneway.connections.kernels.cpu import backend

    assert backends.backend_for(streams()) is backend
    assert backends.backend_for(streams(dtype=torch.bfloat16)) is backend
    for other in (streams(dtype=torch.float64), streams(dtype=torch.float16), streams(n=17)):
        assert backends.backend_for(other) is plain
    assert backends.backend_for(streams(dtype=torch.bfloat16), torch.randn(3, 8)) is plain


def test_use_backend_holds_inside_its_block():
    with lw.use_backend("torch"):
        assert backends.backend_for(streams()) is plain
        with lw.use_backend("auto"):
            assert backends.asked() == "auto"
        assert backends.asked() == "torch"
    assert backends.asked() == "auto"


def test_the_environment_names_one_for_the_process(monkeypatch):
    monkeypatch.setenv("LANEWAY_BACKEND", "torch")
    assert backends.backend_for(streams()) is plain
    monkeypatch.setenv("LANEWAY_BACKEND", "gpu")
    with pytest.raises(lw.InputError, match="LANEWAY_BACKEND: got 'gpu'; accepted: one of auto, torch, cpu, triton"):
        backends.backend_for(streams())


def test_an_unknown_backend_is_refused():
    with pytest.raises(lw.InputError, match="did you mean 'cpu'"), lw.use_backend("cpuu"):
        pass


@pytest.mark.parametrize(
    ("x", "why"), [(streams(dtype=torch.float64), "served: float32, bfloat16"), (streams(n=17), "17 streams; served: up to 16")]
)
def test_a_backend_asked_for_by_name_says_what_it_can_not_serve(x, why):
    with lw.use_backend("cpu"), pytest.raises(backends.BackendError, match=why):
        backends.backend_for(x)


def test_plain_pytorch_agrees_with_the_reference():
    """The oracle of the self-check accepts what is right, in every piece."""
    assert backends.self_check(plain, torch.device("cpu")) is None


@pytest.mark.parametrize("piece", ["pre", "post", "post_backward", "pre_backward"])
def test_a_backend_that_is_wrong_is_found_out(piece, fresh, caplog, monkeypatch):
    """One per mille off, in any piece: said once, and plain PyTorch serves."""
    wrong = types.ModuleType("wrong")
    for name in ("pre", "post", "cross", "post_backward", "pre_backward", "cross_backward"):
        setattr(wrong, name, getattr(plain, name))

    def spoilt(*arguments):
        result = getattr(plain, piece)(*arguments)
        return result * 1.001 if isinstance(result, torch.Tensor) else (result[0] * 1.001, *result[1:])

    setattr(wrong, piece, spoilt)
    monkeypatch.setattr(backends.importlib, "import_module", lambda name: wrong if name.endswith("cpu.backend") else plain)
    for _ in range(2):
        assert backends.backend_for(streams()) is plain
    assert len(caplog.records) == 1
    assert "plain PyTorch serves in place of the cpu kernels: it does not agree with the reference" in caplog.text


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize(("eps", "cap"), [(0.0, 8.0), (1e-6, 0.0)])
def test_plain_pytorch_equals_the_reference_function_by_function(eps, cap, carried):
    case = Case(33, 3, 17, torch.float32, eps=eps, cap=cap, carried=carried)
    got, want = case.through(plain), case.expected()
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-4, atol=1e-5 * want[name].abs().max().item())


@needs_compiler
@pytest.mark.compiler
def test_backends_hand_over_to_each_other():
    """Forward by one, backward by another: they keep the same things."""
    site, x, gy = lw.HyperConnection(24, 4), torch.randn(9, 4, 24), torch.randn(9, 4, 24)
    grads = []
    for forward, backward in (("torch", "torch"), ("cpu", "torch"), ("torch", "cpu")):
        leaf = x.clone().requires_grad_()
        with lw.use_backend(forward):
            h, merge = site(leaf)
            y = merge(torch.tanh(h))
        with lw.use_backend(backward):
            grads.append(torch.autograd.grad(y, [leaf, *site.parameters()], gy))
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
