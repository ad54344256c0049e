"""``StreamChain``: streams on their way through many sites, one pass over them between two sub-layers.

    chain = StreamChain(x)                       # x […, n, C]
    for site, sublayer in zip(sites, sublayers):
        chain.leave(sublayer(chain.enter(site)))
    x = chain.streams()

``leave`` only notes the sub-layer's output; the next ``enter`` writes the new streams and reads them for its own maps in one
pass (``Merge.into``), and ``streams`` writes those that remain. The numbers are those of ``h, merge = site(x); x = merge(f)``.

``recompute=k`` keeps the streams of every k-th site alone (arXiv 2512.24880, Eq. 20). The backward pass makes the others again
from the kept ones, the sub-layers' outputs and the maps, which are kept in any case: post-mixes only, bit for bit those of the
forward pass. See recompute.py.
"""

from __future__ import annotations

import math

from torch import Tensor

from laneway.connections.layer import HyperConnection, Merge
from laneway.connections.recompute import Recomputation
from laneway.core import InputError, positive_int


def block_length(sites: int, streams: int) -> int:
    """The sites of a block that store and recompute least together: argmin of nC⌈L/k⌉ + (n + 2)C·k over k (Eq. 20).

    Raises:
        InputError: sites or streams < 1.
    """
    positive_int("sites", sites)
    n = positive_int("streams", streams)
    return min(range(1, sites + 1), key=lambda k: (n * math.ceil(sites / k) + (n + 2) * k, k))


class StreamChain:
    """Streams between sites.

    Args:
        x: the streams, […, n, C].
        recompute: sites whose streams are made again in the backward pass, k of them from one kept state; None keeps all.
            ``block_length`` gives the k that needs least memory. Only sites with Sinkhorn maps take part.

    Raises:
        InputError: recompute < 1, or calls in another order than enter, leave, enter, leave, …
    """

    def __init__(self, x: Tensor, recompute: int | None = None) -> None:
        self._x = x  # out of date between ``enter`` and ``streams``
        self._merge: Merge | None = None
        self._f: Tensor | None = None
        self._plan = None if recompute is None else Recomputation(positive_int("recompute", recompute))

    def enter(self, site: HyperConnection) -> Tensor:
        """The site's sub-layer input, […, C]."""
        if self._merge is not None and self._f is None:
            raise InputError("chain", "enter", "leave, with the output of the sub-layer that was entered")
        before, f = self._merge, self._f
        if before is None or f is None:
            h, self._merge = site(self._x if self._plan is None else self._plan.start(self._x))
        else:
            h, self._merge = before.into(site, f) if self._plan is None else site(self._plan.cross(before, f))
        self._x, self._f = self._merge.x, None
        return h

    def leave(self, f: Tensor) -> None:
        """The sub-layer's output, […, C]."""
        if self._merge is None or self._f is not None:
            raise InputError("chain", "leave", "enter, with the next site")
        if f.shape != self._merge.shape:
            raise InputError("f", list(f.shape), f"the sub-layer's output, {list(self._merge.shape)}")
        self._f = f

    def streams(self) -> Tensor:
        """The streams after the last site that was left, […, n, C]; the chain goes on from them."""
        if self._merge is not None:
            if self._f is None:
                raise InputError("chain", "streams", "leave, with the output of the sub-layer that was entered")
            self._x = self._merge(self._f) if self._plan is None else self._plan.leave(self._merge, self._f)
            self._merge, self._f = None, None
        return self._x

    @property
    def pre(self) -> Tensor | None:
        """H_pre of the site entered last, [N, n], until ``streams`` is called: a single-pass network reads out with it."""
        return None if self._merge is None else self._merge.pre
