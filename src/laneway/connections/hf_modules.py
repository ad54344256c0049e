"""What ``hf.py`` turns transformers' hyper-connection modules into: mixins that go in front of the module's own class.

Each mixin has ``TEMPLATE``, which makes a module of ours with the settings of theirs (its parameters are dropped: the swapped
module keeps its own), and names the parameters under which ours finds them.

Shapes: b batch, t time, n streams, c width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from laneway.connections import ops
from laneway.connections.layer import HyperConnection, StreamReadout
from laneway.connections.parameters import WIDE, WideParameters

if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object  # a mixin: the class it is put in front of is the module


class Borrowed(_Module):
    """Parameters that transformers named, loaded and typed: found under our names, and widened at use.

    transformers leaves some of them narrow (``fn`` of GLM-5 under ``dtype=bfloat16``) and computes with ``fn.float()``; so do
    these properties. The parameter itself, its name and its dtype are left alone.
    """

    OURS: type = nn.Module
    PREFIX = ""

    @staticmethod
    def template(theirs: Any) -> nn.Module | None:
        """A module of ours with the settings of ``theirs``; None where ours would not compute the same."""
        raise NotImplementedError

    def _wide(self, name: str) -> Tensor:
        parameter = self._parameters[self.PREFIX + name]
        assert parameter is not None
        return parameter if parameter.dtype in WIDE else parameter.float()

    @property
    def fn(self) -> Tensor:
        """The projection."""
        return self._wide("fn")

    @property
    def base(self) -> Tensor:
        """The biases."""
        return self._wide("base")

    @property
    def scale(self) -> Tensor:
        """One factor for each kind of map."""
        return self._wide("scale")

    def require_wide(self, x: Tensor | None = None) -> None:
        """Narrow parameters are no error here: see the class."""


class Site(Borrowed):
    """DeepSeek-V4's and GLM-5's site → ``HyperConnection`` with their epsilons and no cap; ``h, merge = site(x)``."""

    OURS = HyperConnection

    @staticmethod
    def template(theirs: Any) -> nn.Module:
        """Ours with the settings of ``theirs``. transformers always runs the first iteration."""
        return HyperConnection(
            theirs.fn.shape[1] // theirs.hc_mult,
            theirs.hc_mult,
            iterations=max(1, theirs.hc_sinkhorn_iters),
            cap=None,
            eps=theirs.hc_eps,
            norm_eps=theirs.input_norm.eps,
            disable=False,
            device="meta",
        )


class IndependentSite(Borrowed):
    """HY-V4's site (iHC): no H_res, H_post = m σ + ε; ``h, merge = site(x)`` with merge(f) = x + H_postᵀ f.

    fn [2n, nC] with the rows pre (n), post (n), base [2n], scale [2].
    """

    OURS = WideParameters
    hc_mult: int
    hc_eps: float
    hc_post_magnitude: float
    input_norm: Any

    @staticmethod
    def template(theirs: Any) -> nn.Module:
        """All settings are on the module already."""
        return WideParameters()

    @property
    def scale(self) -> Tensor:
        """[3]: the third factor is for H_res, of which there are no rows."""
        scale = self._wide("scale")
        return torch.cat([scale, scale.new_ones(1)])

    def forward(self, x_btnc: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Streams [b, t, n, c] → (h [b, t, c], merge), with merge: f [b, t, c] → [b, t, n, c]."""
        n = self.hc_mult
        with torch.autocast(x_btnc.device.type, enabled=False):
            h, logits, carry, *_ = ops.pre_mix(x_btnc, self.fn, self.base, self.scale, False, self.input_norm.eps, self.hc_eps)
            post = self.hc_post_magnitude * logits[:, n:].sigmoid() + self.hc_eps
        return h, lambda f: _AddMix.apply(x_btnc, carry, f, post)


class _AddMix(torch.autograd.Function):
    """x + H_postᵀ f, computed in the dtype of H_post and rounded once: ``ops.post_mix`` where H_res is the identity.

    x [b, t, n, c], carry (see ``ops.py``), f [b, t, c], post [b·t, n]. The gradient of x is that of the result, and goes
    through ``carry``; it is copied, because ``pre_mix`` adds to it in place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, carry: Tensor, f: Tensor, post: Tensor) -> Tensor:
        ctx.save_for_backward(f, post)
        post = post.view(*x.shape[:-1], 1)
        with torch.autocast(x.device.type, enabled=False):
            return torch.addcmul(x.to(post.dtype), post, f.to(post.dtype).unsqueeze(-2)).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:  # type: ignore[override]
        f, post = ctx.saved_tensors
        with torch.autocast(gy.device.type, enabled=False):
            g, weights = gy.reshape(-1, *gy.shape[-2:]).to(post.dtype), post.unsqueeze(1)
            gf = torch.bmm(weights, g).view(f.shape).to(f.dtype)
            gpost = torch.bmm(f.reshape(-1, 1, f.shape[-1]).to(post.dtype), g.transpose(1, 2)).squeeze(1)
        return None, gy.clone(memory_format=torch.contiguous_format), gf, gpost


class Readout(Borrowed):
    """The learned head of DeepSeek-V4 and HY-V4 → ``StreamReadout``."""

    OURS = StreamReadout
    PREFIX = "hc_"

    @staticmethod
    def template(theirs: Any) -> nn.Module | None:
        """Ours with the settings of ``theirs``; None for one stream, whose read-out is plain here and weighted there."""
        n = theirs.hc_mult
        if n == 1:
            return None
        return StreamReadout(theirs.hc_fn.shape[1] // n, n, eps=theirs.eps, norm_eps=theirs.input_norm.eps, device="meta")
