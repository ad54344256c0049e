"""Which kernels serve: chosen by device and dtype, or by the user.

    torch    plain PyTorch (kernels/plain.py): any device, any floating-point dtype
    cpu      compiled for this CPU (kernels/cpu): fp32 and bf16 streams, up to 16 of them
    triton   kernels/triton: fp32 and bf16 streams on a GPU, up to 8 of them

``LANEWAY_BACKEND`` names one for the whole process, ``use_backend`` for a block of code; ``auto`` (the default) takes the fastest
that can serve a tensor. A backend is loaded when it is first needed and compared once with the reference on a few rows; one that
cannot be loaded, or that computes something else, is said so once and plain PyTorch serves in its place. A backend that was asked
for by name raises instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor

from laneway.connections import reference
from laneway.connections.kernels import cpu, triton
from laneway.core import LanewayError, choice

NAMES = ("auto", "torch", "cpu", "triton")
_MODULES = {"torch": "kernels.plain", "cpu": "kernels.cpu.backend", "triton": "kernels.triton.backend"}
_LARGEST = {"cpu": cpu.LARGEST, "triton": triton.LARGEST}  # streams
_log = logging.getLogger("laneway")
_asked: ContextVar[str | None] = ContextVar("laneway_backend", default=None)
_ready: dict[str, ModuleType] = {}
_failed: dict[str, str] = {}


class BackendError(LanewayError):
    """The backend that was asked for cannot serve; the message says why."""


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Serve with one backend inside the block: ``auto``, ``torch``, ``cpu`` or ``triton``.

    Raises:
        InputError: another name.
    """
    token = _asked.set(choice("backend", name, NAMES))
    try:
        yield
    finally:
        _asked.reset(token)


def asked() -> str:
    """What the user asked for: the innermost ``use_backend``, else ``LANEWAY_BACKEND``, else ``auto``."""
    return _asked.get() or choice("LANEWAY_BACKEND", os.environ.get("LANEWAY_BACKEND") or "auto", NAMES)


def backend_for(x: Tensor, f: Tensor | None = None) -> ModuleType:
    """The backend that serves streams x […, n, C], and a sub-layer's output f where there is one.

    Raises:
        BackendError: the backend that was asked for by name cannot serve them.
    """
    name = asked()
    if name == "auto":
        name = "cpu" if x.device.type == "cpu" else "triton"
        if _unsuited(name, x, f) or not _loaded(name):
            name = "torch"
    elif why := _unsuited(name, x, f):
        raise BackendError(f"backend {name}: {why}")
    if not _loaded(name):
        raise BackendError(f"backend {name}: {_failed[name]}")
    return _ready[name]


def compiled_serves(device: torch.device) -> bool:
    """Whether the compiled CPU kernels may serve what is on this device: nobody asked for others, and they are ready.

    Raises:
        BackendError: they were asked for by name and can't be had.
    """
    name = asked()
    if device.type != "cpu" or name not in ("auto", "cpu"):
        return False
    if not _loaded("cpu") and name == "cpu":
        raise BackendError(f"backend cpu: {_failed['cpu']}")
    return "cpu" in _ready


def _unsuited(name: str, x: Tensor, f: Tensor | None) -> str | None:
    """Why a backend cannot serve these tensors, or None."""
    if name == "torch":
        return None
    if name == "cpu" and x.device.type != "cpu":
        return f"the streams are on {x.device}"
    if name == "triton" and x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the streams are on the CPU (Triton runs there under TRITON_INTERPRET=1 alone)"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"the streams are {x.dtype}; served: float32, bfloat16"
    if f is not None and f.dtype != x.dtype:
        return f"the sub-layer's output is {f.dtype}, the streams {x.dtype}"
    if x.shape[-2] > _LARGEST[name]:
        return f"{x.shape[-2]} streams; served: up to {_LARGEST[name]}"
    return None


def _loaded(name: str) -> bool:
    """Whether the backend is ready; loads and checks it the first time."""
    if name in _ready:
        return True
    if name in _failed:
        return False
    try:
        module = importlib.import_module(f"laneway.connections.{_MODULES[name]}")
        if hasattr(module, "load"):
            module.load()
        if name != "torch" and (wrong := _checked(module, "cpu" if name == "cpu" else _accelerator())):
            raise LanewayError(f"it does not agree with the reference ({wrong})")
    except (ImportError, LanewayError) as error:
        _failed[name] = str(error)
        if name == "cpu" or importlib.util.find_spec("triton"):
            _log.warning("laneway: plain PyTorch serves in place of the %s kernels: %s", name, error)
        return False
    _ready[name] = module
    return True


def _checked(module: ModuleType, device: str) -> str | None:
    """``self_check`` in a thread of its own: inside an op, where backends are loaded, autograd is switched off."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(self_check, module, torch.device(device)).result()


def _accelerator() -> str:
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else str(torch.accelerator.current_accelerator())


def reset() -> None:
    """Forget which backends were loaded or failed, so that the next call tries again."""
    _ready.clear()
    _failed.clear()


@torch.no_grad()
def self_check(module: ModuleType, device: torch.device) -> str | None:
    """Compare a backend's forward and backward with the reference on five tokens; what differs, or None."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    tokens, n, c = 5, 4, 36
    x, gy, f, gh = random(tokens, n, c), random(tokens, n, c), random(tokens, c), random(tokens, c)
    parameters = random(24, n * c) / 12, random(24), random(3)
    h, maps, z, r = module.pre(x, None, *parameters, 1e-6, 0.0, 8.0, 20)
    y = module.post(x, f, maps)
    gf, gmaps = module.post_backward(gy, x, f, maps)
    gx, *grads, _ = module.pre_backward(gy, gh, gmaps, x, None, *parameters, maps, z, r, 0.0, 8.0, 20)
    with torch.enable_grad():
        inputs = [t.double().requires_grad_() for t in (x, f, *parameters)]
        wide_x, wide_f, fn, base, scale = inputs
        pre, post, res = reference.map_logits(wide_x, fn, base, scale, 1e-6)
        wide_h = reference.pre_mix(wide_x, reference.pre_map(pre))
        h_res = reference.sinkhorn(reference.cap_logits(res, 8.0))
        wide_y = reference.post_mix(wide_x, wide_f, reference.post_map(post), h_res)
        wants = torch.autograd.grad((wide_y, wide_h), inputs, (gy.double(), gh.double()))
    names = ("h", "y", "gx", "gf", "gfn", "gbase", "gscale")
    for name, got, want in zip(names, (h, y, gx, gf, *grads), (wide_h, wide_y, *wants), strict=True):
        error = ((got.double() - want).abs().max() / want.abs().max()).item()
        if not error < 1e-4:
            return f"{name} is off by {error:.1e}"
    return None
