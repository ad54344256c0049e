"""``SiteScheduler``: priorities of the streams at one site, a control of its maps. ``ConnectionScheduler`` sets its statistics.

For a token with streams x_i, at a site with queries q (one for H_pre, one for H_post):

    z_i = P x_i / rms(x_i)                      P [C, d] random, fixed, from a seed: a buffer
    k_i = W z_i + e_i                           keys, W [d, d] begins as the identity, e_i [d] random
    a_i = q · k_i / (τ √d) + β log(n demand_i)  q begins at zero; demand_i: the stream's share of recent use, from earlier steps
    w   = relative priorities of a              (priorities.py)
    H_pre, H_post ← modulated by w; H_post ← g ∘ H_post, g from arbitration (arbitration.py) over earlier steps
    H_post ← times one number, so that a token writes as much in all as without the scheduler (``keep_total``)

A token's priorities hang on its own streams and on statistics of earlier steps alone. The summaries z carry no gradient to the
streams, and nothing as wide as a stream is kept for the backward pass. While q is zero and nothing was measured, every
modulation is by exactly 1: a model begins as the function that it is without the scheduler.

n d + d² + 2 d parameters a site. They belong to the model: its state dict, fp32 as the maps are, out of weight decay, sharded
with their site.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from laneway.connections.arbitration import check_directions
from laneway.connections.control import Maps, StreamControl, attach, require_sites
from laneway.connections.curvature import WIDEST, TokenSample
from laneway.connections.priorities import FORMS, check_floor, keep_total, metered, modulate, relative_priorities
from laneway.core import InputError, choice, collect, positive_int, problems_of, real

if TYPE_CHECKING:
    from laneway.connections.layer import HyperConnection

PARTS = ("demand", "threshold", "decay")  # of a schedule: numbers from 0 to below 1


@dataclass(frozen=True)
class Schedule:
    """How a scheduler decides."""

    temperature: float = 1.0
    """τ > 0: the lower, the more one stream is preferred."""
    floor: float = 0.05
    """Smallest share of each stream in the priorities, > 0 and < 1 / streams."""
    form: str = "scale"
    """scale | logits: how priorities change a map (priorities.py)."""
    reads: bool = True
    """Whether H_pre is modulated too, for which h is mixed a second time."""
    demand: float = 0.5
    """β from 0 to below 1: how far shares of recent use set the priorities; at 1 they would feed on themselves."""
    damping: float = 0.5
    """η ≥ 0 of arbitration; 0: none."""
    threshold: float = 0.8
    """Similarity from 0 to below 1, above which two streams collide."""
    keep_total: bool = True
    """Whether a token's writes add up to what they were."""
    features: int = 16
    """Dimensions d of the random projection, at most 32; narrower streams: their width."""
    directions: int = 4
    """Dimensions r of a stream's subspace."""
    sample: int = 64
    """Tokens, for each stream and rank, that subspaces are taken from."""
    every: int = 8
    """Steps between two measurements."""
    decay: float = 0.9
    """Of the moving averages, at each measurement."""
    seed: int = 0
    """Of projections, places of the sample, and keys."""

    def problems(self, streams: Collection[int], widths: Collection[int], prefix: str = "") -> list[InputError]:
        """All that is wrong for sites of such streams and widths; names of fields begin with ``prefix``."""
        return problems_of(self, prefix, lambda sound: sound._out_of_range(streams, widths, prefix))

    def _out_of_range(self, streams: Collection[int], widths: Collection[int], prefix: str) -> list[InputError]:
        return collect(
            [
                lambda: self._real(prefix, "temperature", lambda given: given > 0, "a number > 0"),
                lambda: check_floor(f"{prefix}floor", self.floor, max(streams, default=1)),
                lambda: choice(f"{prefix}form", self.form, FORMS),
                *(partial(self._real, prefix, name, _part, "a number from 0 to below 1") for name in PARTS),
                lambda: self._real(prefix, "damping", lambda given: given >= 0, "a number ≥ 0"),
                lambda: positive_int(f"{prefix}every", self.every),
                lambda: positive_int(f"{prefix}seed", self.seed, 0),
                lambda: self._check_sizes(prefix, widths),
            ]
        )

    def _real(self, prefix: str, name: str, fine: Callable[[float], bool], accepted: str) -> float:
        return real(f"{prefix}{name}", getattr(self, name), fine, accepted)

    def _check_sizes(self, prefix: str, widths: Collection[int]) -> None:
        if positive_int(f"{prefix}features", self.features) > WIDEST:
            raise InputError(f"{prefix}features", self.features, f"an integer from 1 to {WIDEST}")
        positive_int(f"{prefix}directions", self.directions)
        if self.damping:
            check_directions(f"{prefix}directions", self.directions, min([self.features, *widths]))
        if positive_int(f"{prefix}sample", self.sample) <= self.directions:
            raise InputError(f"{prefix}sample", self.sample, f"an integer above directions = {self.directions}")


def _part(given: float) -> bool:
    return 0 <= given < 1


