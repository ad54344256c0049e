"""Pre-mix and post-mix in plain PyTorch, a cache-sized chunk of tokens at a time.

Forward of a site:    u = x φᵀ,  r = 1/√(mean x² + ε),  z = r u  (RMSNorm folded into the projection: x is never normalised)
                      h = Σ_j pre_j x_j                        with pre from the first rows of z
                      y_i = Σ_j res_ij x_j + post_i f
Backward of a site:   gx = resᵀ gy                                       written by the post-mix
                      gx += pre ⊗ gh + (r gz) φ − (r²/K)(gz·z) x        added in place by the pre-mix, chunk by chunk in cache
Accumulation is in fp32 (float64 for float64 streams) whatever the streams are; each result is rounded once.

Shapes: N tokens, n streams, C width, G groups that are normalised apart (1: vec(x), n: every stream), K = nC/G numbers in
one, m rows of φ. ``pre`` are rows 0…n−1 of z where G = 1, row 0 of every group where G = n.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_BYTES = 2 << 20  # of one fp32 chunk of x, for each thread: about the L2 cache of one core (measured: 1 … 4 MiB are alike)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for everything up to fp32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(tokens: int, width: int, device: torch.device) -> range:
    step = max(tokens, 1)
    if device.type == "cpu":
        step = max(1, min(step, CHUNK_BYTES * torch.get_num_threads() // (4 * max(width, 1))))
    return range(0, tokens, step)


class _Scratch:
    """Chunks of a tensor in the compute dtype: the tensor itself where it has it, else one reused buffer."""

    def __init__(self, source: Tensor, step: int, dtype: torch.dtype) -> None:
        self.source = source
        self.buffer = None if source.dtype == dtype else torch.empty(step, *source.shape[1:], dtype=dtype, device=source.device)

    def read(self, start: int, stop: int) -> Tensor:
        part = self.source[start:stop]
        return part if self.buffer is None else self.buffer[: stop - start].copy_(part)

    def target(self, start: int, stop: int) -> Tensor:
        """Where to write a chunk; call ``store`` after it."""
        return self.source[start:stop] if self.buffer is None else self.buffer[: stop - start]

    def store(self, start: int, stop: int) -> None:
        if self.buffer is not None:
            self.source[start:stop] = self.buffer[: stop - start]


def activation(logits: Tensor, kind: str, eps: float) -> Tensor:
    """H_pre from its logits, in place: σ + ε (mHC) or the logits themselves (HC, whose tanh comes before its scale)."""
    return logits.sigmoid_().add_(eps) if kind == "sigmoid" else logits


def pre_logits(z: Tensor, base: Tensor, scale: Tensor, groups: int, kind: str) -> Tensor:
    """Logits of H_pre [N, n] from z [N, G·m]."""
    n = base.shape[0]
    rows = z[:, :n] if groups == 1 else z.view(z.shape[0], groups, -1)[:, :, 0]
    return torch.addcmul(base, rows.tanh() if kind == "tanh" else rows, scale)


def pre_forward(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, groups: int, kind: str, norm_eps: float, eps: float):
    """x [N, n, C] → h [N, C] (dtype of x), z [N, G·m], r [N, G]."""
    tokens, n, c = x.shape
    dtype, k = compute_dtype(x.dtype), n * c // groups
    h = torch.empty(tokens, c, dtype=x.dtype, device=x.device)
    z = torch.empty(tokens, groups * fn.shape[0], dtype=dtype, device=x.device)
    r = torch.empty(tokens, groups, dtype=dtype, device=x.device)
    chunks = _chunks(tokens, n * c, x.device)
    x_in, h_out, weight = _Scratch(x, chunks.step, dtype), _Scratch(h, chunks.step, dtype), fn.to(dtype).t()
    for i in chunks:
        j = min(i + chunks.step, tokens)
        xc = x_in.read(i, j)
        rows = xc.view((j - i) * groups, k)
        zc, rc = z[i:j].view(-1, fn.shape[0]), r[i:j].view(-1, 1)
        torch.mm(rows, weight, out=zc)
        torch.linalg.vector_norm(rows, dim=1, keepdim=True, out=rc)
        zc.mul_(rc.square_().div_(k).add_(norm_eps).rsqrt_())
        pre = activation(pre_logits(z[i:j], base, scale, groups, kind), kind, eps)
        torch.bmm(pre.unsqueeze(1), xc, out=h_out.target(i, j).unsqueeze(1))
        h_out.store(i, j)
    return h, z, r


def post_forward(x: Tensor, f: Tensor, post: Tensor, res: Tensor) -> Tensor:
    """y_i = Σ_j res_ij x_j + post_i f: x [N, n, C], f [N, C], post [N, n], res [N, out, in] → [N, n, C]."""
    y = torch.empty_like(x)
    dtype, chunks = post.dtype, _chunks(x.shape[0], x[0].numel() if len(x) else 1, x.device)
    x_in, f_in, y_out = (_Scratch(t, chunks.step, dtype) for t in (x, f, y))
    for i in chunks:
        j = min(i + chunks.step, x.shape[0])
        out = y_out.target(i, j)
        torch.bmm(res[i:j], x_in.read(i, j), out=out)
        out.addcmul_(post[i:j].unsqueeze(2), f_in.read(i, j).unsqueeze(1))
        y_out.store(i, j)
    return y


def post_backward(gy: Tensor, x: Tensor, f: Tensor, post: Tensor, res: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, f, post and res."""
    gx, gf, gpost, gres = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, f, post, res))
    dtype, chunks = post.dtype, _chunks(x.shape[0], x[0].numel() if len(x) else 1, x.device)
    x_in, f_in, g_in, gx_out, gf_out = (_Scratch(t, chunks.step, dtype) for t in (x, f, gy, gx, gf))
    for i in chunks:
        j = min(i + chunks.step, x.shape[0])
        g = g_in.read(i, j)
        torch.bmm(g, x_in.read(i, j).transpose(1, 2), out=gres[i:j])
        torch.bmm(g, f_in.read(i, j).unsqueeze(2), out=gpost[i:j].unsqueeze(2))
        torch.bmm(post[i:j].unsqueeze(1), g, out=gf_out.target(i, j).unsqueeze(1))
        torch.bmm(res[i:j].transpose(1, 2), g, out=gx_out.target(i, j))
        gf_out.store(i, j)
        gx_out.store(i, j)
    return gx, gf, gpost, gres


