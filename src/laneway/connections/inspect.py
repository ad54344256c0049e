"""What the streams do, cheaply: composite gain, Sinkhorn error, collapse and entropy, site by site in one forward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laneway.connections.layer import HyperConnection

TOKENS = 1024  # looked at per site: an evenly spaced sample, so the cost does not grow with the batch


class StreamProbe:
    """Records the sites of a model during forward passes.

        with StreamProbe(model) as probe:
            model(tokens)
        probe.summary()

    Figures are means over a sample of at most ``tokens`` tokens, and stay on the device until ``summary`` is asked for. One
    forward pass is one record: each site counts once, the last call wins (activation checkpointing calls it twice).

    ``summary()`` gives, for the whole depth and as ``site_…`` lists by depth (gains: the product from site 0 to that site):

        gain_forward    max |row sum| of the product of H_res, mean over tokens (Xie et al., Fig. 3); 1 is neutral
        gain_backward   the same over columns
        sinkhorn_error  max |log column sum| of a site's H_res: what the iterations left undone (largest site)
        collapse        mean cosine between two streams entering a site; 1: they are all the same (mean over sites)
        res_entropy     entropy of H_res's rows in nats, over |H_res| normalised; 0 identity, ln n uniform (mean over sites)
    """

    def __init__(self, model: nn.Module, tokens: int = TOKENS) -> None:
        self.sites = [m for m in model.modules() if isinstance(m, HyperConnection) and not m.disabled]
        self.tokens = tokens
        self._order: list[HyperConnection] = []
        self._records: dict[HyperConnection, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def __enter__(self) -> StreamProbe:
        for site in self.sites:
            site.observers.append(self._observe)
        return self

    def __exit__(self, *_: object) -> None:
        for site in self.sites:
            site.observers.remove(self._observe)

    @torch.no_grad()
    def _observe(self, site: HyperConnection, x: Tensor, res: Tensor) -> None:
        flat = x.reshape(-1, *x.shape[-2:])
        picks = torch.linspace(0, max(len(flat) - 1, 0), min(len(flat), self.tokens), device=x.device).long()
        if site not in self._records:
            self._order.append(site)
        self._records[site] = _figures(flat[picks].float(), res[picks])

    @torch.no_grad()
    def summary(self) -> dict[str, float | list[float]]:
        """The figures of the last forward pass; {} where no site has run."""
        records = [self._records[site] for site in self._order]
        if not records or not len(records[0][0]):
            return {}
        product, gains = None, []
        for res, *_ in records:
            product = res if product is None else res @ product
            gains.append(torch.stack([product.sum(-1).abs().amax(-1).mean(), product.sum(-2).abs().amax(-1).mean()]))
        scalars = torch.stack([torch.stack(record[1:]) for record in records])
        forward, backward, error, collapse, entropy = torch.cat([torch.stack(gains), scalars], 1).cpu().unbind(1)
        return {
            "gain_forward": forward[-1].item(),
            "gain_backward": backward[-1].item(),
            "sinkhorn_error": error.max().item(),
            "collapse": collapse.mean().item(),
            "res_entropy": entropy.mean().item(),
            "site_gain_forward": forward.tolist(),
            "site_gain_backward": backward.tolist(),
            "site_sinkhorn_error": error.tolist(),
            "site_collapse": collapse.tolist(),
            "site_res_entropy": entropy.tolist(),
        }


def _figures(x: Tensor, res: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(H_res, Sinkhorn error, collapse, entropy) of sampled tokens: x [S, n, C], res [S, out, in]."""
    tiny = torch.finfo(res.dtype).tiny
    columns = res.sum(-2).abs().clamp_min(tiny).log().abs().amax() if len(res) else res.new_zeros(())
    unit = torch.nn.functional.normalize(x, dim=-1)
    n = x.shape[-2]
    between = (unit.sum(-2).square().sum(-1) - unit.square().sum((-1, -2))) / max(n * (n - 1), 1)
    rows = res.abs() / res.abs().sum(-1, keepdim=True).clamp_min(tiny)
    return res, columns, between.mean(), torch.special.entr(rows).sum(-1).mean()
