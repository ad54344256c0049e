"""How far our site is from the float64 reference, and from transformers' module with the same weights: errors, not times."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from laneway.bench import peers
from laneway.bench.rows import Row
from laneway.connections import HyperConnection, reference

TOKENS, DIM = 256, 64
RESULTS = ("y", "x", "fn", "base", "scale")


def rows(seed: int = 0) -> list[Row]:
    """Largest error relative to the largest value, for the output and each gradient; n = 1 … 6, fp32 and bf16 streams."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for streams in range(1, 7):
            found += _compare(streams, dtype, seed)
    return found


def _compare(streams: int, dtype: torch.dtype, seed: int) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    x, gy = (torch.randn(1, TOKENS, streams, DIM, generator=generator).to(dtype) for _ in range(2))
    site = peers.ours_like_v4(DIM, streams)
    peers.fill(site, seed + streams)
    exact = _gradients(lambda x: _reference(site, x), x.double(), gy.double(), site)
    pairs: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    ours = _gradients(lambda x: peers.apply_ours(site, x), x, gy, site)
    pairs["reference"] = ours, exact
    peer = peers.PEERS["transformers"]
    if peer.present:
        module = peer.make(DIM, streams)
        module.load_state_dict(site.state_dict())
        theirs = _gradients(lambda x: peer.apply(module, x), x, gy, module)
        pairs["transformers"] = ours, theirs
        pairs["transformers to reference"] = theirs, exact
    condition = {"streams": streams, "dtype": str(dtype).removeprefix("torch."), "tokens": TOKENS, "dim": DIM}
    return [condition | {"compared": name} | _errors(*pair) for name, pair in pairs.items()]


def _reference(site: HyperConnection, x: Tensor) -> Tensor:
    parameters = [p.double() for p in (site.fn, site.base, site.scale)]
    return reference.connection(x, lambda h: h, *parameters, iterations=site.iterations, norm_eps=site.norm_eps, eps=site.eps)


def _gradients(function: Callable[[Tensor], Tensor], x: Tensor, gy: Tensor, module: nn.Module) -> list[Tensor]:
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = function(x)
    y.backward(gy)
    named = dict(module.named_parameters())
    return [t.detach().clone() for t in (y, x.grad, *(named[name].grad for name in RESULTS[2:])) if t is not None]


def _errors(got: list[Tensor], want: list[Tensor]) -> Row:
    """Columns error_y, error_x, …; zero against zero is zero."""
    found: Row = {}
    for name, a, b in zip(RESULTS, got, want, strict=True):
        scale = b.double().abs().max().item()
        difference = (a.double() - b.double()).abs().max().item()
        found[f"error_{name}"] = difference / scale if scale else difference
    return found
