"""Pre-mix and post-mix in plain PyTorch, a cache-sized chunk of tokens at a time.

Forward of a site:    u = x φᵀ,  r = 1/√(mean x² + ε),  z = r u  (RMSNorm folded into the projection: x is never normalised)
                      logits = scale · z + base   (HC: scale · tanh z + base)      all of the site's parameters are used here
                      h = Σ_j pre_j x_j                        with pre from the first n logits
                      y_i = Σ_j res_ij x_j + post_i f
Backward of a site:   gx = resᵀ gy                                       written by the post-mix
                      gx += pre ⊗ gh + (r gz) φ − (r²/K)(gz·z) x        added in place by the pre-mix, chunk by chunk in cache
Products are written as row vector × matrix: on CPU that form of ``bmm`` is much faster than matrix × column.
Accumulation is in fp32 (float64 for float64 streams) whatever the streams are; each result is rounded once.

Shapes: N tokens, n streams, C width, G groups that are normalised apart (1: vec(x), n: every stream), K = nC/G numbers in
one. Logits are laid out pre (n), post (n), res: with G = 1 they are z scaled; with G = n (HC) stream j's own projection is
(pre_j, post_j, res[j → 0…n−1]).
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_BYTES = 2 << 20  # of one fp32 chunk of x, for each thread: about the L2 cache of one core (measured: 1 … 4 MiB are alike)
FEWEST_CHUNKS = 16  # of narrow streams, whose chunks are copied to fp32: bounds the copies to a fraction of the streams


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for everything up to fp32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(x: Tensor, dtype: torch.dtype) -> range:
    """Starts of the chunks of x [N, n, C]; on an accelerator there is one."""
    tokens, width = x.shape[0], x.shape[1] * x.shape[2]
    step = max(tokens, 1)
    if x.device.type == "cpu":
        step = min(step, CHUNK_BYTES * torch.get_num_threads() // (4 * width))
        if x.dtype != dtype:
            step = min(step, -(-tokens // FEWEST_CHUNKS))
    return range(0, tokens, max(step, 1))


class _Scratch:
    """Chunks of a tensor in the compute dtype: the tensor itself where it has it, else one reused buffer."""

    def __init__(self, source: Tensor, step: int, dtype: torch.dtype, buffer: Tensor | None = None) -> None:
        self.source, self.buffer = source, buffer
        if buffer is None and source.dtype != dtype:
            self.buffer = torch.empty(step, *source.shape[1:], dtype=dtype, device=source.device)

    def read(self, start: int, stop: int) -> Tensor:
        part = self.source[start:stop]
        return part if self.buffer is None else self.buffer[: stop - start].copy_(part)

    def target(self, start: int, stop: int) -> Tensor:
        """Where to write a chunk; call ``store`` after it."""
        return self.source[start:stop] if self.buffer is None else self.buffer[: stop - start]

    def store(self, start: int, stop: int) -> None:
        if self.buffer is not None:
            self.source[start:stop] = self.buffer[: stop - start]


def _arrange(z: Tensor, n: int, per_stream: bool) -> Tensor:
    """z [N, G·m] → what ``scale`` multiplies, laid out pre, post, res. HC: through tanh."""
    if not per_stream:
        return z
    t = z.unflatten(1, (n, n + 2)).tanh()
    return torch.cat([t[:, :, 0], t[:, :, 1], t[:, :, 2:].flatten(1)], dim=1)


def _arrange_backward(grad: Tensor, z: Tensor, n: int, per_stream: bool) -> Tensor:
    """Gradient of ``_arrange``."""
    if not per_stream:
        return grad
    t = z.unflatten(1, (n, n + 2)).tanh()
    res = grad[:, 2 * n :].unflatten(1, (n, n))
    g = torch.cat([grad[:, :n, None], grad[:, n : 2 * n, None], res], dim=2)
    return (g * (1 - t * t)).flatten(1)


def _spread(scale: Tensor, n: int, width: int) -> Tensor:
    """One scale for each logit: scale [3] over pre (n), post (n) and res, or [1] over pre alone."""
    return scale if len(scale) == 1 else torch.cat([scale[0].expand(n), scale[1].expand(n), scale[2].expand(width - 2 * n)])


def _pre(logits: Tensor, per_stream: bool, eps: float) -> Tensor:
    """H_pre from its logits: σ + ε (mHC), or the logits themselves (HC)."""
    return logits if per_stream else torch.sigmoid(logits).add_(eps)


def pre_forward(
    x: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    per_stream: bool,
    norm_eps: float,
    eps: float,
    carried: Tensor | None = None,
):
    """x [N, n, C] → h [N, C] (dtype of x), logits [N, width of base], z [N, G·m], r [N, G].

    ``carried`` [N, n] takes the place of H_pre in h.
    """
    tokens, n, c = x.shape
    groups = n if per_stream else 1
    dtype, k, m = compute_dtype(x.dtype), n * c // groups, fn.shape[0]
    base, scale = base.to(dtype), scale.to(dtype)
    h = torch.empty(tokens, c, dtype=x.dtype, device=x.device)
    logits = torch.empty(tokens, len(base), dtype=dtype, device=x.device)
    z = torch.empty(tokens, groups * m, dtype=dtype, device=x.device)
    r = torch.empty(tokens, groups, dtype=dtype, device=x.device)
    chunks, weight, factor = _chunks(x, dtype), fn.to(dtype).t(), _spread(scale, n, len(base))
    x_in, h_out = _Scratch(x, chunks.step, dtype), _Scratch(h, chunks.step, dtype)
    for i in chunks:
        j = min(i + chunks.step, tokens)
        xc = x_in.read(i, j)
        rows = xc.view((j - i) * groups, k)
        zc, rc = z[i:j].view(rows.shape[0], m), r[i:j].view(-1, 1)
        torch.mm(rows, weight, out=zc)
        torch.linalg.vector_norm(rows, dim=1, keepdim=True, out=rc)
        zc.mul_(rc.square_().div_(k).add_(norm_eps).rsqrt_())
        torch.addcmul(base, _arrange(z[i:j], n, per_stream), factor, out=logits[i:j])
        weights = _pre(logits[i:j, :n], per_stream, eps) if carried is None else carried[i:j].to(dtype)
        torch.bmm(weights.unsqueeze(1), xc, out=h_out.target(i, j).unsqueeze(1))
        h_out.store(i, j)
    return h, logits, z, r


def post_forward(x: Tensor, f: Tensor | None, post: Tensor | None, res: Tensor) -> Tensor:
    """y_i = Σ_j res_ij x_j + post_i f: x [N, n, C], f [N, C], post [N, n], res [N, out, in] → [N, n, C].

    Without f and post nothing is added.
    """
    y = torch.empty_like(x)
    dtype, chunks = res.dtype, _chunks(x, res.dtype)
    x_in, y_out = (_Scratch(t, chunks.step, dtype) for t in (x, y))
    f_in = None if f is None else _Scratch(f, chunks.step, dtype)
    for i in chunks:
        j = min(i + chunks.step, x.shape[0])
        out = y_out.target(i, j)
        torch.bmm(res[i:j], x_in.read(i, j), out=out)
        if f_in is not None and post is not None:
            out.addcmul_(post[i:j].unsqueeze(2), f_in.read(i, j).unsqueeze(1))
        y_out.store(i, j)
    return y


def post_backward(gy: Tensor, x: Tensor, f: Tensor, post: Tensor, res: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, f, post and res."""
    gx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return gx, *branch_backward(gy, x, f, post, res, gx)


