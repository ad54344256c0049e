"""What one adapted layer does in a forward pass: its share of the output, and whether it does what its factors say."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from laneway.connections.adapters import Adapter, delta
from laneway.connections.layer import HyperConnection
from laneway.connections.picture import Camera
from laneway.connections.reference import rms_norm


class AdapterMeter:
    """Sees an adapted layer run: how large its adapter's part is, and whether the layer does what its factors say.

    Args:
        adapter: the layer.
        camera: says which tokens are looked at.
        scalings: what they were at the beginning.
    """

    def __init__(self, adapter: Adapter, camera: Camera, scalings: list[float]) -> None:
        self.adapter, self.camera, self.scalings = adapter, camera, scalings
        self.contribution, self.logits, self.law = 0.0, 0.0, 0.0

    def __call__(self, x: Tensor, y: object) -> None:
        """Measure one run; called by a forward hook."""
        if self.adapter.kind == "linear" and isinstance(y, Tensor):
            self._linear(self.camera.sampled(x), self.camera.sampled(y))
        elif self.adapter.kind == "map":
            self._map(self.camera.sampled(x, 2))
        elif self.adapter.kind == "other" and isinstance(y, Tensor):
            x, y = self.camera.sampled(x), self.camera.sampled(y).double()
            with self.adapter.off():
                base = self.adapter.module.forward(x).double()
            self.contribution = _median_ratio(y - base, base)

    def _linear(self, x: Tensor, y: Tensor) -> None:
        base = self.adapter.plain_output(x).double()
        factors = self._factors()
        added = delta(factors, x).double() if self.adapter.plain and factors else y.double() - base
        self.contribution = _median_ratio(added, base)
        if self.adapter.plain and not (self.adapter.merged and not self.adapter.own):
            trained = _without_dropout(self.adapter.module, x).double()
            eps = 4 * torch.finfo(y.dtype).eps
            size = max((base.square() + added.square()).sum().sqrt().item(), 1e-30)
            worst = max((out - base - added).norm().item() / size for out in (y.double(), trained))
            self.law = max(worst - eps, 0.0) if worst == worst else math.inf

    def _map(self, x: Tensor) -> None:
        site = self.adapter.base
        assert isinstance(site, HyperConnection)
        groups = x if site.manifold == "none" else x.flatten(-2)  # HC: every stream predicts its own maps
        shift = delta(self._factors(), rms_norm(groups.double(), site.norm_eps)).double()
        n = site.streams
        sizes = [1, 1, n] if site.manifold == "none" else [n, n, shift.shape[-1] - 2 * n]
        shift = shift * site.scale.double().repeat_interleave(torch.tensor(sizes, device=shift.device))
        size = shift.flatten(1).abs().amax(-1).median().item() if len(shift) else 0.0
        self.logits = size if math.isfinite(size) else math.inf
        if self.adapter.own:
            self.law = max(self._map_gap(training) for training in (False, True))

    def _map_gap(self, training: bool) -> float:
        """Relative difference of the projection that is used in a mode from φ + s B A, over 4 epsilons."""
        (a, b, scaling), site = self._factors()[0], self.adapter.base
        want = self.adapter.matrix().double() + scaling * (b.double() @ a.double())
        before, site.training = site.training, training
        assert isinstance(site, HyperConnection)
        gap = (site.fn.double() - want).norm().item() / max(want.norm().item(), 1e-30)
        site.training = before
        return max(gap - 4 * torch.finfo(torch.float32).eps, 0.0) if math.isfinite(gap) else math.inf

    def _factors(self) -> list[tuple[Tensor, Tensor, float]]:
        return [(a, b, s) for (a, b, _), s in zip(self.adapter.factors(), self.scalings, strict=True)]


def _median_ratio(part: Tensor, whole: Tensor) -> float:
    """Median over tokens of |part| / |whole|: both [S, W]."""
    ratio = (part.norm(dim=-1) / whole.norm(dim=-1).clamp_min(1e-30)).median().item() if len(part) else 0.0
    return ratio if math.isfinite(ratio) else math.inf


def _without_dropout(module: nn.Module, x: Tensor) -> Tensor:
    """What the layer gives in training mode, with dropout at zero: the function that is being trained."""
    dropouts = [(m, m.p) for m in module.modules() if isinstance(m, nn.Dropout)]
    training = [(m, m.training) for m in module.modules()]
    for dropout, _ in dropouts:
        dropout.p = 0.0
    try:
        return module.train().forward(x)
    finally:
        for dropout, p in dropouts:
            dropout.p = p
        for m, mode in training:
            m.training = mode
