"""``HyperConnection``: one site. ``expand_streams`` and ``StreamReadout``: into and out of n streams.

Shapes: … any leading dims (batch, time), n streams, C width (``dim``), N = all leading dims flattened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from laneway.connections import manifolds, ops, site_ops, start
from laneway.connections.control import StreamControl, apply_control
from laneway.connections.parameters import WideParameters
from laneway.core import InputError, choice, positive_int


class Merge:
    """What a site hands on: ``merge(f)`` gives the streams after it, and ``merge.into(site, f)`` also enters the next site.

    ``pre`` and ``post`` are H_pre and H_post [N, n], ``res`` H_res [N, out, in] (None without maps); N is all leading dims.
    No dataclass: FSDP looks into those for the tensors that a module returns, and x is none of them.
    """

    def __init__(
        self,
        site: HyperConnection,
        x: Tensor,
        shape: torch.Size,
        carry: Tensor | None = None,
        maps: Tensor | None = None,
        post_map: Tensor | None = None,
        res_map: Tensor | None = None,
        pre_map: Tensor | None = None,
        read: Tensor | None = None,
    ) -> None:
        self.site, self.x, self.shape, self.carry = site, x, shape, carry
        self.maps, self.post_map, self.res_map, self.pre_map, self.read = maps, post_map, res_map, pre_map, read

    def __call__(self, f: Tensor) -> Tensor:
        """H_res x + H_postᵀ f: f […, C] → […, n, C].

        Raises:
            InputError: f has another shape than the sub-layer's input.
        """
        self._check(f)
        if self.carry is None:
            return self.x + f.unsqueeze(-2)
        if self.maps is None:
            return ops.post_mix(self.x, self.carry, f, self.post_map, self.res_map)
        return site_ops.mhc_post(self.x, self.carry, f, self.maps)

    def into(self, site: HyperConnection, f: Tensor, pre: Tensor | None = None) -> tuple[Tensor, Merge]:
        """The same as ``site(merge(f))``, in one pass over the streams where both sites have Sinkhorn maps.

        f […, C] → (h […, C], merge) of the next site. ``pre`` is for a single-pass site: by default this site's H_pre.

        Raises:
            InputError: f has another shape than the sub-layer's input.
        """
        self._check(f)
        return site(Crossing(self, f)) if pre is None else site(Crossing(self, f), pre)

    @property
    def pre(self) -> Tensor | None:
        """H_pre of this site, [N, n]: what a single-pass site hands to the next one. None without Sinkhorn maps."""
        return None if self.maps is None else self.maps[:, : self.site.streams]

    @property
    def post(self) -> Tensor | None:
        """H_post of this site, [N, n]."""
        n = self.site.streams
        return self.post_map if self.maps is None else self.maps[:, n : 2 * n]

    @property
    def res(self) -> Tensor | None:
        """H_res of this site, [N, out, in]."""
        n = self.site.streams
        return self.res_map if self.maps is None else self.maps[:, 2 * n :].unflatten(1, (n, n))

    def _check(self, f: Tensor) -> None:
        if f.shape != self.shape:
            raise InputError("f", list(f.shape), f"the sub-layer's output, {list(self.shape)}")


class WatchedMerge(Merge):
    """A merge that shows what goes through it: ``see(f, y)``. The pass that is saved between two sites is given up for that."""

    def __init__(self, merge: Merge, see: Callable[[Tensor, Tensor], None]) -> None:
        self.__dict__.update(merge.__dict__)
        self.see = see

    def __call__(self, f: Tensor) -> Tensor:
        """The streams after the site, shown."""
        y = super().__call__(f)
        self.see(f, y)
        return y


class Entry(Protocol):
    """What a site may be given in place of streams: another way to enter it. It goes through the module's call, so that hooks on
    the site (FSDP, pruning) see it.
    """

    def enter(self, site: HyperConnection, pre: Tensor | None) -> tuple[Tensor, Merge]:
        """What ``site`` returns."""
        ...


@dataclass(frozen=True)
class Crossing:
    """From one site's merge into the next site, in one pass over the streams."""

    before: Merge
    f: Tensor

    def enter(self, site: HyperConnection, pre: Tensor | None) -> tuple[Tensor, Merge]:
        """The ops' mhc_cross; two ops where a site has no Sinkhorn maps."""
        before = self.before
        if site.single_pass and pre is None:
            pre = before.pre
        if not crosses(before, site):
            return site.enter(before(self.f), pre)
        site.require_wide()
        carried = site.carried(before.x, pre)
        y, h, maps, carry, *_, read = site_ops.mhc_cross(before.x, before.carry, self.f, before.maps, carried, *site.arguments)
        return h, Merge(site, y, h.shape, carry, maps, read=read)


