"""Tiny models of transformers' real classes, and what is compared of them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCABULARY = 64


def deepseek_v4(**changes) -> nn.Module:
    """Three layers, all attention kinds; every expert is chosen, so that routing has no jumps."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "moe_intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 4, "head_dim": 16, "partial_rotary_factor": 0.5, "q_lora_rank": 16, "o_groups": 2,
        "o_lora_rank": 8, "n_routed_experts": 4, "num_experts_per_tok": 4, "n_shared_experts": 1, "sliding_window": 8,
        "index_n_heads": 2, "index_head_dim": 8, "index_topk": 64, "max_position_embeddings": 128,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    }  # fmt: skip
    return _live(DeepseekV4ForCausalLM(DeepseekV4Config(**(settings | changes))))


def glm5_next(**changes) -> nn.Module:
    """Three layers, linear and indexed attention, dense and sparse; the text part, with a vision tower of one block."""
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    text = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 16, "qk_nope_head_dim": 16,
        "index_topk": 64, "index_head_dim": 8, "index_n_heads": 2, "index_kpool": 4, "linear_head_dim": 16,
        "linear_num_heads": 2, "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "pad_token_id": 0, "max_position_embeddings": 128,
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16,
              "projection_intermediate_size": 16}  # fmt: skip
    config = Glm5NextConfig(text_config=text | changes, vision_config=vision)
    return _live(Glm5NextForConditionalGeneration(config))


def _hy_settings() -> dict:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 4,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "max_position_embeddings": 128, "indexer_types": ["full", "full", "shared"], "initializer_range": 0.02,
    }  # fmt: skip


def hy_v4(**changes) -> nn.Module:
    """Three layers, full and shared indexers, dense and sparse."""
    from transformers import HYV4Config, HYV4ForCausalLM

    return _live(HYV4ForCausalLM(HYV4Config(**(_hy_settings() | changes))))


def hy_v4_vl() -> nn.Module:
    """The same with a vision tower of one block."""
    from transformers import HYV4VLConfig, HYV4VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "out_hidden_size": 32}
    config = HYV4VLConfig(text_config=_hy_settings() | {"rope_parameters": rope}, vision_config=vision)
    return _live(HYV4VLForConditionalGeneration(config))


MODELS = {"deepseek_v4": deepseek_v4, "glm5_next": glm5_next, "hy_v4": hy_v4}


@torch.no_grad()
def _live(model: nn.Module) -> nn.Module:
    """Maps far from their start: asymmetric, different at every site."""
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1].removeprefix("hc_")
        if "_hc." not in name and "hc_head" not in name:
            continue
        if last == "fn":
            parameter.normal_(std=parameter.shape[1] ** -0.5)
        elif last == "base":
            parameter.normal_()
        else:
            parameter.uniform_(0.5, 1.5)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):  # zeros as made: every token to one expert
            buffer.copy_(torch.rand(buffer.shape).argsort(-1))
    return model


def tokens(batch: int = 2, time: int = 24) -> Tensor:
    """Random token ids that are no special tokens."""
    return torch.randint(4, VOCABULARY, (batch, time))


def results(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Logits, loss and the gradient of every parameter that has one."""
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    grads = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), "loss": out.loss.detach(), **grads}


class InFloat64(TorchFunctionMode):
    """Code that asks for fp32 gets float64: transformers' own code, run exactly."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        swap = {torch.float32: torch.float64}
        args = [swap.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
        kwargs = {k: swap.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def exact_results(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """``results`` of a float64 copy of the model, with every fp32 in transformers' code replaced by float64."""
    double = copy.deepcopy(model).double()
    double.set_experts_implementation("eager")  # grouped products have no float64
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            return results(double, ids)
    finally:
        torch.set_default_dtype(torch.float32)


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Relative root mean square error: of the logits, and of the gradients of each kind of parameter.

    Projections and all others: the mean over tensors. Biases and scales, a few numbers a site: of all their numbers together.
    """
    wrong = {name: (got[name].double() - true).square().sum().item() for name, true in want.items()}
    size = {name: true.square().sum().item() for name, true in want.items()}
    found = {}
    for kind in ("logits", "projections", "others"):
        names = [name for name in want if _kind(name) == kind and size[name]]
        found[kind] = (sum(wrong[name] / size[name] for name in names) / len(names)) ** 0.5
    small = [name for name in want if _kind(name) == "biases and scales"]
    found["biases and scales"] = (sum(wrong[name] for name in small) / sum(size[name] for name in small)) ** 0.5
    return found


def _kind(name: str) -> str:
    if name in ("logits", "loss"):
        return name
    if "_hc." not in name and "hc_head" not in name:
        return "others"
    return "projections" if name.endswith("fn") else "biases and scales"
