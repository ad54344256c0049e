"""The four training steps whose traces are recorded: a GPT, a mixture of experts, a long context, a residual convnet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneway.bench.policy_traces import Workload, record
from laneway.bench.threads import using_threads
from laneway.data.sources import STDLIB, find_sources
from laneway.memory.allocator import keep_freed_memory
from laneway.models.convnet import ConvNet, ConvNetConfig
from laneway.models.gpt import GPT, GPTConfig, RMSNorm

Batch = tuple[Tensor, Tensor]


def text(count: int) -> Tensor:
    """The first ``count`` bytes of Python's own library sources, file after file, as int64."""
    found = bytearray()
    for piece in find_sources(STDLIB).pieces(1 << 16):
        found += piece.text.encode()
        if len(found) >= count:
            break
    return torch.frombuffer(found[:count], dtype=torch.uint8).long()


def _batches(count: int, batch: int, context: int) -> list[Batch]:
    """``count`` batches of consecutive text, [batch, context] each, with the targets one byte on."""
    data = text(count * batch * context + 1)
    inputs, targets = data[:-1].view(count, batch, context), data[1:].view(count, batch, context)
    return list(zip(inputs, targets, strict=True))


def _next_byte(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def gpt(dim: int = 384, layers: int = 8, context: int = 256, batch: int = 8, steps: int = 8) -> Workload:
    """A decoder over bytes."""
    torch.manual_seed(0)
    config = GPTConfig(residual="residual", dim=dim, heads=6, layers=layers, context=context)
    return Workload(GPT(config), _batches(steps, batch, context), _next_byte)


def long_context(dim: int = 256, layers: int = 3, context: int = 4096, steps: int = 8) -> Workload:
    """Few layers over one long sequence."""
    return gpt(dim - dim % 6, layers, context, 1, steps)


class Expert(nn.Module):
    """down(gelu(up(x))), both matrices in one parameter [2, hidden, c]."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, hidden, dim) * dim**-0.5)
        with torch.no_grad():
            self.weight[1] *= (dim / hidden) ** 0.5

    def forward(self, x_tc: Tensor) -> Tensor:
        """[tokens, c] → the same shape."""
        return F.gelu(x_tc @ self.weight[0].t()) @ self.weight[1]


class Mixture(nn.Module):
    """Top-k of E experts for every token, weighted by the router's softmax over the chosen (Shazeer et al., arXiv 1701.06538)."""

    def __init__(self, dim: int, hidden: int, experts: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(experts))

    def forward(self, x_tc: Tensor) -> Tensor:
        """[tokens, c] → the same shape; experts without a token do not run."""
        weights, chosen = self.router(x_tc).topk(self.top, dim=-1)
        weights = weights.softmax(-1)
        y_tc = torch.zeros_like(x_tc)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                y_tc = y_tc.index_add(0, token, expert(x_tc[token]) * weights[token, place, None])
        return y_tc


class MoELayer(nn.Module):
    """A mixture over the embedding and a causal mean of the bytes before, behind its norm."""

    def __init__(self, dim: int, hidden: int, experts: int, top: int) -> None:
        super().__init__()
        self.norm_mix, self.norm = RMSNorm(dim), RMSNorm(dim)
        self.mix = nn.Conv1d(dim, dim, 4, groups=1, bias=False)
        self.mixture = Mixture(dim, hidden, experts, top)

    def forward(self, x_tc: Tensor) -> Tensor:
        """[t, c] → [t, c]."""
        x_tc = x_tc + self.mix(F.pad(self.norm_mix(x_tc).t()[None], (3, 0)))[0].t()
        return x_tc + self.mixture(self.norm(x_tc))


class MoE(nn.Module):
    """Bytes [t] → logits [t, 256] through layers of experts."""

    def __init__(self, dim: int, hidden: int, layers: int, experts: int, top: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.layers = nn.ModuleList(MoELayer(dim, hidden, experts, top) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, 256, bias=False)

    def forward(self, tokens_t: Tensor) -> Tensor:
        """[t] → [t, 256]."""
        x_tc = self.embedding(tokens_t)
        for layer in self.layers:
            x_tc = layer(x_tc)
        return self.head(self.norm(x_tc))


def moe(
    dim: int = 128, hidden: int = 512, layers: int = 6, experts: int = 16, top: int = 2, tokens: int = 64, steps: int = 20
) -> Workload:
    """Sixteen experts a layer. The router is trained on text in its own order, so the experts in use change with the text."""
    state = _trained(dim, hidden, layers, experts, top, tokens)
    model = MoE(dim, hidden, layers, experts, top)
    model.load_state_dict(state)
    return Workload(model, _token_batches(tokens, TRAINED, steps), _next_token, lr=1e-3)


TRAINED = 160
"""Steps that the router is trained before the recording."""


@cache
def _trained(dim: int, hidden: int, layers: int, experts: int, top: int, tokens: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = MoE(dim, hidden, layers, experts, top)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0, fused=True)
    for batch in _token_batches(tokens, 0, TRAINED):
        _next_token(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _token_batches(tokens: int, start: int, count: int) -> list[Batch]:
    data = text((start + count) * tokens + 1)[start * tokens :]
    return list(zip(data[:-1].view(count, tokens), data[1:].view(count, tokens), strict=True))


def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def resnet(widths: Sequence[int] = (32, 64, 128), blocks: int = 3, size: int = 32, batch: int = 32, steps: int = 8) -> Workload:
    """A residual convnet on random pictures of ``size`` × ``size``."""
    torch.manual_seed(0)
    model = ConvNet(ConvNetConfig(residual="residual", widths=tuple(widths), blocks=blocks))
    batches = [(torch.randn(batch, 1, size, size), torch.randint(0, 10, (batch,))) for _ in range(steps)]
    return Workload(model, batches, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))


RECORDED: dict[str, tuple[Callable[[], Workload], int, int]] = {
    "gpt": (gpt, 1, 5),
    "moe": (moe, 1, 16),
    "long": (long_context, 1, 5),
    "resnet": (resnet, 1, 5),
}
"""Workload, steps before the recording, steps recorded."""


def record_all(folder: Path, progress: Callable[[str], None] = lambda line: None) -> None:
    """Record every workload on one thread into ``folder/NAME.json.gz``. Freed memory stays with the process meanwhile."""
    kept = keep_freed_memory()
    try:
        with using_threads(1):
            for name, (make, warm, steps) in RECORDED.items():
                progress(f"recording {name}: {steps} steps")
                record(name, make, warm=warm, steps=steps).save(folder / f"{name}.json.gz")
    finally:
        if kept:
            keep_freed_memory(False)
