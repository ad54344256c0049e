"""Sub-layers split over the tp axis by DTensor plans; streams, maps and norms stay whole on every rank.

A plan says for modules by name how their weights are split, as ``parallelize_module`` takes it. This package's GPT has one here;
transformers' models bring theirs (``tp_plan``). A sub-layer's input is the same on all ranks and so is its output (one all-reduce
forward, one backward), so each rank holds all n streams, and the maps' gradients come out whole and equal without communication.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from laneway.core import InputError
from laneway.models.gpt import GPT, Block
from laneway.strategy.stages import GPTStage

__all__ = ["SplitLinear", "apply_tensor_parallel", "tensor_parallel_plan"]

TRANSFORMERS_STYLES = ("colwise", "rowwise", "colwise_gather_output", "embedding_rowwise")


class SplitLinear(nn.ModuleList):
    """A projection whose weight is several side by side (q, k, v), as one Linear each: then every rank gets its part of each."""

    def __init__(self, fused: nn.Linear, rows: Sequence[int]) -> None:
        made = [nn.Linear(fused.in_features, each, fused.bias is not None, device="meta") for each in rows]
        super().__init__(made)
        for name, whole in fused.named_parameters(recurse=False):
            for part, piece in zip(made, whole.detach().split(list(rows)), strict=True):
                setattr(part, name, nn.Parameter(piece.clone(), requires_grad=whole.requires_grad))

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] → […, out], the parts side by side as the fused one has them."""
        return torch.cat([part(x) for part in self], dim=-1)


def tensor_parallel_plan(model: nn.Module, sequence: bool = False) -> dict[str, ParallelStyle]:
    """How the model's modules are split, by their names; with ``sequence``, tokens between the sub-layers too (GPT only).

    Raises:
        InputError: the model gives no plan, or one with a style that has no counterpart here.
    """
    if isinstance(model, GPT | GPTStage):
        return _gpt_plan(model, Shard(1) if sequence else Replicate())
    given: Any = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not given:
        accepted = "1, or a model that gives a plan: laneway's GPT, or a transformers model with a tp_plan"
        raise InputError("layout.tp", type(model).__name__, accepted)
    return _transformers_plan(model, dict(given))


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> nn.Module:
    """Split the model's sub-layers over a one-axis mesh, in place. Weights are taken from what each rank holds.

    Raises:
        InputError: no plan, or heads, widths or the vocabulary do not divide by the ranks.
    """
    ranks = mesh.size()
    _check_divides(model, ranks)
    for block in (module for module in model.modules() if isinstance(module, Block)):
        for owner, name, rows in _fused(block):
            setattr(owner, name, SplitLinear(getattr(owner, name), rows))
    tied = _tied(model)
    plan = tensor_parallel_plan(model, sequence)
    parallelize_module(model, mesh, plan, src_data_rank=None)
    if tied is not None:
        head, embedding = tied
        head.weight = embedding.weight
    return model


def _fused(block: Block) -> list[tuple[Any, str, tuple[int, ...]]]:
    """Projections that lie side by side in one weight: the module that has them, their name there, the rows of each."""
    attention: Any = block.attention
    ffn: Any = block.ffn
    kv_rows = getattr(attention, "kv_heads", attention.heads) * attention.head_dim
    found: list[tuple[Any, str, tuple[int, ...]]] = [(attention, "qkv", (attention.heads * attention.head_dim, kv_rows, kv_rows))]
    if hasattr(ffn, "gate_up"):
        found.append((ffn, "gate_up", (ffn.out.in_features,) * 2))
    return [each for each in found if isinstance(getattr(each[0], each[1]), nn.Linear)]


def _gpt_plan(model: GPT | GPTStage, between: Placement) -> dict[str, ParallelStyle]:
    """``between``: how tokens [b, t, …] lie between the sub-layers."""
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if not isinstance(module, Block):
            continue
        for sub in ("attention", "ffn"):
            for leaf, child in module.get_submodule(sub).named_children():
                plan |= _sub_layer(f"{name}.{sub}.{leaf}", child, leaf, between)
    if getattr(model, "embedding", None) is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if getattr(model, "head", None) is not None:
        plan["head"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    return plan


def _sub_layer(name: str, module: nn.Module, leaf: str, between: Placement) -> dict[str, ParallelStyle]:
    if leaf == "out":
        return {name: RowwiseParallel(output_layouts=between)}
    if not isinstance(module, SplitLinear):
        return {name: ColwiseParallel(input_layouts=between)}
    # One DTensor goes into all parts, so that their input gradients are added before the one reduction.
    whole = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    return {name: whole} | {f"{name}.{number}": ColwiseParallel() for number in range(len(module))}


def _transformers_plan(model: nn.Module, given: dict[str, str]) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    tied = _tied(model)
    for name, module in model.named_modules():
        style = next((style for pattern, style in given.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if style is None or (tied is not None and module in tied):  # a head that shares the embedding stays whole with it
            continue
        if style not in TRANSFORMERS_STYLES:
            raise InputError(
                "layout.tp", f"{name}: {style}", "1, or a model whose plan has only " + ", ".join(TRANSFORMERS_STYLES)
            )
        plan[name] = _style(style)
    return plan


def _style(name: str) -> ParallelStyle:
    if name == "rowwise":
        return RowwiseParallel()
    if name == "embedding_rowwise":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    return ColwiseParallel(output_layouts=Replicate()) if name == "colwise_gather_output" else ColwiseParallel()


def _tied(model: Any) -> tuple[Any, Any] | None:
    """The head and the embedding, where they share their weight."""
    if isinstance(model, GPT | GPTStage):
        head, embedding = model.head, model.embedding
    elif hasattr(model, "get_output_embeddings"):
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    else:
        return None
    if head is None or embedding is None or head.weight is not embedding.weight:
        return None
    return head, embedding


def _check_divides(model: Any, ranks: int) -> None:
    config = model.config
    sizes = {name: getattr(config, name, None) for name in ("heads", "num_attention_heads", "num_key_value_heads", "vocab_size")}
    sizes |= {"hidden": getattr(config, "hidden", None), "intermediate_size": getattr(config, "intermediate_size", None)}
    for block in (module for module in model.modules() if isinstance(module, Block)):
        sizes["hidden"] = block.ffn.out.in_features
        sizes["kv_heads"] = getattr(block.attention, "kv_heads", None)
    for name, size in sizes.items():
        if isinstance(size, int) and size % ranks:
            raise InputError("layout.tp", ranks, f"a divisor of the model's {name} = {size}")