def crosses(before: Merge, site: HyperConnection) -> bool:
    """Whether one op can go from one site to the next."""
    fits = before.maps is not None and site.mhc and (site.streams, site.dim) == tuple(before.x.shape[-2:])
    return fits and not isinstance(before, WatchedMerge)


class HyperConnection(WideParameters):
    """One site of a manifold-constrained hyper-connection (Xie et al., arXiv 2512.24880, Eqs. 3 and 7–9).

    ``h, merge = site(x)`` gives the sub-layer's input h = H_pre x, and ``merge(f)`` the new streams H_res x + H_postᵀ f, so
    that ``x = merge(sublayer(h))``. The parameters are laid out as DeepSeek-V4's: ``fn`` [m, nC] with the rows pre (n), post
    (n), res ([in, out], n² for sinkhorn), ``base`` [m], ``scale`` [3]. They stay fp32 under ``.to(bfloat16)``, autocast and
    FSDP (see ``shard_connections``); the streams may be fp32, bf16, fp16 or fp64.

    Args:
        dim: width C of one stream.
        streams: n ≥ 1. One stream is the plain residual x + f, without parameters.
        manifold: where H_res lives: sinkhorn (mHC), birkhoff, kronecker, orthogonal, identity, none (HC: tanh, see Eq. 5).
        site: index of this site in the network; the start leans on other streams at each (see docs/start.md).
        iterations: Sinkhorn iterations.
        cap: H_res logits pass through cap·tanh(h / cap); None leaves them alone (as the paper and V4 do).
        eps: added to H_pre and inside Sinkhorn as DeepSeek-V4 does (1e-6 there); 0 is the paper.
        norm_eps: added to the mean square of the RMSNorm.
        single_pass: h is mixed by the H_pre that the *previous* site predicted (DeepSeek-V4.1), so that a site needs one pass
            over its streams; sinkhorn alone. The first site reads stream 0.
        disable: True: no maps and no parameters, h is the mean of the streams and f is added to each.
            None: True for one stream, else False. False with one stream keeps the maps.
        device, dtype: of the parameters; fp32 or float64.

    Attributes:
        control: what may change the maps of each pass (see control.py); None, as at first: nothing.

    Raises:
        InputError: a value out of range, or an unknown manifold (the nearest is suggested).
    """

    def __init__(
        self,
        dim: int,
        streams: int,
        manifold: str = "sinkhorn",
        *,
        site: int = 0,
        iterations: int = 20,
        cap: float | None = 8.0,
        eps: float = 0.0,
        norm_eps: float = 1e-6,
        single_pass: bool = False,
        disable: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.dim, self.streams = positive_int("dim", dim), positive_int("streams", streams)
        self.site, self.iterations = positive_int("site", site, 0), positive_int("iterations", iterations)
        if cap is not None and not cap > 0:
            raise InputError("cap", cap, "a number > 0, or None for no cap")
        for name, value in (("eps", eps), ("norm_eps", norm_eps)):
            if not value >= 0:
                raise InputError(name, value, "a number ≥ 0")
        if dtype not in (torch.float32, torch.float64):
            raise InputError("dtype", dtype, "torch.float32 or torch.float64: maps are never narrower")
        self.manifold = choice("manifold", manifold, manifolds.MANIFOLDS)
        if single_pass and manifold != "sinkhorn":
            raise InputError(
                "single_pass", single_pass, f"False for manifold {manifold!r}; sinkhorn alone has a single-pass form"
            )
        self.disabled = streams == 1 if disable is None else disable
        self.single_pass = single_pass and not self.disabled
        self.cap, self.eps, self.norm_eps = cap, eps, norm_eps
        self.observers: list[Callable[[HyperConnection, Tensor, Tensor], None]] = []
        self.control: StreamControl | None = None
        if self.disabled:
            return
        self.res = manifolds.build(manifold, streams, iterations=iterations, eps=eps)
        rows = 2 * streams + self.res.logits
        shape = (streams + 2, dim) if manifold == "none" else (rows, streams * dim)
        self.fn = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.base = nn.Parameter(torch.empty(rows, device=device, dtype=dtype))
        self.scale = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The start: zero projection, scale 1, and the biases of docs/start.md (HC: its own one-hot start)."""
        if self.disabled:
            return
        n = self.streams
        self.fn.zero_()
        if self.manifold == "none":  # arXiv 2409.19606, Eq. 14: reads one-hot, writes 1, H_res = I, dynamic scale 0.01
            self.scale.fill_(0.01)
            pre, post = torch.eye(n, dtype=torch.float32)[self.site % n], torch.ones(n, dtype=torch.float32)
        else:
            self.scale.fill_(1.0)
            pre, post = start.logit(start.read_weights(n, self.site) - self.eps), start.logit(start.write_weights(n) / 2)
        self.base.copy_(torch.cat([pre, post, self.res.start]))

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        if self.disabled:
            return f"dim={self.dim}, streams={self.streams}, disabled"
        return f"dim={self.dim}, streams={self.streams}, manifold={self.manifold!r}, site={self.site}, cap={self.cap}"

    def forward(self, x: Tensor | Entry, pre: Tensor | None = None) -> tuple[Tensor, Merge]:
        """Streams […, n, C] → (h […, C], merge), with merge: f […, C] → […, n, C].

        Args:
            x: the streams. (``Merge.into`` and ``StreamChain`` give what stands for them.)
            pre: for a single-pass site, the previous site's H_pre [N, n] (``merge.pre``); None stands for stream 0.

        Raises:
            InputError: x has other trailing dims than [streams, dim]; ``pre`` given to a site that is not single-pass.
            TypeError: the parameters were narrowed below fp32, or x is not floating point.
        """
        if pre is not None and not self.single_pass:
            raise InputError("pre", list(pre.shape), "None: the site is not single-pass")
        h, merge = self.enter(x, pre) if isinstance(x, Tensor) else x.enter(self, pre)
        if self.control is not None:
            h = apply_control(self, merge.x, h, merge)
        if self.observers and (res := merge.res) is not None:
            for observe in self.observers:
                observe(self, merge.x.detach(), res.detach())
        return h, merge

    def enter(self, x: Tensor, pre: Tensor | None) -> tuple[Tensor, Merge]:
        """``forward`` of streams, without the control and the observers."""
        if x.shape[-2:] != (self.streams, self.dim):
            raise InputError("x", list(x.shape), f"[..., streams = {self.streams}, dim = {self.dim}]")
        if self.disabled:
            return _plain(self, x)
        self.require_wide(x)
        if self.mhc:
            h, maps, carry, *_, read = site_ops.mhc_pre(x, self.carried(x, pre), *self.arguments)
            return h, Merge(self, x, h.shape, carry, maps, read=read)
        with torch.autocast(x.device.type, enabled=False):
            h, carry, logits, post, res = self._maps(x)
            pre = None if self.control is None else self._pre(logits)
        return h, Merge(self, x, h.shape, carry, None, post, res, pre)

    @property
    def mhc(self) -> bool:
        """Whether H_res is Sinkhorn's, so that the ops of a whole site serve: no longer if ``res`` was replaced."""
        return not self.disabled and type(self.res) is manifolds.Sinkhorn and self.res.eps == self.eps

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, float, float, float, int]:
        """fn, base, scale, norm_eps, eps, cap (0 for none) and iterations, as the ops take them."""
        res = self.res
        assert isinstance(res, manifolds.Sinkhorn)
        return self.fn, self.base, self.scale, self.norm_eps, self.eps, self.cap or 0.0, res.iterations

    def carried(self, x: Tensor, pre: Tensor | None) -> Tensor | None:
        """The weights that mix a single-pass site's h; None for any other site."""
        if not self.single_pass:
            return None
        tokens = x.shape[:-2].numel()
        if pre is None:
            return torch.eye(self.streams, device=x.device, dtype=self.base.dtype)[:1].expand(tokens, -1).contiguous()
        if pre.shape != (tokens, self.streams):
            raise InputError("pre", list(pre.shape), f"[{tokens}, {self.streams}]")
        return pre.contiguous()

    def _pre(self, logits: Tensor) -> Tensor:
        """H_pre [N, n] that pre_mix made of these logits."""
        return logits[:, : self.streams] if self.manifold == "none" else logits[:, : self.streams].sigmoid() + self.eps

    def _maps(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x […, n, C] → h […, C], carry, logits [N, m], H_post [N, n], H_res [N, out, in], N all leading dims."""
        n, hc = self.streams, self.manifold == "none"
        eps = 0.0 if hc else self.eps
        h, logits, carry, *_ = ops.pre_mix(x, self.fn, self.base, self.scale, hc, self.norm_eps, eps)
        post, res = logits[:, n : 2 * n], logits[:, 2 * n :]
        if hc:
            return h, carry, logits, post, self.res(res)
        if self.cap is not None:
            res = torch.tanh(res / self.cap) * self.cap
        return h, carry, logits, 2 * post.sigmoid(), self.res(res)


def _plain(site: HyperConnection, x: Tensor) -> tuple[Tensor, Merge]:
    """The plain residual: h is the mean of the streams (the stream itself for n = 1), f is added to each."""
    h = x.squeeze(-2) if x.shape[-2] == 1 else x.mean(-2)
    return h, Merge(site, x, h.shape)


def expand_spread(streams: int) -> float:
    """The spread at which ``expand_streams`` suits the start of docs/start.md; 0 for fewer than three streams.

    It is opposite to the writes': x_i = (1 − q_i) e + (1 + q_i) Σ F. With the same sign every stream would be a multiple of one
    vector at every site, and a pre-norm takes the multiple away: H_pre would have no gradient.
    """
    return -start.WRITE if streams >= 3 else 0.0


def expand_streams(x: Tensor, streams: int, *, spread: float = 0.0) -> Tensor:
    """[..., C] → [..., n, C]: every stream begins as a copy of x (as DeepSeek-V4), or as x·(1 + q) with a spread.

    Args:
        x: the embedding.
        streams: n ≥ 1.
        spread: relative size of q, which is +spread on one half of the streams and −spread on the other (mean 1). It lets
            H_res of the first site see different streams; see docs/start.md.

    Raises:
        InputError: streams < 1.
    """
    positive_int("streams", streams)
    copies = x.unsqueeze(-2).expand(*x.shape[:-1], streams, x.shape[-1])
    if spread == 0.0:
        return copies.contiguous()
    gain = 1 + start.write_direction(streams) * (spread / start.WRITE)
    return copies * gain.to(x)[:, None]


class StreamReadout(WideParameters):
    """[..., n, C] → [..., C].

    ``learned``: DeepSeek-V4's head, Σ_i w_i x_i with w = σ(scale · φ RMSNorm(vec x) + base) + eps, in parameters ``fn``
    [n, nC], ``base`` [n], ``scale`` [1]; it starts at the constant weights of docs/start.md, which sum to one.
    ``mean`` and ``sum`` have no parameters.

    Raises:
        InputError: dim or streams < 1, or another kind.
    """

    def __init__(
        self,
        dim: int,
        streams: int,
        kind: str = "learned",
        *,
        eps: float = 0.0,
        norm_eps: float = 1e-6,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.streams = positive_int("dim", dim), positive_int("streams", streams)
        self.kind = choice("kind", kind, ("learned", "mean", "sum"))
        self.eps, self.norm_eps = eps, norm_eps
        self.learned = kind == "learned" and streams > 1
        if self.learned:
            self.fn = nn.Parameter(torch.empty(streams, streams * dim, device=device, dtype=torch.float32))
            self.base = nn.Parameter(torch.empty(streams, device=device, dtype=torch.float32))
            self.scale = nn.Parameter(torch.empty(1, device=device, dtype=torch.float32))
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Zero projection, scale 1, constant weights that sum to one."""
        if self.learned:
            self.fn.zero_()
            self.scale.fill_(1.0)
            self.base.copy_(start.logit(start.readout_weights(self.streams) - self.eps))

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return f"dim={self.dim}, streams={self.streams}, kind={self.kind!r}"

    def forward(self, x: Tensor) -> Tensor:
        """[..., n, C] → [..., C], in the dtype of x."""
        if x.shape[-2:] != (self.streams, self.dim):
            raise InputError("x", list(x.shape), f"[..., streams = {self.streams}, dim = {self.dim}]")
        if not self.learned:
            return x.squeeze(-2) if self.streams == 1 else x.mean(-2) if self.kind == "mean" else x.sum(-2)
        self.require_wide(x)
        with torch.autocast(x.device.type, enabled=False):
            h, *_ = ops.pre_mix(x, self.fn, self.base, self.scale, False, self.norm_eps, self.eps)
        return h
