"""Text from a model: one token after another, from the last ``context`` tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from laneway.core import LanewayError


class NonfiniteLogitsError(LanewayError):
    """There is no distribution to draw from."""


def next_token(logits_v: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw one token; ``temperature`` 0 takes the likeliest, ``top_k`` 0 draws from all."""
    if not torch.isfinite(logits_v).all():
        raise NonfiniteLogitsError("the model's logits are not finite: it was not trained, or it diverged")
    if temperature == 0:
        return int(logits_v.argmax())
    logits_v = logits_v.float().cpu()  # drawn on the CPU: the same text from the same seed on any device
    logits_v = (logits_v - logits_v.max()) / temperature  # the likeliest stays 0 however small the temperature
    if 0 < top_k < logits_v.numel():
        threshold = logits_v.topk(top_k).values[-1]
        logits_v = logits_v.masked_fill(logits_v < threshold, float("-inf"))
    return int(torch.multinomial(logits_v.softmax(-1), 1, generator=generator))


def generate_tokens(
    model: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    *,
    max_tokens: int,
    context: int,
    vocabulary: int,
    device: torch.device,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> list[int]:
    """The tokens that follow ``prompt`` (not empty).

    Args:
        model: tokens [1, t] → logits [1, t, v]; called under the caller's own no-grad and autocast.
        prompt: the tokens to go on from; of a longer text the last ``context`` count.
        max_tokens: how many to write.
        context: longest sequence the model takes.
        vocabulary: tokens the tokenizer knows; a head that is wider is cut to them.
        device: where the model's weights are.
        temperature: divides the logits; 0 is greedy.
        top_k: draw from the likeliest ones only; 0 from all.
        seed: the same seed gives the same text.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(max_tokens):
        window_bt = torch.tensor([tokens[-context:]], device=device)
        tokens.append(next_token(model(window_bt)[0, -1, :vocabulary], temperature, top_k, generator))
    return tokens[len(prompt) :]
