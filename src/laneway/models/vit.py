"""A vision transformer for small images (Dosovitskiy et al., arXiv 2010.11929) whose residual is a parameter.

Patches → embedding + learned positions → the encoder, with hyper-connections at its sites → mean over the patches → classes.
``residual="residual"`` or one stream is the plain network.

Shapes: b batch, k channels of the image, s height and width, t patches, c width, v classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laneway.core import InputError
from laneway.models.encoder import Encoder, EncoderConfig


@dataclass(frozen=True)
class ViTConfig(EncoderConfig):
    """Shape of a vision transformer."""

    image_size: int = 8
    """Height and width of an image in pixels."""
    patch: int = 2
    """Height and width of a patch in pixels; divides the image's."""
    channels: int = 1
    """Channels of an image."""
    classes: int = 10
    """Classes."""

    def problems(self, prefix: str = "model") -> list[InputError]:
        """Everything that is wrong with this configuration, one error a field."""
        found = super().problems(prefix) + self._bad_integers(prefix, "image_size", "patch", "channels", "classes")
        if not found and self.image_size % self.patch:
            found.append(InputError(f"{prefix}.patch", self.patch, f"a divisor of image_size = {self.image_size}"))
        return found

    @property
    def patches(self) -> int:
        """Patches of one image."""
        return (self.image_size // self.patch) ** 2


class PatchEmbedding(nn.Module):
    """Images [b, k, s, s] → [b, t, c]: every patch by the same linear map, plus its place's own vector."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.shape, self.patch = (config.channels, config.image_size, config.image_size), config.patch
        self.project = nn.Linear(config.channels * config.patch**2, config.dim)
        self.position = nn.Parameter(config.std * torch.randn(config.patches, config.dim))

    def forward(self, images_bkss: Tensor) -> Tensor:
        """[b, k, s, s] → [b, t, c]; raises InputError for images of another shape."""
        if images_bkss.shape[1:] != self.shape:
            raise InputError("images", list(images_bkss.shape), f"[b, {', '.join(map(str, self.shape))}]")
        p = self.patch
        grid = images_bkss.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # [b, k, rows, p, columns, p]
        patches_btk = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return self.project(patches_btk) + self.position


class ViT(nn.Module):
    """Images [b, k, s, s] → logits [b, v].

    Raises:
        InputError: a field of the configuration is out of range, or images have another shape.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        config.check()
        self.config = config
        self.embedding = PatchEmbedding(config)
        self.trunk = Encoder(config)
        self.head = nn.Linear(config.dim, config.classes)

    def forward(self, images_bkss: Tensor) -> Tensor:
        """[b, k, s, s] → [b, v]."""
        return self.head(self.trunk(self.embedding(images_bkss)).mean(1))