def branch_backward(
    gy: Tensor, x: Tensor, f: Tensor, post: Tensor, res: Tensor, gx: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of f, post and res; that of x into ``gx`` where it is given."""
    gf, gpost, gres = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (f, post, res))
    dtype, chunks = post.dtype, _chunks(x, post.dtype)
    x_in, f_in, g_in, gf_out = (_Scratch(t, chunks.step, dtype) for t in (x, f, gy, gf))
    gx_out = None if gx is None else _Scratch(gx, chunks.step, dtype, x_in.buffer)  # x has been used when gx is written
    for i in chunks:
        j = min(i + chunks.step, x.shape[0])
        g = g_in.read(i, j)
        torch.bmm(g, x_in.read(i, j).transpose(1, 2), out=gres[i:j])
        torch.bmm(f_in.read(i, j).unsqueeze(1), g.transpose(1, 2), out=gpost[i:j].unsqueeze(1))
        torch.bmm(post[i:j].unsqueeze(1), g, out=gf_out.target(i, j).unsqueeze(1))
        gf_out.store(i, j)
        if gx_out is not None:
            torch.bmm(res[i:j].transpose(1, 2), g, out=gx_out.target(i, j))
            gx_out.store(i, j)
    return gf, gpost, gres


def pre_backward(
    gx,
    gh,
    glogits,
    x,
    fn,
    base,
    scale,
    z,
    r,
    per_stream: bool,
    eps: float,
    carried: Tensor | None = None,
    gcarried: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds to ``gx`` [N, n, C], in place, all that reaches x through h and the logits.

    Returns the gradients of fn, base and scale. With ``carried`` weights in place of H_pre, their gradient is written to
    ``gcarried``.
    """
    tokens, n, _ = x.shape
    dtype, m, k = z.dtype, *fn.shape
    given = fn.dtype, base.dtype, scale.dtype
    base, scale = base.to(dtype), scale.to(dtype)
    glogits, gfn = glogits.clone(), torch.zeros(m, k, dtype=dtype, device=x.device)
    arranged = _arrange(z, n, per_stream)
    chunks, weight, factor = _chunks(x, dtype), fn.to(dtype), _spread(scale, n, len(base))
    x_in, gh_in, gx_out = (_Scratch(t, chunks.step, dtype) for t in (x, gh, gx))
    for i in chunks:
        j = min(i + chunks.step, tokens)
        xc, ghc, out = x_in.read(i, j), gh_in.read(i, j), gx_out.read(i, j)
        g_pre = torch.bmm(ghc.unsqueeze(1), xc.transpose(1, 2)).squeeze(1)
        if carried is None or gcarried is None:
            weights = _pre(torch.addcmul(base[:n], arranged[i:j, :n], factor[:n]), per_stream, eps)
            glogits[i:j, :n] += g_pre if per_stream else g_pre * (weights - eps) * (1 + eps - weights)
        else:
            weights = carried[i:j].to(dtype)
            gcarried[i:j] = g_pre
        gzc = _arrange_backward(glogits[i:j] * factor, z[i:j], n, per_stream).view(-1, m)
        zc, rc = z[i:j].view(-1, m), r[i:j].view(-1, 1)
        along_x = (gzc * zc).sum(1, keepdim=True).mul_(rc).mul_(rc).div_(-k)
        gzc = gzc * rc
        out.addcmul_(weights.unsqueeze(2), ghc.unsqueeze(1))
        out.view(-1, k).addmm_(gzc, weight).addcmul_(along_x, xc.view(-1, k))
        gx_out.store(i, j)
        gfn.addmm_(gzc.t(), xc.view(-1, k))
    sums = (glogits * arranged).sum(0)
    parts = [sums] if len(scale) == 1 else sums.split([n, n, len(base) - 2 * n])
    gscale = torch.stack([part.sum() for part in parts])
    return gfn.to(given[0]), glogits.sum(0).to(given[1]), gscale.to(given[2])
