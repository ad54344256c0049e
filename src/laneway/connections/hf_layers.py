"""Forward passes of transformers' decoder layers around our sites: mixins that ``hf.py`` puts in front of the layers' classes.

transformers' sites return the maps and its layers do the mixing; ours do it themselves, so the layer's forward changes with
them. Everything else (norms, attention, experts, what is passed on) is as the original layer has it.

Shapes: b batch, t time, n streams, c width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from laneway.connections.layer import HyperConnection, Merge

if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object


def cross(merge: Callable[[Tensor], Tensor], f_btc: Tensor, site: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """From one site to the next: the streams after ``merge``, and what ``site`` reads of them.

    All that lies between two sub-layers goes through here: one pass over the streams where both sites are hyper-connections
    (under PEFT's ``modules_to_save`` a site is a wrapper).
    """
    if isinstance(merge, Merge) and isinstance(site, HyperConnection):
        return merge.into(site, f_btc)
    return site(merge(f_btc))


class Layer(_Module):
    """What all of them have: two sites, two norms, attention and a feed-forward part."""

    SITES = ("attn_hc", "ffn_hc")
    attn_hc: Any
    ffn_hc: Any
    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any


class DeepseekV4Layer(Layer):
    """DeepSeek-V4: the feed-forward part also sees the token ids (hash routing)."""

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        """[b, t, n, c] → the same."""
        h, merge = self.attn_hc(hidden_states)
        f, _ = self.self_attn(self.input_layernorm(h), **kwargs)
        h, merge = cross(merge, f, self.ffn_hc)
        return merge(self.mlp(self.post_attention_layernorm(h), input_ids=input_ids))


class IndexedLayer(Layer):
    """HY-V4, whose attention hands the chosen positions on to the next layer."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[b, t, n, c] → (the same, positions that attention chose)."""
        h, merge = self.attn_hc(hidden_states)
        f, chosen = self._attend(self.input_layernorm(h), *args, **kwargs)
        h, merge = cross(merge, f, self.ffn_hc)
        return merge(self.mlp(self.post_attention_layernorm(h))), chosen

    def _attend(
        self,
        h: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        prev_topk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        f, _, chosen = self.self_attn(
            hidden_states=h,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=_cache(cache, kwargs),
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            prev_topk_indices=prev_topk_indices,
            **kwargs,
        )
        return f, chosen


class Glm5NextLayer(IndexedLayer):
    """GLM-5: some layers have linear attention, which chooses no positions."""

    block_type: str

    def _attend(
        self,
        h: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        prev_topk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if self.block_type == "linear_attention":
            cache = _cache(cache, kwargs)
            return self.self_attn(hidden_states=h, cache=cache, attention_mask=attention_mask, **kwargs), None
        return super()._attend(
            h, attention_mask, position_ids, cache, use_cache, position_embeddings, prev_topk_indices, **kwargs
        )


def _cache(cache: Any, kwargs: dict[str, Any]) -> Any:
    """The cache under its present name, or under its old one."""
    old = kwargs.pop("past_key_values", None)
    return old if cache is None else cache
