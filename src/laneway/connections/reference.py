"""The published mathematics, one function an equation. The oracle of every test: slow, plain, exact in float64.

mHC: Xie et al., arXiv 2512.24880 (equation numbers below). HC: Zhu et al., arXiv 2409.19606.
Shapes: x [..., n, C]; fn [n(n+2), nC] with the rows pre (n), post (n), res (n², laid out [in, out]); base [n(n+2)]; scale [3].
H_res is [..., out, in]: row o says how the new stream o is mixed from the old ones.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(v: Tensor, eps: float = 0.0) -> Tensor:
    """Eq. 15: v / (‖v‖ / √K). The paper has no eps; DeepSeek-V4 adds one to the mean square."""
    return v / (v.square().mean(-1, keepdim=True) + eps).sqrt()


def map_logits(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Eqs. 14 and 16: H̃ = α (RMSNorm(vec x) φ) + b, split into pre, post and res logits."""
    n = x.shape[-2]
    z = rms_norm(x.flatten(-2), norm_eps) @ fn.T
    widths = torch.tensor([n, n, n * n], device=scale.device)
    pre, post, res = (z * scale.repeat_interleave(widths) + base).split([n, n, n * n], dim=-1)
    return pre, post, res.unflatten(-1, (n, n))


def pre_map(logits: Tensor, eps: float = 0.0) -> Tensor:
    """Eq. 17: H_pre = σ(H̃_pre); DeepSeek-V4 adds eps."""
    return torch.sigmoid(logits) + eps


def post_map(logits: Tensor) -> Tensor:
    """Eq. 18: H_post = 2 σ(H̃_post)."""
    return 2 * torch.sigmoid(logits)


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """c·tanh(h / c): bounds what Sinkhorn has to balance. Not in the paper; None leaves the logits alone."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def sinkhorn(logits: Tensor, iterations: int = 20, eps: float = 0.0) -> Tensor:
    """Eqs. 9 and 19: M⁰ = exp(H̃_res), Mᵗ = T_r(T_c(Mᵗ⁻¹)): columns of H_res first, its rows last.

    ``logits`` [..., in, out] → H_res [..., out, in]. With eps = 0 in the log domain, so any finite logits are safe.
    With eps > 0 exactly DeepSeek-V4's variant: softmax + eps, and + eps in every later denominator.
    """
    if eps == 0.0:
        log_m = logits
        for _ in range(iterations):
            log_m = log_m - log_m.logsumexp(-1, keepdim=True)
            log_m = log_m - log_m.logsumexp(-2, keepdim=True)
        return log_m.exp().transpose(-1, -2)
    m = logits.softmax(-1) + eps
    for t in range(iterations):
        m = m if t == 0 else m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m.transpose(-1, -2)


def pre_mix(x: Tensor, h_pre: Tensor) -> Tensor:
    """The sub-layer's input H_pre x, [..., C] (Eq. 3)."""
    return torch.einsum("...n,...nc->...c", h_pre, x)


def post_mix(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """Eq. 3: H_res x + H_postᵀ f, [..., n, C]."""
    return torch.einsum("...oi,...ic->...oc", h_res, x) + h_post[..., None] * f[..., None, :]


def connection(x, branch, fn, base, scale, *, iterations=20, norm_eps=0.0, eps=0.0, cap=None) -> Tensor:
    """One whole site, Eqs. 3, 7 and 8: maps, pre-mix, the sub-layer ``branch``, post-mix."""
    pre, post, res = map_logits(x, fn, base, scale, norm_eps)
    f = branch(pre_mix(x, pre_map(pre, eps)))
    return post_mix(x, f, post_map(post), sinkhorn(cap_logits(res, cap), iterations, eps))


def hc_connection(x, branch, fn, base, scale, *, norm_eps=0.0) -> Tensor:
    """Eq. 5 (HC): every stream j predicts its pre and post weight and column j of H_res, through tanh, from RMSNorm(x_j).

    fn [n + 2, C] (rows pre, post, then H_res outputs), base [n(n+2)] as above, scale [3].
    """
    n = x.shape[-2]
    pre, post, res = torch.tanh(rms_norm(x, norm_eps) @ fn.T).split([1, 1, n], dim=-1)
    b_pre, b_post, b_res = base.split([n, n, n * n])
    h_res = (scale[2] * res + b_res.view(n, n)).transpose(-1, -2)
    f = branch(pre_mix(x, scale[0] * pre[..., 0] + b_pre))
    return post_mix(x, f, scale[1] * post[..., 0] + b_post, h_res)


def composite_gain(h_res: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Fig. 3: max |row sum| (forward) and max |column sum| (backward) of the product of H_res over depth, per token."""
    product = h_res[0]
    for h in h_res[1:]:
        product = h @ product
    return product.sum(-1).abs().amax(-1), product.sum(-2).abs().amax(-1)
