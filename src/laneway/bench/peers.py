"""What a site is compared with. Each adapter makes a module and a function ``streams → streams`` around one sub-layer.

The sub-layer is the identity behind an opaque boundary that torch.compile does not look through, so a compiled site is two
graphs, before and after the sub-layer, as it is around a real one.

Shapes: b batch, t time, n streams, c width.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laneway.connections import HyperConnection

EPS = 1e-6  # DeepSeek-V4's hc_eps and rms_norm_eps
Site = Callable[[Tensor], Tensor]


@torch.compiler.disable
def opaque(h_btc: Tensor) -> Tensor:
    """The sub-layer: hands its input back."""
    return h_btc


@dataclass(frozen=True)
class Peer:
    """A library with a hyper-connection layer.

    ``same_function``: it computes what the paper does, so that its time and its numbers compare with ours one to one.
    """

    name: str
    package: str
    module: str
    same_function: bool
    make: Callable[[int, int], nn.Module]
    apply: Callable[[nn.Module, Tensor], Tensor]

    @property
    def present(self) -> bool:
        """Whether the package is installed. It is not imported for that."""
        return importlib.util.find_spec(self.module) is not None

    @property
    def version(self) -> str:
        """Version of the installed package."""
        return importlib.metadata.version(self.package)

    @property
    def missing(self) -> str:
        """What to say where it is not installed."""
        return f"{self.name} is left out: {self.package} is not installed (pip install 'laneway[peers]')"


def _transformers_make(dim: int, streams: int) -> nn.Module:
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    return DeepseekV4HyperConnection(DeepseekV4Config(hidden_size=dim, hc_mult=streams, hc_eps=EPS, rms_norm_eps=EPS))


def _transformers_apply(site: nn.Module, x_btnc: Tensor) -> Tensor:
    """The module, then what DeepSeek-V4's decoder layer does with its results."""
    post, comb, collapsed = site(x_btnc)
    f = opaque(collapsed)
    dtype = x_btnc.dtype
    mixed = torch.matmul(comb.to(dtype).transpose(-1, -2), x_btnc)
    return post.to(dtype).unsqueeze(-1) * f.unsqueeze(-2) + mixed


def _hyper_connections_make(dim: int, streams: int) -> nn.Module:
    from hyper_connections.mHCv2 import ManifoldConstrainedHyperConnections

    return ManifoldConstrainedHyperConnections(streams, dim=dim, layer_index=0, sinkhorn_iters=20)


def _merge_apply(site: nn.Module, x_btnc: Tensor) -> Tensor:
    """``h, merge = site(x)``: the calling convention of hyper-connections and of laneway."""
    h, merge = site(x_btnc)
    return merge(opaque(h))


PEERS = {
    peer.name: peer
    for peer in (
        Peer("transformers", "transformers", "transformers", True, _transformers_make, _transformers_apply),
        Peer("hyper_connections", "hyper-connections", "hyper_connections", False, _hyper_connections_make, _merge_apply),
    )
}


def ours_like_v4(dim: int, streams: int) -> HyperConnection:
    """Our site with DeepSeek-V4's epsilons and no cap on the logits: the function of transformers' module."""
    return HyperConnection(dim, streams, cap=None, eps=EPS, norm_eps=EPS, disable=False)


def ours(dim: int, streams: int) -> HyperConnection:
    """Our site with its defaults, maps kept even for one stream."""
    return HyperConnection(dim, streams, disable=False)


def apply_ours(site: nn.Module, x_btnc: Tensor) -> Tensor:
    """Streams through our site."""
    return _merge_apply(site, x_btnc)


def plain_residual(x_btc: Tensor) -> Tensor:
    """x + f: what a network without streams does."""
    return x_btc + opaque(x_btc)


@torch.no_grad()
def fill(site: nn.Module, seed: int, logit_std: float = 1.0) -> None:
    """Random weights of the V4 layout (fn, base, scale) such that the maps' logits have about this standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    fn, base, scale = (getattr(site, name) for name in ("fn", "base", "scale"))
    # The projection sees a normalised vector of K numbers: entries of deviation 1/√K give logits of deviation one.
    fn.copy_(torch.randn(fn.shape, generator=generator, dtype=fn.dtype) * (0.5**0.5 * logit_std / fn.shape[1] ** 0.5))
    base.copy_(torch.randn(base.shape, generator=generator, dtype=base.dtype) * (0.5**0.5 * logit_std))
    scale.fill_(1.0)
