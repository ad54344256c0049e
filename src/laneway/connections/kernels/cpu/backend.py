"""The compiled kernels as functions of tensors, one to one with the other backends of a site.

Streams are fp32 or bf16 on the CPU, flat and contiguous, up to ``kernels.cpu.LARGEST`` of them; kernels/__init__.py says what
each function computes.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from laneway.connections.kernels.cpu import build

_SHAPE = [c_int, c_int64, c_int, c_int64, c_int]  # bf16?, tokens, n, C, threads
_SIGNATURES = {
    "laneway_forward": [*_SHAPE, c_float, c_float, c_float, c_int, *[c_void_p] * 12],
    "laneway_post": [*_SHAPE, *[c_void_p] * 4],
    "laneway_post_backward": [*_SHAPE, *[c_void_p] * 6],
    "laneway_backward": [*_SHAPE, c_float, c_float, c_int, *[c_void_p] * 22],
}
_library: ctypes.CDLL | None = None  # set by ``load``, which whoever chooses this backend calls first


def load(path: str | None = None) -> None:
    """Load the library, building it if need be.

    Args:
        path: a library built with other flags, in its place.

    Raises:
        BuildError: it cannot be built or loaded.
    """
    global _library
    if _library is not None and path is None:
        return
    try:
        found = ctypes.CDLL(path or str(build.build().path))
    except OSError as error:
        raise build.BuildError(f"the compiled kernels cannot be loaded: {error}") from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, c_int
    _library = found


def vector_width() -> int:
    """Floats in a vector of the library that is loaded: 16 (AVX-512), 8 (AVX2) or 4."""
    return _loaded().laneway_vector_width()


def _loaded() -> ctypes.CDLL:
    if _library is None:
        load()
    assert _library is not None
    return _library


def call(name: str, *arguments: Any, kinds: list[Any] | None = None) -> None:
    """Call a function of the library, building and loading it if need be.

    Args:
        name: of a function that returns 0, or another number where it had no memory to work in.
        arguments: pointers as integers or None.
        kinds: the arguments' ctypes, where the function isn't one of a site's.

    Raises:
        MemoryError: there was none.
    """
    function = getattr(_loaded(), name)
    if kinds is not None and function.argtypes is None:
        function.argtypes, function.restype = kinds, c_int
    if function(*arguments):
        raise MemoryError(f"{name}: the kernels' working memory could not be allocated")


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _shape(x: Tensor) -> tuple[int, int, int, int, int]:
    tokens, n, c = x.shape
    return int(x.dtype == torch.bfloat16), tokens, n, c, torch.get_num_threads()


def _fp32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _wide(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().float().contiguous() for t in tensors]


def pre(x, carried, fn, base, scale, norm_eps, eps, cap, iterations):
    """→ h, maps, z, r."""
    return _forward(x, None, None, None, carried, fn, base, scale, norm_eps, eps, cap, iterations)


def cross(x, f, maps, carried, fn, base, scale, norm_eps, eps, cap, iterations):
    """→ y, h, maps, z, r."""
    y = torch.empty_like(x)
    return y, *_forward(y, x, f, maps, carried, fn, base, scale, norm_eps, eps, cap, iterations)


def _forward(x, before_x, before_f, before_maps, carried, fn, base, scale, norm_eps, eps, cap, iterations):
    tokens, n, c = x.shape
    h = torch.empty(tokens, c, dtype=x.dtype, device=x.device)
    maps, z, r = _fp32(tokens, n * (n + 2)), _fp32(tokens, n * (n + 2)), _fp32(tokens)
    carried = None if carried is None else _wide(carried)[0]
    tensors = [*_wide(fn, base, scale), carried, before_x, before_f, before_maps, x, h, maps, z, r]
    call("laneway_forward", *_shape(x), norm_eps, eps, cap, iterations, *map(_pointer, tensors))
    return h, maps, z, r


def post(x, f, maps):
    """→ y."""
    y = torch.empty_like(x)
    call("laneway_post", *_shape(x), *map(_pointer, (x, f, maps, y)))
    return y


def post_backward(gy, x, f, maps):
    """→ gf, gmaps."""
    gf, gmaps = torch.empty_like(f), torch.empty_like(maps)
    call("laneway_post_backward", *_shape(x), *map(_pointer, (gy, x, f, maps, gf, gmaps)))
    return gf, gmaps


def pre_backward(gy, gh, gmaps, x, carried, fn, base, scale, maps, z, r, eps, cap, iterations):
    """→ gx, gfn, gbase, gscale, gcarried."""
    none = (None,) * 5
    return _backward(gy, None, gh, gmaps, x, carried, fn, base, scale, maps, z, r, eps, cap, iterations, none)


def cross_backward(
    gnext, gy, gh, gmaps, x, f, maps, y, carried, fn, base, scale, next_maps, z, r, eps, cap, iterations
):  # fmt: skip
    """→ g, gf, gmaps, gfn, gbase, gscale, gcarried."""
    gf, before_gmaps = torch.empty_like(f), torch.empty_like(maps)
    before = (x, f, maps, gf, before_gmaps)
    g, *rest = _backward(gnext, gy, gh, gmaps, y, carried, fn, base, scale, next_maps, z, r, eps, cap, iterations, before)
    return g, gf, before_gmaps, *rest


def _backward(gy, extra, gh, gmaps, x, carried, fn, base, scale, maps, z, r, eps, cap, iterations, before):
    gx, gcarried = torch.empty_like(x), None if carried is None else torch.empty_like(carried, dtype=torch.float32)
    wide = _wide(fn, base, scale)
    grads = [torch.empty_like(t) for t in wide]
    carried = None if carried is None else _wide(carried)[0]
    tensors = [*wide, gy, extra, gh, gmaps, x, carried, maps, z, r, gx, *grads, gcarried, *before]
    call("laneway_backward", *_shape(x), eps, cap, iterations, *map(_pointer, tensors))
    return gx, *(grad.to(given.dtype) for grad, given in zip(grads, (fn, base, scale), strict=True)), gcarried
