"""A small convolutional network whose residual is a parameter: streams with the channels first, [b, n, c, y, x].

A stem, then stages of pre-norm blocks (norm, 3×3 convolution, GELU, 3×3 convolution), one site a block; every place of the
picture has maps of its own. Between stages one strided convolution, the same for every stream, halves the picture. It is affine,
so it keeps the start exact: streams X + d_i become D X + (D d_i without the bias), with reads that sum to one and cannot see d
(docs/start.md). ``residual="residual"`` or one stream is the plain network.

Shapes: b batch, k channels of the image, n streams, c width of the stage, y and x places, v classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneway.connections import expand_streams
from laneway.connections.channels import ChannelFirst, channels_first, channels_last
from laneway.core import InputError
from laneway.models.gpt import RMSNorm
from laneway.models.residuals import StreamConfig


@dataclass(frozen=True)
class ConvNetConfig(StreamConfig):
    """Shape of a convolutional network."""

    channels: int = 1
    """Channels of an image."""
    classes: int = 10
    """Classes."""
    widths: tuple[int, ...] = (32, 64)
    """Width C of one stream in each stage."""
    blocks: int = 2
    """Blocks of a stage; each holds one site."""

    def problems(self, prefix: str = "model") -> list[InputError]:
        """Everything that is wrong with this configuration, one error a field."""
        found = super().problems(prefix) + self._bad_integers(prefix, "channels", "classes", "blocks")
        if not self.widths or any(isinstance(w, bool) or not isinstance(w, int) or w < 1 for w in self.widths):
            found.append(InputError(f"{prefix}.widths", self.widths, "one integer ≥ 1 for each stage"))
        return found


class ChannelNorm(RMSNorm):
    """RMSNorm over the channels of every place of [b, c, y, x]."""

    def forward(self, x: Tensor) -> Tensor:
        """[b, c, y, x] → the same shape."""
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Block(nn.Module):
    """One site around norm, convolution, GELU, convolution."""

    def __init__(self, config: ConvNetConfig, width: int, index: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(width, eps=config.norm_eps)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.out = nn.Conv2d(width, width, 3, padding=1)
        self.site = ChannelFirst(config.site(width, index))
        with torch.no_grad():
            self.out.weight.mul_((len(config.widths) * config.blocks) ** -0.5)

    def forward(self, x_bncyx: Tensor) -> Tensor:
        """[b, n, c, y, x] → the same shape."""
        h_bcyx, merge = self.site(x_bncyx)
        return merge(self.out(F.gelu(self.conv(self.norm(h_bcyx)))))


class Shrink(nn.Module):
    """Between two stages: a convolution of stride 2 on every stream by itself."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 2, stride=2)

    def forward(self, x_bncyx: Tensor) -> Tensor:
        """[b, n, c, y, x] → [b, n, after, y/2, x/2]."""
        return self.conv(x_bncyx.flatten(0, 1)).unflatten(0, x_bncyx.shape[:2])


class ConvNet(nn.Module):
    """Images [b, k, y, x] → logits [b, v].

    Raises:
        InputError: a field of the configuration is out of range, or images have other channels or are too small to halve.
    """

    def __init__(self, config: ConvNetConfig) -> None:
        super().__init__()
        config.check()
        self.config = config
        self.stem = nn.Conv2d(config.channels, config.widths[0], 3, padding=1)
        layers: list[nn.Module] = []
        for stage, width in enumerate(config.widths):
            if stage:
                layers.append(Shrink(config.widths[stage - 1], width))
            layers += [Block(config, width, stage * config.blocks + index) for index in range(config.blocks)]
        self.layers = nn.Sequential(*layers)
        self.readout = config.readout(config.widths[-1])
        self.norm = RMSNorm(config.widths[-1], eps=config.norm_eps)
        self.head = nn.Linear(config.widths[-1], config.classes)

    def forward(self, images_bkyx: Tensor) -> Tensor:
        """[b, k, y, x] → [b, v]."""
        least = 2 ** (len(self.config.widths) - 1)
        shape = images_bkyx.shape
        if len(shape) != 4 or shape[1] != self.config.channels or min(shape[2:]) < least:
            accepted = f"[b, channels = {self.config.channels}, height, width], both at least {least}"
            raise InputError("images", list(shape), accepted)
        x_byxc = self.stem(images_bkyx).movedim(1, -1)
        if torch.is_autocast_enabled(x_byxc.device.type):  # narrow streams; maps stay fp32
            x_byxc = x_byxc.to(torch.get_autocast_dtype(x_byxc.device.type))
        x_byxnc = expand_streams(x_byxc, self.config.used_streams, spread=self.config.spread)
        x_bncyx = self.layers(channels_first(x_byxnc))
        return self.head(self.norm(self.readout(channels_last(x_bncyx))).mean((1, 2)))
