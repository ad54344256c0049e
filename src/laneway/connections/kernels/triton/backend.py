"""The site of mHC by Triton kernels: what is launched, in what order. Contract and shapes as in the other backends:

N tokens, n streams, width C, m = n(n + 2) maps a token. x, y, g [N, n, C] and f, h [N, C] in fp32 or bf16, contiguous;
fn [m, nC], base [m], scale [3], maps [N, m] (pre, post, res [out, in]), z [N, m], r [N] in fp32. A cap of 0 is none.
Every per-token result is the same bit for bit whatever N is; every sum over tokens is taken in one fixed order.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from laneway.connections.kernels.triton import launch
from laneway.connections.kernels.triton import maps as maps_kernels
from laneway.connections.kernels.triton import sums as sums_kernels
from laneway.connections.kernels.triton.gradient import gradient
from laneway.connections.kernels.triton.launch import LANES, Site
from laneway.connections.kernels.triton.streams import streams
from laneway.connections.kernels.triton.tiles import split_projection


def pre(
    x: Tensor, carried: Tensor | None, fn: Tensor, base: Tensor, scale: Tensor,
    norm_eps: float, eps: float, cap: float, iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The sub-layer's input and all maps: h [N, C], maps, z, r. With ``carried`` [N, n] h is read by it, in the same pass.

    Raises:
        InputError: streams that are neither fp32 nor bf16, or more than 8 of them.
    """
    site = Site.of(x)
    _, h, maps, z, r = _forward(site, x, None, None, carried, fn, base, scale, norm_eps, eps, cap, iterations)
    return h, maps, z, r


def post(x: Tensor, f: Tensor, maps: Tensor) -> Tensor:
    """y = H_res x + H_postᵀ f, accumulated in fp32 and rounded once.

    Raises:
        InputError: as ``pre``.
    """
    site, y = Site.of(x), x.new_empty(x.shape)
    _streams(site, x, f, maps, None, None, y, None, None)
    return y


