"""How curved a cloud of activations is: the residual of local linear embedding, relative to the local variance, in fp32.

For a token z_i and its k nearest neighbours z_j, D = [z_j − z_i] (k × d) and G = D Dᵀ. Weights that sum to one reconstruct z_i
from its neighbours (Roweis & Saul, Science 290, 2000):

    w ∝ (I − G / tr G)³² 1,      κ_i = |Dᵀ w| / √(tr G / k),      κ = mean of κ_i over the tokens

(I − G / tr G)³² 1 are the weights after 32 steps of gradient descent on |Dᵀ w|² from equal ones. Stopping early is the
regularisation (Landweber's): it solves the directions that hold some hundredths of the variance or more, which are the tangent's,
and leaves the weaker ones, which are the normal's. A ridge can't tell them apart: with more neighbours than dimensions it
reconstructs a curved cloud exactly. What is left is the curvature alone: neighbours at distance δ on a surface of radius R stand
off the tangent by δ² / 2R, so that **κ ≈ δ / 2R up to δ ≈ R / 2**, and no more beyond. It is zero on a flat cloud of few
dimensions (up to a third of k or so) at any scale and in any orientation. A cloud that fills more dimensions is not reconstructed
by its neighbours, and κ tells how badly; it is at most 1.

A token that is not finite is left out. Of tokens that coincide to rounding the first alone is measured and is a neighbour of
others: a cloud with copies has the κ of the cloud without them. All of it are fixed sequences of batched products: no number goes
to the host, and a CUDA graph can hold it. On the CPU compiled kernels do the same where they may serve (kernels/cpu/curvature.h).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laneway.connections.backends import compiled_serves
from laneway.core import InputError, positive_int, real

WIDEST = 32  # dimensions of a projection
SQUARINGS = 5  # 2⁵ = 32 steps of gradient descent
NARROW = (torch.float32, torch.bfloat16)  # streams that the compiled kernels read
CHUNK = 128  # clouds at a time, which bounds the memory
COINCIDING = 8 * torch.finfo(torch.float32).eps  # square distance over the two squares, up to which tokens are one
BATCHES = 16  # sizes of batches whose row numbers a sample keeps


def local_curvature(points: Tensor, neighbours: int, stride: int = 1) -> tuple[Tensor, Tensor]:
    """Clouds [B, S, d] → (Σ κ_i, number of tokens in the sum), each [B]; κ is the first over the second.

    ``stride``: κ_i of every so many tokens only, whose neighbours are found among all.

    Computed in fp32 (float64 for float64 points). Tokens that are not finite and copies of an earlier token are not measured; a
    cloud with too few distinct finite tokens for one neighbourhood has 0 of 0.

    Raises:
        InputError: fewer than two neighbours, no more tokens than neighbours, or a stride below one.
    """
    check_neighbours(neighbours, points.shape[1])
    stride = min(positive_int("stride", stride), points.shape[1])
    dtype = torch.float64 if points.dtype == torch.float64 else torch.float32
    with torch.no_grad(), torch.autocast(points.device.type, enabled=False):
        if dtype == torch.float32 and _compiled(points):
            from laneway.connections.kernels.cpu import curvature

            return curvature.local_curvature(points.float(), neighbours, stride)
        parts = [_chunk(chunk.to(dtype), neighbours, stride) for chunk in points.split(CHUNK)]
        return torch.cat([total for total, _ in parts]), torch.cat([count for _, count in parts])


def _compiled(*tensors: Tensor) -> bool:
    """Whether compiled kernels may read and write these: real numbers in memory, and nobody asked for other kernels."""
    if torch.compiler.is_compiling() or not all(map(_held, tensors)):
        return False
    return len({t.device for t in tensors}) == 1 and compiled_serves(tensors[0].device)


def _held(t: Tensor) -> bool:
    """Whether this is a tensor with memory of its own: no subclass, and none of ``torch.func``'s."""
    return type(t) in (Tensor, nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(t)


def check_neighbours(neighbours: int, sample: int) -> None:
    """Raise InputError unless a neighbourhood can be found among ``sample`` tokens."""
    positive_int("neighbours", neighbours, 2)
    positive_int("sample", sample, 1)
    if sample <= neighbours:
        raise InputError("sample", sample, f"more tokens than neighbours = {neighbours}")


def _chunk(points: Tensor, k: int, stride: int) -> tuple[Tensor, Tensor]:
    z, valid = _centred(points)
    offsets, usable = _offsets(z, valid, k, stride)
    gram = offsets @ offsets.mT
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    usable = usable & (trace > 0) & torch.isfinite(trace)
    trace = torch.where(usable, trace, 1)
    residual = offsets.mul_(_weights(gram.div_(trace[..., None, None]))[..., None]).sum(-2)
    kappa = residual.square().sum(-1).mul(k).div(trace).sqrt().clamp(max=1)
    return torch.where(usable, kappa, 0).sum(-1), usable.sum(-1).to(kappa.dtype)


def _centred(points: Tensor) -> tuple[Tensor, Tensor]:
    """Clouds around their token of median size, in units of the others' median distance; zeros where a token is not finite.

    Neither an offset that all tokens share nor a few huge tokens then cost the others their digits, nor do copies of that token.
    """
    valid = torch.isfinite(points).all(-1)
    z = torch.where(valid[..., None], points, 0)
    rows = torch.arange(len(z), device=z.device)
    z = torch.where(valid[..., None], z - z[rows, _median(z, valid)][:, None], 0)
    scale = z.abs().amax(-1)[rows, _median(z, (z != 0).any(-1))]
    return z / torch.where(scale > 0, scale, 1)[:, None, None], valid


def _median(z: Tensor, valid: Tensor) -> Tensor:
    """Index of each cloud's token of median size among the valid ones, [B]."""
    size = torch.where(valid, z.abs().amax(-1), float("inf"))
    middle = (valid.sum(-1) - 1).clamp(min=0) // 2
    return size.argsort(-1).gather(-1, middle[:, None]).squeeze(-1)


def _offsets(z: Tensor, valid: Tensor, k: int, stride: int) -> tuple[Tensor, Tensor]:
    """[B, s, k, d] from each ``stride``-th token to its k nearest, and which tokens have that many, [B, s]."""
    square, here = z.square().sum(-1), z[:, ::stride]
    sizes = square[:, :, None] + square[:, None, :]
    distance = torch.baddbmm(sizes, z, z.mT, alpha=-2)
    bound = COINCIDING * sizes
    same = (distance <= bound) & torch.isfinite(bound) & valid[:, None, :]  # False for NaN
    first = valid & ~same.tril(-1).any(-1)
    apart = (distance > bound) & first[:, None, :]  # False for NaN, and for a token and itself
    near = torch.where(apart, distance, float("inf"))[:, ::stride].topk(k, largest=False, sorted=False)
    rows = torch.arange(len(z), device=z.device)[:, None, None] * z.shape[1]
    found = z.flatten(0, 1).index_select(0, (rows + near.indices).flatten()).view(*near.indices.shape, -1)
    return found.sub_(here[:, :, None]), first[:, ::stride] & torch.isfinite(near.values).all(-1)


def _weights(gram: Tensor) -> Tensor:
    """G / tr G → weights [..., k] that sum to one; equal ones where the descent leaves nothing to normalise."""
    k = gram.shape[-1]
    power = torch.eye(k, dtype=gram.dtype, device=gram.device) - gram
    for _ in range(SQUARINGS):
        power = power @ power
    weights = power.sum(-1)
    total = weights.sum(-1, keepdim=True)
    found = total > 1e-4 * k
    return torch.where(found, weights / torch.where(found, total, 1), 1 / k)


class TokenSample(nn.Module):
    """A fixed number of tokens of a batch, each stream projected to few dimensions.

    Which tokens: one out of each of ``size`` equal stretches of the batch, at a place in it that is drawn once. The projection
    is Gaussian (Johnson & Lindenstrauss): it keeps distances to 1/√d or so. Both follow from the seed and are buffers.

    Args:
        width: C of the streams.
        size: tokens S; a smaller batch gives all it has, and NaN for the rest.
        dims: dimensions d of the projection.
        seed: of the projection and the places.

    Raises:
        InputError: dims above the width or 32, or another number out of range.
    """

    projection: Tensor
    places: Tensor

    def __init__(self, width: int, size: int, dims: int, seed: int = 0) -> None:
        super().__init__()
        positive_int("sample", size)
        if positive_int("projection", dims) > min(positive_int("width", width), WIDEST):
            raise InputError("projection", dims, f"an integer from 1 to {min(width, WIDEST)}, the width of a stream or {WIDEST}")
        if positive_int("seed", seed, 0) >= 2**63:
            raise InputError("seed", seed, "an integer from 0 to below 2**63")
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("projection", torch.randn(width, dims, generator=generator) / dims**0.5)
        self.register_buffer("places", torch.rand(size, generator=generator, dtype=torch.float64))
        self._kept: dict[int, Tensor] = {}
        self._kept_of: tuple[Tensor | None, int] = None, 0

    def forward(self, x: Tensor, points: Tensor | None = None) -> Tensor:
        """Streams […, n, C] → [n, S, d] in fp32, without a gradient: into ``points``, where given."""
        projection, places = self.projection, self.places
        flat = x.reshape(-1, *x.shape[-2:])
        rows = self._rows(places, len(flat))
        narrow = flat.dtype in NARROW and projection.dtype == torch.float32
        fits = points is None or (points.dtype == torch.float32 and points.is_contiguous())
        if narrow and fits and flat.stride(-1) == 1 and _compiled(flat, projection, *(() if points is None else (points,))):
            from laneway.connections.kernels.cpu import curvature

            if points is None:
                points = projection.new_empty(x.shape[-2], len(places), projection.shape[1])
            curvature.token_sample(flat, rows, projection.contiguous(), points)
            return points
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            found = torch.einsum("snc,cd->nsd", flat[rows].to(projection.dtype), projection)
            found = nn.functional.pad(found, (0, 0, 0, len(places) - len(rows)), value=float("nan"))
            return found if points is None else points.copy_(found)

    def _rows(self, places: Tensor, tokens: int) -> Tensor:
        """Numbers of the tokens that are taken out of so many; kept, for as long as the places are what they were."""
        if torch.compiler.is_compiling() or not _held(places) or places.is_inference() or _capturing(places):
            return _drawn(places, tokens)
        now = places, places._version
        if self._kept_of[0] is not places or self._kept_of[1] != now[1] or len(self._kept) == BATCHES:
            self._kept, self._kept_of = {}, now
        if tokens not in self._kept:
            self._kept[tokens] = _drawn(places, tokens)
        return self._kept[tokens]


def _drawn(places: Tensor, tokens: int) -> Tensor:
    """Rows that a sample takes out of so many tokens: all, or one out of each stretch."""
    size, device = len(places), places.device
    if tokens <= size:
        return torch.arange(tokens, device=device)
    stretch = torch.arange(size, device=device, dtype=torch.float64)
    return ((stretch + places) * (tokens / size)).long().clamp(max=tokens - 1)


def _capturing(t: Tensor) -> bool:
    """Whether a CUDA graph is being recorded: what is computed now has its numbers only when the graph runs."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


class MovingCurvature(nn.Module):
    """κ of many paths over time: a moving average without the bias of its start, and the median of its latest values.

    Args:
        paths: how many.
        decay: of the average, at each measurement; 0 takes the newest alone.
        window: values in the running median.

    Raises:
        InputError: a number out of range.
    """

    average: Tensor
    remaining: Tensor
    history: Tensor

    def __init__(self, paths: int, decay: float = 0.9, window: int = 32) -> None:
        super().__init__()
        self.decay = real("decay", decay, lambda d: 0 <= d < 1, "a number from 0 to below 1")
        self.register_buffer("average", torch.zeros(positive_int("paths", paths)))
        self.register_buffer("remaining", torch.ones(paths))  # decay to the number of measurements: the start's weight
        self.register_buffer("history", torch.full((positive_int("window", window), paths), float("nan")))

    @torch.no_grad()
    def update(self, total: Tensor, count: Tensor) -> None:
        """Take in Σ κ_i and the number of tokens of each path; a path without tokens stays as it was."""
        seen = (count > 0) & torch.isfinite(total)
        now = torch.where(seen, total / count.clamp(min=1), 0)
        self.average.copy_(torch.where(seen, self.average * self.decay + now * (1 - self.decay), self.average))
        self.remaining.copy_(torch.where(seen, self.remaining * self.decay, self.remaining))
        latest = torch.where(seen, self.curvature, float("nan"))
        self.history.copy_(torch.cat([self.history[1:], latest[None]]))

    @property
    def curvature(self) -> Tensor:
        """κ [paths]; NaN before a path's first measurement."""
        return self.average / torch.where(self.remaining < 1, 1 - self.remaining, float("nan"))

    @property
    def median(self) -> Tensor:
        """Running median of κ [paths]; NaN before a path's first measurement."""
        return lower_median(self.history)


def lower_median(values: Tensor) -> Tensor:
    """Median over the first dim of [m, …], NaNs left out; of an even number the lower of the two middle ones."""
    ordered = values.sort(0).values  # NaN comes last
    middle = (values.isnan().logical_not().sum(0, keepdim=True) - 1).clamp(min=0) // 2
    return ordered.gather(0, middle).squeeze(0)
