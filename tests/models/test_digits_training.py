"""Small networks on real images: they learn, and a question about an image needs both."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import laneway as lw
from laneway.data.digits import CONTEXT, QUESTIONS, WORDS, ask, ask_all, best_alone, load_digits
from laneway.models.convnet import ConvNet, ConvNetConfig
from laneway.models.multimodal import ImageTextConfig, ImageTextModel
from laneway.models.vit import ViT, ViTConfig


@pytest.fixture(scope="module")
def halves(one_thread):
    pytest.importorskip("sklearn", reason="scikit-learn is missing: pip install 'laneway[vision]'")
    return load_digits()


def train(model, draw, steps: int, lr: float) -> list[float]:
    """Train on batches (inputs, targets) that ``draw`` makes with a generator; returns the losses."""
    optimizer = torch.optim.AdamW(lw.param_groups(model), lr=lr, fused=True)
    generator, losses = torch.Generator().manual_seed(1), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 10) * (1 - 0.9 * step / steps)
        inputs, targets = draw(generator)
        loss = F.cross_entropy(model(*inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def images(digits, generator, batch=32):
    picks = torch.randint(len(digits), (batch,), generator=generator)
    return (digits.images[picks],), digits.labels[picks]


def questions(digits, generator, batch=64):
    picks, which = (torch.randint(high, (batch,), generator=generator) for high in (len(digits), len(QUESTIONS)))
    asked = ask(digits, picks, which)
    return (asked.images, asked.words), asked.answers


@torch.no_grad()
def accuracy(model, inputs, targets) -> float:
    return (model(*inputs).argmax(1) == targets).float().mean().item()


@pytest.mark.parametrize("residual", ["residual", "mhc"])
@pytest.mark.parametrize(
    ("model", "config", "lr"),
    [
        (ViT, partial(ViTConfig, dim=32, layers=2, heads=2, patch=4), 4e-3),
        (ConvNet, partial(ConvNetConfig, widths=(8, 16), blocks=1), 8e-3),
    ],
    ids=["vit", "convnet"],
)
def test_images_are_learnt(model, config, lr, residual, halves):
    torch.manual_seed(0)
    network = model(config(residual=residual))
    losses = train(network, partial(images, halves[0]), 60, lr)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert accuracy(network, (halves[1].images,), halves[1].labels) > 0.7


def test_an_answer_needs_image_and_text(halves):
    """Better than any function of one input alone, and no better than those where one of the two is taken away."""
    torch.manual_seed(2)
    config = ImageTextConfig(dim=32, layers=2, heads=2, patch=4, init_std=0.25, vocab_size=len(WORDS), context=CONTEXT)
    model = ImageTextModel(config)
    losses = train(model, partial(questions, halves[0]), 150, 5e-3)
    assert sum(losses[-10:]) < 0.85 * sum(losses[:10])
    held_out, alone = ask_all(halves[1]), best_alone(halves[1])
    assert accuracy(model, (held_out.images, held_out.words), held_out.answers) > max(alone.values()) + 0.1
    for inputs in (
        (torch.zeros_like(held_out.images), held_out.words),
        (held_out.images, torch.zeros_like(held_out.words)),
    ):
        assert accuracy(model, inputs, held_out.answers) <= max(alone.values()) + 1e-6