def pre_backward(gx, gh, gz, x, fn, base, scale, z, r, groups: int, kind: str, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Adds to ``gx`` [N, n, C], in place, all that reaches x through h and z. Returns the gradients of fn, base and scale."""
    tokens, n, c = x.shape
    dtype, k, m = z.dtype, n * c // groups, fn.shape[0]
    gz, g_logits = gz.clone(), torch.empty(tokens, n, dtype=dtype, device=x.device)
    gfn = torch.zeros(m, k, dtype=dtype, device=x.device)
    chunks, weight = _chunks(tokens, n * c, x.device), fn.to(dtype)
    x_in, gh_in, gx_out = (_Scratch(t, chunks.step, dtype) for t in (x, gh, gx))
    for i in chunks:
        j = min(i + chunks.step, tokens)
        xc, ghc, out = x_in.read(i, j), gh_in.read(i, j), gx_out.read(i, j)
        pre = activation(pre_logits(z[i:j], base, scale, groups, kind), kind, eps)
        g_pre = torch.bmm(xc, ghc.unsqueeze(2)).squeeze(2)
        _logit_gradient(g_pre, pre, z[i:j], gz[i:j], g_logits[i:j], scale, groups, kind, eps)
        gzc, zc, rc = gz[i:j].view(-1, m), z[i:j].view(-1, m), r[i:j].view(-1, 1)
        along_x = (gzc * zc).sum(1, keepdim=True).mul_(rc).mul_(rc).div_(-k)
        gzc.mul_(rc)
        out.addcmul_(pre.unsqueeze(2), ghc.unsqueeze(1))
        out.view(-1, k).addmm_(gzc, weight).addcmul_(along_x, xc.view(-1, k))
        gx_out.store(i, j)
        gfn.addmm_(gzc.t(), xc.view(-1, k))
    rows = z[:, :n] if groups == 1 else z.view(tokens, groups, m)[:, :, 0]
    gscale = (g_logits * (rows.tanh() if kind == "tanh" else rows)).sum()
    return gfn.to(fn.dtype), g_logits.sum(0).to(base.dtype), gscale.to(scale.dtype)


def _logit_gradient(g_pre, pre, z, gz, g_logits, scale, groups: int, kind: str, eps: float) -> None:
    """Writes the gradient of the pre logits and adds it to that of z."""
    n = pre.shape[1]
    rows = slice(0, n) if groups == 1 else slice(0, None, z.shape[1] // groups)
    if kind == "sigmoid":
        s = pre - eps if eps else pre
        g_logits.copy_(g_pre.mul_(s).addcmul_(g_pre, s, value=-1))
        gz[:, rows] += g_logits * scale
    else:
        g_logits.copy_(g_pre)
        gz[:, rows] += g_logits * scale * (1 - z[:, rows].tanh().square())
