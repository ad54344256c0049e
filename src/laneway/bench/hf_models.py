"""Models of transformers' real classes, scaled down to a CPU: what ``laneway bench hf`` trains.

The ratios are those of the published ones (DeepSeek-V4-Flash, GLM-5.3-Flash, HY-V4): four streams, experts half as wide as the
model, low-rank queries; eight experts of which two work, fewer and narrower heads, and a small vocabulary.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from laneway.core import LanewayError

STREAMS = 4
VOCABULARY = 2048
HEAD = 64


def require_transformers() -> None:
    """Raise LanewayError where transformers is not installed, or has none of these models."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("transformers.models.hy_v4") is None:
        raise LanewayError("hf: transformers ≥ 5.24 is not installed (pip install 'laneway[hf]')")


def _deepseek_v4(dim: int, layers: int, streams: int) -> nn.Module:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    kinds = ["heavily_compressed_attention", "compressed_sparse_attention"]
    config = DeepseekV4Config(
        vocab_size=VOCABULARY, hidden_size=dim, moe_intermediate_size=dim // 2, num_hidden_layers=layers, hc_mult=streams,
        num_attention_heads=dim // HEAD, head_dim=HEAD, partial_rotary_factor=0.5, q_lora_rank=dim // 4, o_groups=2,
        o_lora_rank=dim // 4, n_routed_experts=8, num_experts_per_tok=2, index_n_heads=4, index_head_dim=32, index_topk=64,
        layer_types=[kinds[i % 2] for i in range(layers)], mlp_layer_types=["moe"] * layers,
    )  # fmt: skip
    return DeepseekV4ForCausalLM(config)


def _glm5_next(dim: int, layers: int, streams: int) -> nn.Module:
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    text = {
        "vocab_size": VOCABULARY, "hidden_size": dim, "intermediate_size": 3 * dim, "moe_intermediate_size": dim // 2,
        "num_hidden_layers": layers, "hc_mult": streams, "num_attention_heads": dim // HEAD,
        "num_key_value_heads": dim // HEAD, "n_routed_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": dim // 8,
        "q_lora_rank": dim // 4, "v_head_dim": HEAD, "qk_nope_head_dim": HEAD, "index_topk": 64, "index_head_dim": 32,
        "index_n_heads": 4, "linear_head_dim": HEAD, "linear_num_heads": dim // HEAD, "pad_token_id": 0,
        "mlp_layer_types": ["sparse"] * layers,
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": dim, "intermediate_size": 16,
              "projection_intermediate_size": 16}  # fmt: skip
    return Glm5NextForConditionalGeneration(Glm5NextConfig(text_config=text, vision_config=vision))


def _hy_v4(dim: int, layers: int, streams: int) -> nn.Module:
    from transformers import HYV4Config, HYV4ForCausalLM

    config = HYV4Config(
        vocab_size=VOCABULARY, hidden_size=dim, intermediate_size=3 * dim, moe_intermediate_size=dim // 2,
        num_hidden_layers=layers, hc_mult=streams, num_attention_heads=dim // HEAD, n_routed_experts=8, num_experts_per_tok=2,
        q_lora_rank=dim // 2, kv_lora_rank=dim // 4, qk_nope_head_dim=HEAD, qk_rope_head_dim=HEAD // 2, v_head_dim=HEAD,
        index_topk=64, index_head_dim=64, index_n_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        mlp_layer_types=["sparse"] * layers, initializer_range=0.02,
    )  # fmt: skip
    return HYV4ForCausalLM(config)


BUILDERS: dict[str, Callable[[int, int, int], Any]] = {"deepseek_v4": _deepseek_v4, "glm5_next": _glm5_next, "hy_v4": _hy_v4}


def build(name: str, dtype: torch.dtype, *, dim: int, layers: int, streams: int = STREAMS, seed: int = 0) -> Any:
    """A model for training, its parameters in the dtypes that transformers loads them in (maps fp32).

    Streams are made to differ: transformers' start (biases of zero) would leave them copies of each other.
    """
    torch.manual_seed(seed)
    model = BUILDERS[name](dim, layers, streams)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "_hc.base" in key:
                parameter.normal_()
    if dtype != torch.float32:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = type(model).from_pretrained(folder, dtype=dtype)
    return model.train()


def plain_residual(name: str, dtype: torch.dtype, **shape: Any) -> nn.Module:
    """The same model with one stream and x + f at every site."""
    from laneway.connections import HyperConnection
    from laneway.connections.hf import accelerate_hf
    from laneway.connections.hf_modules import IndependentSite

    model = accelerate_hf(build(name, dtype, streams=1, **shape))
    for module in model.modules():
        if isinstance(module, HyperConnection):
            module.disabled = True
        elif isinstance(module, IndependentSite):
            module.forward = _residual  # type: ignore[method-assign]
    return model


def _residual(x_btnc: torch.Tensor):
    return x_btnc.squeeze(-2), lambda f: x_btnc + f.unsqueeze(-2)
