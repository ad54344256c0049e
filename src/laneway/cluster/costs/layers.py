"""What one layer, the read-out and the optimizer cost a device: kernels with their matrix products and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, hypot

from laneway.cluster.architecture import Architecture
from laneway.cluster.costs.calibration import Calibration
from laneway.cluster.costs.matmul import Machine, matmul_seconds
from laneway.cluster.costs.sizes import SITES, head_size

__all__ = ["Part", "Work", "beside_host", "layer_work", "optimizer_seconds", "readout_work"]

KERNELS = {"attention": 14, "feed_forward": 10, "site": 4, "expert": 8}
"""Kernels dispatched in a forward pass: counted in Megatron-LM's ParallelTransformerLayer with its fused kernels."""
OPTIMIZER_BYTES = 34
"""Bytes a parameter that mixed-precision Adam moves: gradient read twice, master, m and v read and written, weight written."""


@dataclass(frozen=True)
class Part:
    """Seconds of one pass over one micro-batch: device time forward and backward, and the host's dispatch forward."""

    forward: float
    backward: float
    dispatch: float

    def __add__(self, other: Part) -> Part:
        return Part(self.forward + other.forward, self.backward + other.backward, self.dispatch + other.dispatch)

    def seconds(self, waits: float = 0.0) -> tuple[float, float]:
        """Forward and backward with the host beside: backward dispatches twice the kernels. `waits`: communication in each."""
        return beside_host(self.forward, self.dispatch, waits), beside_host(self.backward, 2 * self.dispatch, waits)


def beside_host(device: float, dispatch: float, waits: float = 0.0) -> float:
    """Seconds of compute that take `device` on the device while the host needs `dispatch` to start them.

    Neither hides the other wholly, as kernels differ in length: the root of the sum of squares lies between the longer one and
    the sum. It follows the published single-node times from the dispatch-bound sizes to the compute-bound ones.
    """
    return hypot(device + waits, dispatch) - waits


@dataclass(frozen=True)
class Work:
    """One layer on one device: its whole, attention's inner part that selective recomputation runs again, and of the whole the
    seconds of the products that give gradients of weights split by columns, beside which their inputs' gradients can be summed.
    """

    whole: Part
    inner: Part
    column_gradients: float


@dataclass(frozen=True)
class Share:
    """How a layer is divided: a device's sequences and tokens, and the degrees that split widths."""

    sequences: int
    seq_len: int
    tp: int
    cp: int
    ep: int
    sequence_parallel: bool

    @property
    def local_len(self) -> int:
        """Positions of a sequence on one context-parallel rank."""
        return ceil(self.seq_len / self.cp)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.sequences * self.local_len

    @property
    def norm_tokens(self) -> int:
        """Tokens that norms and residuals work on."""
        return ceil(self.tokens / self.tp) if self.sequence_parallel else self.tokens


def _products(shapes: list[tuple[int, int, int, int]], machine: Machine, *, wide: bool = False) -> tuple[float, float]:
    """Forward and backward of products (m, n, k, batch): backward is one product for each operand's gradient."""
    forward = backward = 0.0
    for m, n, k, batch in shapes:
        forward += matmul_seconds(m, n, k, machine, batch=batch, wide=wide)
        backward += matmul_seconds(m, k, n, machine, batch=batch, wide=wide)
        backward += matmul_seconds(k, n, m, machine, batch=batch, wide=wide)
    return forward, backward


def _passes(nbytes: float, kernels: int, machine: Machine) -> tuple[float, float]:
    """Elementwise kernels: forward, and backward with twice the bytes."""
    forward = machine.elementwise_factor * nbytes / machine.bandwidth + kernels * machine.kernel_s
    return forward, 2 * forward


def _part(products: tuple[float, float], passes: tuple[float, float], kernels: int, calibration: Calibration) -> Part:
    return Part(products[0] + passes[0], products[1] + passes[1], kernels * calibration.dispatch_s)


@lru_cache(maxsize=16384)
def layer_work(arch: Architecture, share: Share, machine: Machine, calibration: Calibration) -> Work:
    """One transformer layer for one micro-batch (norms, attention, feed-forward or experts, connections)."""
    inner = _inner_attention(arch, share, machine, calibration)
    whole = inner + _projections(arch, share, machine, calibration) + _feed_forward(arch, share, machine, calibration)
    if arch.streams > 1:
        whole = whole + _connections(arch, share, machine, calibration)
    return Work(whole, inner, _column_gradients(arch, share, machine))