class SiteScheduler(StreamControl):
    """The scheduler of one site.

    Buffers: ``demand`` [2, n], log of n times each stream's share of use, for reads and writes; ``similarity`` [n, n] and
    ``damping`` [n], g. They are set between steps, and part of the function.

    Args:
        site: whose maps it controls.
        schedule: how it decides, checked.
        place: the site's place in the model, which sets its random numbers apart.
    """

    demand: Tensor
    similarity: Tensor
    damping: Tensor

    def __init__(self, site: HyperConnection, schedule: Schedule, place: int = 0) -> None:
        super().__init__()
        self.schedule, n = schedule, site.streams
        features, device, dtype = min(schedule.features, site.dim), site.base.device, site.base.dtype
        seed = (schedule.seed * 1_000_003 + place) % 2**63
        self.sampler = TokenSample(site.dim, schedule.sample, features, seed).to(device)
        generator = torch.Generator().manual_seed(seed + 1)
        streams = torch.randn(n, features, generator=generator)
        self.query = nn.Parameter(torch.zeros(2, features, dtype=dtype, device=device))
        self.key = nn.Parameter(torch.eye(features, dtype=dtype, device=device))
        self.stream = nn.Parameter(streams.to(device, dtype))
        self.register_buffer("demand", torch.zeros(2, n, device=device))
        self.register_buffer("similarity", torch.zeros(n, n, device=device))
        self.register_buffer("damping", torch.ones(n, device=device))
        self.watching = False
        self.listen()

    def listen(self) -> None:
        """Make room for what is noted while ``watching``: a meter of use, tokens [n, S, d], sums of priorities [2, n + 1]."""
        n, device = self.damping.shape[0], self.damping.device
        self.meter = torch.zeros(2, n, device=device, requires_grad=True)
        self.points = torch.full((n, self.schedule.sample, self.key.shape[-1]), float("nan"), device=device)
        self.seen = torch.zeros(2, n + 1, device=device)

    def watch(self, on: bool) -> None:
        """Begin to note, from nothing, or end it."""
        self.watching = on
        if on:
            self.points.fill_(float("nan"))
            self.seen.zero_()
            self.meter.grad = None

    def forward(self, site: HyperConnection, x: Tensor, pre: Tensor, post: Tensor, res: Tensor) -> Maps:
        """(H_pre, H_post, H_res) of this pass."""
        read, write = self.priorities(x, post.dtype).unbind(-2)
        if self.watching:
            pre, post = self._watch(x, read, write, pre, post)
        schedule, plain = self.schedule, site.manifold == "none"
        new_pre = modulate(pre, read, schedule.form, None if plain else 1.0) if schedule.reads else pre
        new_post = modulate(post, write, schedule.form, None if plain else 2.0) * self.damping.to(post.dtype)
        return new_pre, keep_total(new_post, post) if schedule.keep_total else new_post, res

    def priorities(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """w [N, 2, n] of streams x […, n, C]: for reads and for writes."""
        with torch.no_grad():
            wide = x.detach().reshape(-1, *x.shape[-2:]).to(dtype)
            square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1]
            scale = square.clamp(min=torch.finfo(dtype).tiny).rsqrt() * math.sqrt(self.key.shape[0] / x.shape[-1])
            z = (wide @ self.sampler.projection.to(dtype)) * scale
        query = self.query.to(dtype) / (self.schedule.temperature * math.sqrt(self.key.shape[0]))
        own = query @ self.stream.to(dtype).mT + self.schedule.demand * self.demand.to(dtype)  # of a stream, whatever it holds
        scores = (z @ (query @ self.key.to(dtype)).mT).mT + own
        return relative_priorities(scores, self.schedule.floor)

    def _watch(self, x: Tensor, read: Tensor, write: Tensor, pre: Tensor, post: Tensor) -> tuple[Tensor, Tensor]:
        """Note tokens and mean priorities; the maps, with their use metered."""
        self.points.copy_(self.sampler(x.detach()))
        with torch.no_grad():
            both = torch.stack([read, write])
            fine = both.isfinite().all(-1, keepdim=True)
            total = torch.where(fine, both, 0).sum(1)
            self.seen.copy_(torch.cat([total, fine.sum(1).to(total.dtype)], 1))
        return metered(pre, self.meter[0]) if self.schedule.reads else pre, metered(post, self.meter[1])


class FixedPriorities(StreamControl):
    """The simplest control beside it: the same priorities for all tokens at all times, at reads and at writes.

    ``priority`` [n], n times each share, is a buffer.

    Args:
        shares: one a stream, each > 0; only their ratios count.
        form: scale | logits, as ``Schedule.form``.

    Raises:
        InputError: a share that is not a number > 0, no share, or an unknown form.
    """

    priority: Tensor

    def __init__(self, shares: Sequence[float], form: str = "scale") -> None:
        super().__init__()
        given = list(shares)
        if not given:
            raise InputError("shares", given, "a number > 0 for each stream")
        for share in given:
            real("shares", share, lambda each: each > 0, "a number > 0 for each stream")
        self.form = choice("form", form, FORMS)
        shares_n = torch.tensor(given, dtype=torch.float64)
        self.register_buffer("priority", (shares_n / shares_n.mean()).float())

    def forward(self, site: HyperConnection, x: Tensor, pre: Tensor, post: Tensor, res: Tensor) -> Maps:
        """(H_pre, H_post, H_res) of this pass."""
        if len(self.priority) != site.streams:
            raise InputError("shares", len(self.priority), f"one a stream, {site.streams}")
        priority, plain = self.priority.to(post.dtype), site.manifold == "none"
        changed = modulate(post, priority, self.form, None if plain else 2.0)
        return modulate(pre, priority, self.form, None if plain else 1.0), keep_total(changed, post), res


def add_scheduler(model: nn.Module, schedule: Schedule | None = None) -> list[SiteScheduler]:
    """Give every site with maps a ``SiteScheduler``, before the optimizer is made and the model is wrapped (DDP, FSDP2).

    It draws no numbers from the global generators.

    Raises:
        InputError: a field of the schedule is out of range, or the model has no maps.
    """
    schedule, sites = schedule or Schedule(), require_sites(model)
    for problem in schedule.problems({site.streams for site in sites}, {site.dim for site in sites}):
        raise problem
    return attach(model, lambda site, place: SiteScheduler(site, schedule, place))


def schedulers(model: nn.Module) -> list[SiteScheduler]:
    """Those of a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, SiteScheduler)]
