"""Priorities of streams, what they do to a map, and how much each stream is used.

Relative priorities of n streams from scores a, with mean 1 over the streams and a floor f under each share w / n:

    w = 1 + (1 − n f) (ρ − 1),    ρ = n softmax(a),    n f ≤ w ≤ n

Equal scores give w = 1 exactly, whatever n. A map (H_pre or H_post) takes them in one of two ways, both exact at w = 1:

    scale     m · w
    logits    the map whose logit is larger by log w: σ becomes σ w / (1 + σ (w − 1)), where m = s σ (HC, without σ: m + log w)
"""

from __future__ import annotations

import torch
from torch import Tensor

from laneway.core import choice, real

FORMS = ("scale", "logits")


def check_floor(field: str, floor: float, streams: int) -> None:
    """Raise InputError unless all streams can have the floor and something is left to share out."""
    real(field, floor, lambda share: 0 < share * streams < 1, f"a number > 0 and < 1 / streams = 1 / {streams}")


def relative_priorities(scores: Tensor, floor: float) -> Tensor:
    """Scores […, n] → w […, n]: mean 1, never under n · floor. Computed stream against stream, token by token."""
    powers = (scores - scores.detach().amax(-1, keepdim=True)).exp()  # no score matters by itself, and neither does the largest
    n = scores.shape[-1]
    shares = powers / powers.mean(-1, keepdim=True)
    return (1 + (1 - n * floor) * (shares - 1)).clamp(min=n * floor)


def modulate(weights: Tensor, priorities: Tensor, form: str, most: float | None) -> Tensor:
    """A map […, n] under priorities w […, n].

    Args:
        weights: the map.
        priorities: w > 0.
        form: scale | logits.
        most: s, the upper end of the map's sigmoid (1 for H_pre, 2 for H_post); None: a map without one (HC).

    Raises:
        InputError: an unknown form.
    """
    if choice("form", form, FORMS) == "scale":
        return weights * priorities
    if most is None:
        return weights + priorities.log()
    sigma = (weights / most).clamp(max=1)
    return weights * priorities / (1 + sigma * (priorities - 1))


def keep_total(changed: Tensor, before: Tensor) -> Tensor:
    """``changed`` […, n] times one number, so that its absolute sum is that of ``before``. Exact where nothing changed."""
    tiny = torch.finfo(before.dtype).tiny
    return changed * (before.abs().sum(-1, keepdim=True) / changed.abs().sum(-1, keepdim=True).clamp(min=tiny))


@torch.library.custom_op("laneway::metered_use", mutates_args=())
def metered_use(weights: Tensor, meter: Tensor) -> Tensor:
    """A map […, N, n] whose backward gives ``meter`` […, n] the sum over tokens of |gradient × map| as its gradient."""
    return weights.clone()


@metered_use.register_fake
def _(weights, meter):
    return torch.empty_like(weights)


def _use_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0])


def _use_vjp(ctx, gradient):
    (weights,) = ctx.saved_tensors
    use = (gradient * weights).detach().abs()
    return gradient, torch.where(use.isfinite(), use, 0).sum(-2)


metered_use.register_autograd(_use_vjp, setup_context=_use_setup)


def metered(weights: Tensor, meter: Tensor) -> Tensor:
    """A map [N, n] as it is. When the backward pass has been through, ``meter.grad`` [n] is larger by Σ_tokens |∂L/∂m · m|.

    For H_post that is the gradient at a stream times what was written to it, for H_pre the gradient of the sub-layer's input
    times what was read: the first-order change of the loss without that path (Molchanov et al., arXiv 1906.10771). A token whose
    number is not finite counts as zero.
    """
    return metered_use(weights, meter)


def log_shares(use: Tensor, widest: float = 16.0) -> tuple[Tensor, Tensor]:
    """Use […, n] → (log(n · share) within ± log ``widest``, whether there was any use […, 1])."""
    total = use.sum(-1, keepdim=True)
    there = (total > 0) & total.isfinite()
    share = use / torch.where(there, total, 1) * use.shape[-1]
    return torch.where(there, share.clamp(1 / widest, widest).log(), 0), there
