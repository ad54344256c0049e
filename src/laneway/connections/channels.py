"""Streams with the channels before the places, [B, n, C, …places], as convolutions have them.

A site makes its maps from the n·C numbers of one place, and its ops want those together in memory: [..., n, C]. ``ChannelFirst``
is the same site behind a change of view. What it costs hangs on where the numbers lie, not on what the shape says:

    streams      lie as [B, …places, n, C] once they came from ``channels_first`` or a site: the change of view moves nothing
                 (contiguous [B, n, C, …places] are copied once on the way in: n·C numbers a place read and written)
    h            lies as [B, …places, C], which for two places is torch's ``channels_last`` memory format
    f            is copied once (C numbers a place) unless it lies so too, as what a convolution makes of a channels_last h does

Shapes: B batch, n streams, C width, places: any number of dims (length; height, width; …).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from laneway.connections.layer import HyperConnection
from laneway.core import InputError


def channels_last(x: Tensor) -> Tensor:
    """Streams [B, n, C, …places] → [B, …places, n, C], a view."""
    return x.movedim((1, 2), (-2, -1))


def channels_first(x: Tensor) -> Tensor:
    """Streams [B, …places, n, C] → [B, n, C, …places], a view."""
    return x.movedim((-2, -1), (1, 2))


class ChannelFirst(nn.Module):
    """A ``HyperConnection`` for streams [B, n, C, …places]: the same parameters, the same function, bit for bit.

    ``h, merge = ChannelFirst(site)(x)`` gives h [B, C, …places], the input of a convolution, and ``merge(f)``, with f of that
    shape, gives the new streams [B, n, C, …places]. Every place has maps of its own, as a token has.
    """

    def __init__(self, site: HyperConnection) -> None:
        super().__init__()
        self.site = site

    def forward(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Streams [B, n, C, …places] → (h [B, C, …places], merge).

        Raises:
            InputError: x has fewer than three dims, or others than [B, streams, dim, …].
        """
        if x.ndim < 3 or x.shape[1:3] != (self.site.streams, self.site.dim):
            raise InputError("x", list(x.shape), f"[B, streams = {self.site.streams}, dim = {self.site.dim}, …places]")
        h, merge = self.site(channels_last(x))
        shape = h.movedim(-1, 1).shape

        def merge_first(f: Tensor) -> Tensor:
            if f.shape != shape:
                raise InputError("f", list(f.shape), f"the sub-layer's output, {list(shape)}")
            return channels_first(merge(f.movedim(1, -1)))

        return h.movedim(-1, 1), merge_first