def _column_gradients(arch: Architecture, share: Share, machine: Machine) -> float:
    """Gradients of the weights of query, key and value, and of the feed-forward layer's inputs (experts: none)."""
    kv = max(1, arch.kv_heads * head_size(arch) // share.tp)
    widths = [arch.hidden // share.tp + 2 * kv]
    if not arch.experts:
        widths.append((2 if arch.gated else 1) * max(1, arch.ffn // share.tp))
    return sum(matmul_seconds(arch.hidden, width, share.tokens, machine) for width in widths)


def _inner_attention(arch: Architecture, share: Share, machine: Machine, calibration: Calibration) -> Part:
    heads, size = ceil(arch.heads / share.tp), head_size(arch)
    batch = share.sequences * heads
    if calibration.flash_attention:
        # Causality halves the products; backward has five of them for the forward pass's two (Dao 2023, FlashAttention-2).
        flops = 2.0 * batch * share.local_len * share.seq_len * size
        forward = flops / (machine.wide_flops * calibration.attention_fraction) + machine.kernel_s
        return Part(forward, 2.5 * forward, calibration.dispatch_s)
    products = _products(
        [(share.local_len, share.seq_len, size, batch), (share.local_len, size, share.seq_len, batch)], machine, wide=True
    )
    scores = batch * share.local_len * share.seq_len
    # Softmax with scale and mask reads and writes the scores, dropout too, and writes a mask of one byte.
    passes = _passes(scores * (4 * machine.element_bytes + 1), 2, machine)
    return _part(products, passes, 5, calibration)


def _projections(arch: Architecture, share: Share, machine: Machine, calibration: Calibration) -> Part:
    width = arch.hidden // share.tp
    kv = max(1, arch.kv_heads * head_size(arch) // share.tp)
    t, h, e = share.tokens, arch.hidden, machine.element_bytes
    products = _products([(t, width + 2 * kv, h, 1), (t, h, width, 1)], machine)
    # Norm: read, write. Bias, dropout, residual: two reads, a write, a mask. Heads moved: read and write of q, k, v and context.
    nbytes = share.norm_tokens * h * (5 * e + 1) + t * (width * 2 + kv * 2) * 2 * e
    return _part(products, _passes(nbytes, 5, machine), KERNELS["attention"] - 5, calibration)


def _feed_forward(arch: Architecture, share: Share, machine: Machine, calibration: Calibration) -> Part:
    t, h, e = share.tokens, arch.hidden, machine.element_bytes
    width = max(1, arch.ffn // share.tp)
    inputs = 2 if arch.gated else 1
    nbytes = share.norm_tokens * h * (5 * e + 1)
    if not arch.experts:
        products = _products([(t, inputs * width, h, 1), (t, h, width, 1)], machine)
        nbytes += t * width * (inputs + 1) * e
        return _part(products, _passes(nbytes, 4, machine), KERNELS["feed_forward"], calibration)
    here = max(1, arch.experts // share.ep)
    rows = max(1, ceil(t * arch.experts_per_token / here))  # tokens that this device's experts get, evenly spread
    routed = t * arch.experts_per_token
    products = _products([(t, arch.experts, h, 1), (rows, inputs * width, h, here), (rows, h, width, here)], machine)
    nbytes += routed * width * (inputs + 1) * e + 4 * routed * h * e  # sorted and put back: two copies
    return _part(products, _passes(nbytes, 8, machine), KERNELS["feed_forward"] + KERNELS["expert"], calibration)


def _connections(arch: Architecture, share: Share, machine: Machine, calibration: Calibration) -> Part:
    """Hyper-connections of a layer, two sites.

    A fused site reads the streams once or twice and writes them once: (3n + 2)·C elements a token forward, twice that backward
    (the floor that `laneway bench layer` compares with). Its products: maps n·C × n(n + 2), read, mix and write of the streams.
    """
    n, t, h = arch.streams, share.norm_tokens, arch.hidden
    products = _products([(t, n * (n + 2), n * h, 1)], machine)
    passes = _passes(t * (3 * n + 2) * h * machine.element_bytes, KERNELS["site"] - 1, machine)
    site = _part(products, passes, KERNELS["site"], calibration)
    return Part(SITES * site.forward, SITES * site.backward, SITES * site.dispatch)


@lru_cache(maxsize=16384)
def readout_work(arch: Architecture, share: Share, machine: Machine, calibration: Calibration) -> Part:
    """Final norm, product with the vocabulary, and cross-entropy in fp32 (logits read and written twice)."""
    vocab = ceil(arch.vocab / share.tp)
    products = _products([(share.tokens, vocab, arch.hidden, 1)], machine, wide=True)
    nbytes = share.tokens * vocab * (machine.element_bytes + 12) + share.norm_tokens * arch.hidden * 2 * machine.element_bytes
    return _part(products, _passes(nbytes, 6, machine), 10, calibration)


def optimizer_seconds(parameters: float, machine: Machine) -> float:
    """One Adam step over the parameters whose states a device holds."""
    return parameters * OPTIMIZER_BYTES / machine.bandwidth
