"""Controls on every model that has sites: text, images, both, on each manifold."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from control_steps import steps_and_removal
from laneway.connections.controls import CONTROLS, build
from laneway.connections.layer import HyperConnection
from laneway.core import InputError
from laneway.models.convnet import ConvNet, ConvNetConfig
from laneway.models.gpt import GPT, GPTConfig
from laneway.models.multimodal import ImageTextConfig, ImageTextModel
from laneway.models.vit import ViT, ViTConfig

SMALL = {"dim": 16, "layers": 2, "heads": 2}
MODELS = {
    "vit": (ViT, ViTConfig(**SMALL), (torch.float32, (3, 1, 8, 8))),
    "convnet": (ConvNet, ConvNetConfig(widths=(8, 12), blocks=1), (torch.float32, (3, 1, 8, 8))),
    "image and text": (ImageTextModel, ImageTextConfig(**SMALL, patch=4, vocab_size=13, context=6), (torch.int64, (3, 6))),
}
GPTS = {"mhc": 2, "kronecker": 4, "orthogonal": 4, "hc": 3}


def moved(model: nn.Module) -> nn.Module:
    """Away from the start, where streams are all alike to a control."""
    for module in model.modules():
        if isinstance(module, HyperConnection):
            nn.init.normal_(module.fn, std=0.1)
    return model


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_images_takes_a_control_and_gives_it_back(kind, name):
    cls, config, (dtype, shape) = MODELS[kind]
    torch.manual_seed(1)
    model = moved(cls(config))
    inputs = (torch.rand(3, 1, 8, 8), torch.randint(13, shape)) if dtype is torch.int64 else (torch.rand(shape),)
    target = torch.arange(3) % 2
    steps_and_removal(model, name, lambda: model(*inputs), lambda: F.cross_entropy(model(*inputs), target))


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("residual", GPTS)
def test_every_residual_takes_a_control_and_gives_it_back(residual, name):
    torch.manual_seed(1)
    config = GPTConfig(vocab_size=31, context=12, layers=1, heads=2, dim=16, residual=residual, streams=GPTS[residual])
    model, tokens = moved(GPT(config)), torch.randint(31, (3, 12))
    if (residual, name) == ("orthogonal", "curvature-res"):
        with pytest.raises(InputError, match="orthogonal"):
            build(name, model)
        return
    steps_and_removal(
        model, name, lambda: model(tokens), lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten().roll(-1))
    )
