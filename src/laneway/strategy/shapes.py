"""The shape of a model of which only the size is known: a published one where there is one, else one in proportion."""

from __future__ import annotations

import math
from dataclasses import replace

from laneway.cluster.architecture import Architecture
from laneway.cluster.costs import parameters_of
from laneway.core import InputError

VOCAB = 51_200  # GPT-2's 50,257 tokens padded, as in Narayanan et al., arXiv 2104.04473

# (layers, hidden, heads), with where they are published.
GPT3 = "Brown et al., arXiv 2005.14165, table 2.1"
MEGATRON = "Narayanan et al., arXiv 2104.04473, table 1"
SELENE = "Korthikanti et al., arXiv 2205.05198, table 3"
PUBLISHED: tuple[tuple[int, int, int, str], ...] = (
    (12, 768, 12, GPT3), (24, 1024, 16, GPT3), (24, 1536, 16, GPT3), (24, 2048, 16, GPT3), (32, 2560, 32, GPT3),
    (32, 4096, 32, GPT3), (40, 5120, 40, GPT3), (96, 12288, 96, GPT3),
    (24, 2304, 24, MEGATRON), (30, 3072, 32, MEGATRON), (36, 4096, 32, MEGATRON), (40, 6144, 48, MEGATRON),
    (48, 8192, 64, MEGATRON), (60, 10240, 80, MEGATRON), (80, 12288, 96, MEGATRON), (96, 16384, 128, MEGATRON),
    (105, 20480, 128, MEGATRON), (128, 25600, 160, MEGATRON), (48, 6144, 64, SELENE),
)  # fmt: skip
CLOSE = 0.05  # a published shape within this part of the size is taken as it is
HEAD = 128


def architecture_for(parameters: float, streams: int = 1, vocab: int = VOCAB) -> tuple[Architecture, str]:
    """A GPT of about ``parameters`` parameters, and where its shape comes from.

    Raises:
        InputError: no shape comes near.
    """
    known = [(gpt(layers, hidden, heads, streams, vocab), source) for layers, hidden, heads, source in PUBLISHED]
    nearest, source = min(known, key=lambda each: abs(math.log(_size(each[0]) / parameters)))
    if abs(_size(nearest) / parameters - 1) <= CLOSE:
        return nearest, source
    return _in_proportion(parameters, nearest), f"in proportion to {source}"


def gpt(layers: int, hidden: int, heads: int, streams: int = 1, vocab: int = VOCAB) -> Architecture:
    """A GPT: feed-forward four times as wide as the streams, a tied read-out."""
    return Architecture(layers, hidden, heads, heads, 4 * hidden, vocab, gated=False, tied=True, streams=streams)


def _size(arch: Architecture) -> float:
    """Parameters of the plain model: connections are counted by the plan, not by the size that a person names."""
    return parameters_of(replace(arch, streams=1))


def _in_proportion(parameters: float, near: Architecture) -> Architecture:
    """Layers and width scaled alike (size grows with their product times the width, so by the cube root each)."""
    factor = (parameters / _size(near)) ** (1 / 3)
    unit = HEAD if near.hidden * factor >= 2 * HEAD else 32
    best: tuple[float, Architecture] | None = None
    for steps in range(-6, 7):
        hidden = max(unit, unit * (round(near.hidden * factor / unit) + steps))
        heads = hidden // unit
        room = parameters - near.vocab * hidden
        for layers in {max(1, round(room / (12 * hidden**2))), max(1, 4 * round(room / (48 * hidden**2)))}:
            shape = replace(near, layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden)
            off = abs(math.log(_size(shape) / parameters)) + 0.02 * abs(math.log(layers / (near.layers * factor)))
            if best is None or off < best[0]:
                best = off, shape
    if best is None or abs(_size(best[1]) / parameters - 1) > 0.25:
        accepted = f"a size of which the vocabulary of {near.vocab} leaves something for layers, or arch"
        raise InputError("model_size", parameters, accepted)
    return best[1]
