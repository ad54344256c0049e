"""The plain transformers that ``convert`` knows: where their layers are, and each layer's forward with sites in it.

A family's forward composes the layer's own sub-modules as transformers does, with a site in the place of every residual
addition: ``h, merge = site(x)`` takes the sub-layer's input out of the streams x [B, T, n, C], ``merge(f)`` puts its output in.
Everything else (cache, masks, positions, attention implementation, dropout) stays inside sub-modules that are not touched.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from laneway.core import InputError, nearest

TWO_SITES = ("site_attention", "site_ffn")
ONE_SITE = ("site_parallel",)


def _llama(self: Any, hidden_states: Tensor, **inputs: Any) -> Tensor:
    """Llama, Mistral, Qwen2, Qwen3: streams [B, T, n, C] → the same."""
    h, merge = self.site_attention(hidden_states)
    f, _ = self.self_attn(hidden_states=self.input_layernorm(h), **inputs)
    hidden_states = merge(f)
    h, merge = self.site_ffn(hidden_states)
    return merge(self.mlp(self.post_attention_layernorm(h)))


def _gpt2(
    self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None, **inputs: Any,
) -> Tensor:  # fmt: skip
    """GPT-2 without cross-attention: streams [B, T, n, C] → the same."""
    if encoder_hidden_states is not None or encoder_attention_mask is not None:
        raise InputError("encoder_hidden_states", "a tensor", "None", "a converted GPT-2 has no cross-attention")
    h, merge = self.site_attention(hidden_states)
    f, _ = self.attn(self.ln_1(h), cache=cache, attention_mask=attention_mask, **inputs)
    hidden_states = merge(f)
    h, merge = self.site_ffn(hidden_states)
    return merge(self.mlp(self.ln_2(h)))


def _gpt_neox(self: Any, hidden_states: Tensor, **inputs: Any) -> Tensor:
    """GPT-NeoX: streams [B, T, n, C] → the same. Parallel: attention and MLP read one input, and their sum is written once."""

    def attention(h: Tensor) -> Tensor:
        return self.post_attention_dropout(self.attention(self.input_layernorm(h), **inputs)[0])

    def mlp(h: Tensor) -> Tensor:
        return self.post_mlp_dropout(self.mlp(self.post_attention_layernorm(h)))

    if self.use_parallel_residual:
        h, merge = self.site_parallel(hidden_states)
        f = attention(h)
        return merge(mlp(h) + f)
    h, merge = self.site_attention(hidden_states)
    hidden_states = merge(attention(h))
    h, merge = self.site_ffn(hidden_states)
    return merge(mlp(h))


def _vit(self: Any, hidden_states: Tensor, attention_mask: Any = None, **inputs: Any) -> Tensor:
    """ViT: streams [B, patches, n, C] → the same."""
    h, merge = self.site_attention(hidden_states)
    f, _ = self.attention(self.layernorm_before(h), attention_mask, **inputs)
    hidden_states = merge(self.dropout(f))
    h, merge = self.site_ffn(hidden_states)
    return merge(self.dropout(self.mlp(self.layernorm_after(h))))


@dataclass(frozen=True)
class Family:
    """One model type of transformers.

    Args:
        name: its folder in ``transformers.models``, and its ``config.model_type``.
        trunk, layer: class names in its modeling file.
        layers, norm: attributes of the trunk: the list of layers, and the norm behind the last.
        forward: a layer's forward over streams.
    """

    name: str
    trunk: str
    layer: str
    layers: str
    norm: str
    forward: Callable[..., Tensor]

    def type_of(self, name: str) -> type[nn.Module]:
        """A class of this family's modeling file."""
        return getattr(importlib.import_module(f"transformers.models.{self.name}.modeling_{self.name}"), name)

    def sites(self, config: Any) -> tuple[str, ...]:
        """Names of a layer's sites, in the order of its residual additions."""
        return ONE_SITE if getattr(config, "use_parallel_residual", False) else TWO_SITES


_LLAMA_LIKE = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_ALL = [Family(name, f"{title}Model", f"{title}DecoderLayer", "layers", "norm", _llama) for name, title in _LLAMA_LIKE.items()]
_ALL += [
    Family("gpt2", "GPT2Model", "GPT2Block", "h", "ln_f", _gpt2),
    Family("gpt_neox", "GPTNeoXModel", "GPTNeoXLayer", "layers", "final_layer_norm", _gpt_neox),
    Family("vit", "ViTModel", "ViTLayer", "layers", "layernorm", _vit),
]
FAMILIES = {family.name: family for family in _ALL}
ACCEPTED = f"a transformers model of one of the families {', '.join(FAMILIES)}"


def family_of(model: Any) -> tuple[Family, Any]:
    """The family of a transformers model, and its trunk (the module that holds embedding, layers and last norm).

    Raises:
        InputError: no transformers model, another family, or a class that replaces the family's trunk.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        hint = "it needs the package transformers: pip install 'laneway[hf]'"
        raise InputError("model", type(model).__name__, ACCEPTED, hint) from error
    if not isinstance(model, PreTrainedModel):
        hint = "pass the transformers model itself, before it is wrapped or compiled"
        raise InputError("model", type(model).__name__, ACCEPTED, hint)
    kind = model.config.model_type
    if kind not in FAMILIES:
        close = nearest(kind or "", FAMILIES)
        raise InputError("model", kind, ACCEPTED, f"{close!r} is another architecture" if close else None)
    family, trunk = FAMILIES[kind], model.base_model
    if type(trunk) is not family.type_of(family.trunk):
        raise InputError("model", type(trunk).__name__, f"{family.trunk} of transformers, unchanged, as the trunk")
    if getattr(model.config, "add_cross_attention", False):
        raise InputError("model.config.add_cross_attention", True, "False", "cross-attention is a third residual; it has no site")
    return family, trunk


class WideLayer:
    """Mixin of a layer whose residual is n streams; its class is made by ``wide_class``."""

    plain: type[nn.Module]
    """The class of transformers that it was and that ``unconvert`` makes it again."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deepcopy by the plain class: the class itself is made at run time, so no module holds its name."""
        family = next(family for family in _ALL if family.layer == type(self).plain.__name__)
        return _blank, (family.name,), self.__dict__


@functools.cache
def wide_class(family: Family) -> type[Any]:
    """The family's layer class over streams: a subclass, so that what looks for the plain class still finds it."""
    plain = family.type_of(family.layer)
    body = {"forward": family.forward, "plain": plain, "__module__": __name__}
    return type(f"Wide{plain.__name__}", (WideLayer, plain), body)


def _blank(name: str) -> Any:
    return object.__new__(wide_class(FAMILIES[name]))
