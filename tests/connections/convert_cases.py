"""Small random transformers of every family that ``convert`` knows, and what to feed them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.24", reason="needs transformers 5.24")

VOCABULARY, WIDTH, LAYERS, LENGTH = 61, 32, 3, 12
_TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# Wide weights: sub-layers whose outputs matter beside the embedding, as in a trained network.
_COMMON = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "initializer_range": 0.2}
_LLAMA = {**_TEXT, **_COMMON, "intermediate_size": 48, "num_key_value_heads": 2}
_NEOX = {**_TEXT, **_COMMON, "intermediate_size": 48, "hidden_dropout": 0.1, "attention_dropout": 0.1}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "llama-tied": ("LlamaForCausalLM", {**_LLAMA, "tie_word_embeddings": True, "attention_dropout": 0.1}),
    "mistral": ("MistralForCausalLM", {**_LLAMA, "sliding_window": 5, "head_dim": 8}),
    "qwen2": ("Qwen2ForCausalLM", {**_LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", {**_LLAMA, "head_dim": 16}),
    "gpt2": ("GPT2LMHeadModel", {**_TEXT, **_COMMON, "max_position_embeddings": 64}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_NEOX, "use_parallel_residual": True}),
    "gpt_neox-sequential": ("GPTNeoXForCausalLM", {**_NEOX, "use_parallel_residual": False}),
    "vit": (
        "ViTForImageClassification",
        {**_COMMON, "intermediate_size": 48, "image_size": 12, "patch_size": 4, "num_labels": 7, "hidden_dropout_prob": 0.1},
    ),
}
WRITERS = [kind for kind in KINDS if kind != "vit"]
ONE_EACH = ("llama", "gpt2", "gpt_neox", "vit")  # one of each forward in families.py


def plain(kind: str, **changes: Any) -> Any:
    """A fresh random model in eval mode."""
    name, options = KINDS[kind]
    cls = getattr(transformers, name)
    return cls(cls.config_class(**{**options, **changes})).eval()


def batch(kind: str, rows: int = 2) -> dict[str, Tensor]:
    """Fresh inputs; the last row of tokens is padded on the left."""
    if kind == "vit":
        return {"pixel_values": torch.randn(rows, 3, 12, 12)}
    tokens, mask = torch.randint(3, VOCABULARY, (rows, LENGTH)), torch.ones(rows, LENGTH, dtype=torch.long)
    tokens[-1, :4], mask[-1, :4] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def loss_of(model: Any, kind: str, inputs: dict[str, Tensor]) -> Tensor:
    """The model's own loss: next tokens, or fixed classes."""
    if kind == "vit":
        return model(**inputs, labels=torch.arange(len(inputs["pixel_values"])) % 7).loss
    return model(**inputs, labels=inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)).loss


def maps_of(model: Any) -> dict[str, Any]:
    """Sites and read-out by name."""
    from laneway.connections.parameters import WideParameters

    return {name: module for name, module in model.named_modules() if isinstance(module, WideParameters)}


@torch.no_grad()
def move_maps(model: Any) -> Any:
    """All maps far from their start: random projections, biases and scales; returns the model."""
    for module in maps_of(model).values():
        module.fn.normal_(std=module.fn.shape[1] ** -0.5)
        module.base.add_(torch.randn_like(module.base))
        module.scale.uniform_(0.5, 1.5)
    return model
