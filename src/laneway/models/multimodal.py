"""Images and text in one sequence, through one trunk: what a question about an image needs.

An answer token, the patches of the image and the words of the question stand side by side; they share the streams, the sites and
all weights of the encoder, and differ in their embedding alone. The answer is read at the answer token.

Shapes: b batch, k channels, s height and width, p patches, w words, t = 1 + p + w places, c width, v answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laneway.core import InputError
from laneway.models.encoder import Encoder
from laneway.models.vit import PatchEmbedding, ViTConfig

PADDING = 0  # the token that fills a short text up; no place reads it


@dataclass(frozen=True)
class ImageTextConfig(ViTConfig):
    """Shape of a model for an image with a text; ``classes`` are the answers."""

    vocab_size: int = 16
    """Number of tokens of the text, with the padding (0)."""
    context: int = 8
    """Tokens of a text, padding included."""
    classes: int = 2
    """Answers."""

    def problems(self, prefix: str = "model") -> list[InputError]:
        """Everything that is wrong with this configuration, one error a field."""
        return super().problems(prefix) + self._bad_integers(prefix, "vocab_size", "context")


class ImageTextModel(nn.Module):
    """Images [b, k, s, s] and texts [b, w] → logits of the answers [b, v].

    Raises:
        InputError: a field of the configuration is out of range, or images or texts have another shape.
    """

    def __init__(self, config: ImageTextConfig) -> None:
        super().__init__()
        config.check()
        self.config = config
        self.patches = PatchEmbedding(config)
        self.words = nn.Embedding(config.vocab_size, config.dim)
        nn.init.normal_(self.words.weight, std=config.std)
        self.position = nn.Parameter(config.std * torch.randn(config.context, config.dim))
        self.answer = nn.Parameter(config.std * torch.randn(config.dim))
        self.trunk = Encoder(config)
        self.head = nn.Linear(config.dim, config.classes)

    def forward(self, images_bkss: Tensor, words_bw: Tensor) -> Tensor:
        """[b, k, s, s], [b, w] → [b, v]."""
        wanted = [len(images_bkss), self.config.context]
        if list(words_bw.shape) != wanted:
            raise InputError("words", list(words_bw.shape), f"{wanted}: a text for each image, padded with {PADDING}")
        image_bpc, text_bwc = self.patches(images_bkss), self.words(words_bw) + self.position
        answer_b1c = self.answer.expand(len(images_bkss), 1, -1)
        sequence_btc = torch.cat([answer_b1c, image_bpc, text_bwc], dim=1)
        always = torch.ones(len(images_bkss), 1 + image_bpc.shape[1], dtype=torch.bool, device=words_bw.device)
        valid_bt = torch.cat([always, words_bw != PADDING], dim=1)
        return self.head(self.trunk(sequence_btc, valid_bt)[:, 0])