def cross(
    x: Tensor, f: Tensor, maps: Tensor, carried: Tensor | None, fn: Tensor, base: Tensor, scale: Tensor,
    norm_eps: float, eps: float, cap: float, iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``post`` of one site and ``pre`` of the next, whose parameters are given: y, h, maps, z, r. y is written once and, with
    ``carried``, not read again.

    Raises:
        InputError: as ``pre``.
    """
    return _forward(Site.of(x), x, f, maps, carried, fn, base, scale, norm_eps, eps, cap, iterations)


def post_backward(gy: Tensor, x: Tensor, f: Tensor, maps: Tensor) -> tuple[Tensor, Tensor]:
    """gf [N, C] and gmaps [N, m], its pre part zero. The gradient of x is ``pre_backward``'s, which is given gy.

    Raises:
        InputError: as ``pre``.
    """
    site, gf = Site.of(x), f.new_empty(f.shape)
    part = site.empty(site.spans, site.tokens, site.n + site.n**2)
    _gradient(site, g=gy.contiguous(), post=(x, f, maps, gf, part))
    return gf, _token_sums(site, part, site.n, site.m)


def pre_backward(
    gy: Tensor | None, gh: Tensor | None, gmaps: Tensor | None, x: Tensor, carried: Tensor | None,
    fn: Tensor, base: Tensor, scale: Tensor, maps: Tensor, z: Tensor, r: Tensor,
    eps: float, cap: float, iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """gx, gfn, gbase, gscale, gcarried (None without ``carried``); gy: the gradient of what ``post`` made out of x.

    Raises:
        InputError: as ``pre``.
    """
    site, gx = Site.of(x), x.new_empty(x.shape)
    gz, gbase, gscale = _maps_backward(site, gh, gmaps, x, carried, base, scale, z, r, eps, cap, iterations)
    reads = _reads_of_carried(site, gh, carried)
    _gradient(site, g=gx, pre=(gy, gh, None, x, fn, gz, maps, carried, reads))
    return gx, _projection_gradient(site, gz, x), gbase, gscale, _carried_gradient(site, reads, carried)


def cross_backward(
    gnext: Tensor | None, gy: Tensor | None, gh: Tensor | None, gmaps: Tensor | None,
    x: Tensor, f: Tensor, maps: Tensor, y: Tensor, carried: Tensor | None,
    fn: Tensor, base: Tensor, scale: Tensor, next_maps: Tensor, z: Tensor, r: Tensor,
    eps: float, cap: float, iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """g, gf, gmaps, gfn, gbase, gscale, gcarried: ``pre_backward`` of the site that read y, and ``post_backward`` of the one
    that wrote it from the same rounded g, which is written once and, for up to four streams, not read.

    gnext: gradient of what the next ``post`` made out of y; gy: further gradient of y itself; gmaps: of ``next_maps``.

    Raises:
        InputError: as ``pre``.
    """
    site, g, gf = Site.of(x), y.new_empty(y.shape), f.new_empty(f.shape)
    gz, gbase, gscale = _maps_backward(site, gh, gmaps, y, carried, base, scale, z, r, eps, cap, iterations)
    reads = _reads_of_carried(site, gh, carried)
    part = site.empty(site.spans, site.tokens, site.n + site.n**2)
    of_pre, of_post = (gnext, gh, gy, y, fn, gz, next_maps, carried, reads), (x, f, maps, gf, part)
    if site.n <= launch.LARGEST_FUSED:
        _gradient(site, g=g, pre=of_pre, post=of_post)
    else:
        _gradient(site, g=g, pre=of_pre)
        _gradient(site, g=g, post=of_post)
    gfn = _projection_gradient(site, gz, y)
    return g, gf, _token_sums(site, part, site.n, site.m), gfn, gbase, gscale, _carried_gradient(site, reads, carried)


def _forward(site, x, f, maps, carried, fn, base, scale, norm_eps, eps, cap, iterations):
    """y (x itself where f is None), h, maps, z, r."""
    y = None if f is None else x.new_empty(x.shape)
    h = site.empty(site.tokens, site.width, dtype=site.dtype)
    part = site.empty(site.spans, site.tokens, site.m + 1)
    _streams(site, x, f, maps, carried, fn, y, None if carried is None else h, part)
    z, r, new = site.empty(site.tokens, site.m), site.empty(site.tokens), site.empty(site.tokens, site.m)
    if site.tokens:
        launch.run(
            maps_kernels.finish, (triton.cdiv(site.tokens, LANES),), part, base, scale, z, r, new, site.tokens,
            site.n * site.width, site.spans, iterations, norm_eps, eps, cap,
            SMOOTH=eps > 0, CAPPED=cap > 0, **site.map_options(),
        )  # fmt: skip
    y = x if y is None else y
    if carried is None:
        _streams(site, y, None, None, new, None, None, h, None)
    return y, h, new, z, r


def _streams(site, x, f, maps, read, fn, y, h, part) -> None:
    """``read`` [N, ≥ n]: weights by which h is made, where h is given."""
    if not site.tokens:
        return
    read, stride = _rows(read)
    options = site.stream_options(products=part is not None)
    grid = site.stream_grid(options["BLOCK_T"])
    fn = None if part is None else _parts(site, fn)
    launch.run(streams, grid, x, f, maps, read, stride, fn, y, h, part, site.tokens, site.width, **options)


def _parts(site: Site, fn: Tensor) -> Tensor:
    """φ as the products take it: in two bf16 parts [2, m, nC] where the streams are bf16."""
    if site.dtype != torch.bfloat16:
        return fn
    parts = site.empty(2, *fn.shape, dtype=torch.bfloat16)
    grid = (triton.cdiv(fn.numel(), 1024),)
    launch.run(split_projection, grid, fn, parts, fn.numel(), BLOCK=1024, num_warps=4)
    return parts


def _rows(read: Tensor | None) -> tuple[Tensor | None, int]:
    """Weights [N, …] whose rows are contiguous, and the distance of two rows."""
    if read is None:
        return None, 0
    read = read if read.stride(1) == 1 else read.contiguous()
    return read, read.stride(0)


def _gradient(site, g, pre=None, post=None) -> None:
    """``pre``: (gnext, gh, extra, y, fn, gz, maps, carried, reads), without which g is read; ``post``: (x, f, maps, gf, part)."""
    if not site.tokens:
        return
    gnext, gh, extra, y, fn, gz, maps, carried, reads = pre or [None] * 9
    x, f, post_maps, gf, part = post or [None] * 5
    read, stride = _rows(maps if carried is None else carried)
    gnext, gh, extra = (None if t is None else t.contiguous() for t in (gnext, gh, extra))
    fn = None if y is None else _parts(site, fn)
    options = site.gradient_options()
    launch.run(
        gradient, site.stream_grid(options["BLOCK_T"]), gnext, gh, extra, y, fn, gz, maps, read, stride, g, reads,
        x, f, post_maps, gf, part, site.tokens, site.width, **options,
    )  # fmt: skip


def _reads_of_carried(site: Site, gh: Tensor | None, carried: Tensor | None) -> Tensor | None:
    """Room for the partial sums of gh·x_j, where the streams' own backward pass can take them."""
    return None if gh is None or carried is None else site.empty(site.spans, site.tokens, site.n)


def _carried_gradient(site: Site, reads: Tensor | None, carried: Tensor | None) -> Tensor | None:
    if carried is None:
        return None
    return carried.new_zeros(carried.shape) if reads is None else _token_sums(site, reads, 0, site.n)


def _maps_backward(site, gh, gmaps, x, carried, base, scale, z, r, eps, cap, iterations) -> tuple[Tensor, Tensor, Tensor]:
    """gz [N, m + 1] as the kernels over streams want it, gbase [m], gscale [3]."""
    gz = site.empty(site.tokens, site.m + 1)
    if not site.tokens:
        return gz, base.new_zeros(base.shape), scale.new_zeros(scale.shape)
    reads = _read_gradient(site, gh, x) if gh is not None and carried is None else None
    blocks = triton.cdiv(site.tokens, LANES)
    sums = site.empty(blocks, site.m + 3)
    programs = min(blocks, launch.SCRATCH_PROGRAMS)
    scratch = site.empty(programs, iterations - 1, 2 * site.n, LANES)
    launch.run(
        maps_kernels.finish_backward, (programs,), None if gmaps is None else gmaps.contiguous(), reads, z, r, base, scale,
        gz, sums, scratch, iterations - 1, site.tokens, site.n * site.width, blocks, site.spans, iterations, eps, cap,
        SMOOTH=eps > 0, CAPPED=cap > 0, **site.map_options(),
    )  # fmt: skip
    both = _first_sums(site, sums, rows=64, columns=16)
    gbase, gscale = both[: site.m], both[site.m :].clone()  # an op may not return two views of one tensor
    return gz, gbase.clone(), gscale


def _read_gradient(site: Site, gh: Tensor, x: Tensor) -> Tensor:
    """Partial sums of gh·x_j, [spans, N, n]."""
    reads = site.empty(site.spans, site.tokens, site.n)
    tile = {"BLOCK_T": 32, "BLOCK_C": 64, "VECTOR": site.vector, "num_warps": 8}
    grid = site.stream_grid(32)
    launch.run(
        sums_kernels.read_gradient, grid, gh.contiguous(), x, reads, site.tokens, site.width, n=site.n, SPAN=launch.SPAN, **tile
    )
    return reads


def _projection_gradient(site: Site, gz: Tensor, x: Tensor) -> Tensor:
    """gfn [m, nC] = Σ_t r gz xᵀ: partial sums over a number of tokens that the size of the workspace decides."""
    K, block_t, block_k = site.n * site.width, 32, 128
    if not site.tokens:
        return x.new_zeros(site.m, K, dtype=gz.dtype)
    columns = triton.cdiv(K, block_k)
    splits = max(1, min(launch.PROJECTION_PROGRAMS // columns, triton.cdiv(site.tokens, launch.PROJECTION_TOKENS)))
    share = triton.cdiv(triton.cdiv(site.tokens, splits), block_t) * block_t
    splits = triton.cdiv(site.tokens, share)
    part = site.empty(splits, site.m, K)
    launch.run(
        sums_kernels.projection_gradient, (columns, splits), gz, x, part, site.tokens, K, share,
        m=site.m, M=site.padded, BLOCK_T=block_t, BLOCK_K=block_k, num_warps=4, num_stages=3,
    )  # fmt: skip
    return part[0] if splits == 1 else _first_sums(site, part, rows=1, columns=1024)


def _first_sums(site: Site, part: Tensor, rows: int, columns: int) -> Tensor:
    """[R, …] → […], in one fixed order."""
    out = site.empty(*part.shape[1:])
    launch.run(
        sums_kernels.first_sums, (triton.cdiv(out.numel(), columns),), part, out, part.shape[0], out.numel(),
        BLOCK_R=rows, BLOCK_W=columns, num_warps=4,
    )  # fmt: skip
    return out


def _token_sums(site: Site, part: Tensor, first: int, width: int) -> Tensor:
    """part [spans, N, count] → [N, width], columns before ``first`` zero."""
    out = site.empty(site.tokens, width)
    if site.tokens:
        launch.run(
            sums_kernels.token_sums, (triton.cdiv(site.tokens, 32),), part, out, site.tokens, site.spans, part.shape[2],
            first, width, P=triton.next_power_of_2(width), BLOCK=32, num_warps=4,
        )  # fmt: skip
    return out
