"""Mistakes that people make with adapters, each a change of one stage of a fine-tune (``lora_run``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneway.bench.lora_run import IGNORED, Run
from laneway.connections.lora import adapters, add_lora, load_lora_state_dict, merge, unmerge
from laneway.connections.lora_layers import LoRAConnection, LoRALinear
from laneway.models.gpt import GPT, Attention, rotary_table, rotate

MIDDLE = 12  # the step of a mistake that happens in the middle of a run: between two checks


def _sites(model: GPT) -> list[Any]:
    return [site for block in model.blocks for site in (block.site_attention, block.site_ffn)]


def _data(parameter: Any, value: Tensor) -> None:
    parameter.data = value


def at(step: int, change: Callable[[Run], None]) -> Callable[[Run, int], None]:
    """``change`` before one step."""
    return lambda run, now: change(run) if now == step else None


# -- the base is loaded wrongly


def transpose_comb(model: GPT) -> None:
    """The n² rows of the mix laid out [out, in] instead of [in, out]."""
    n = model.streams
    for site in _sites(model):
        for parameter in (site.fn, site.base):
            rows = parameter.data[2 * n :]
            parameter.data[2 * n :] = rows.unflatten(0, (n, n)).transpose(0, 1).flatten(0, 1)


class Stretched(nn.Module):
    """A manifold whose result is multiplied: H_res off the manifold."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        """[N, m] → [N, n, n]."""
        return 1.05 * self.inner(h)


def off_manifold(model: GPT) -> None:
    """H_res is rescaled after Sinkhorn."""
    for site in _sites(model):
        site.res = Stretched(site.res)


def one_iteration(model: GPT) -> None:
    """Sinkhorn stops after one iteration."""
    for site in _sites(model):
        site.res.iterations = 1


def flip_scale(model: GPT) -> None:
    """The dynamic part of every map with the wrong sign."""
    for site in _sites(model):
        site.scale.data.neg_()


def narrow_maps(model: GPT) -> None:
    """Maps assigned in bf16."""
    for site in _sites(model):
        _data(site.fn, site.fn.data.bfloat16())


def round_maps(model: GPT) -> None:
    """Maps that went through a bf16 file and came back as fp32."""
    for site in _sites(model):
        _data(site.fn, site.fn.data.bfloat16().float())


def not_causal(model: GPT) -> None:
    """Attention that has lost its mask."""

    def forward(self: Attention, x: Tensor, rotary: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v)
        return self.out(y.transpose(1, 2).reshape(b, t, c))

    for block in model.blocks:
        attention: Any = block.attention
        attention.forward = MethodType(forward, attention)


def other_rotary(model: GPT) -> None:
    """Rotary angles of another base."""
    config = model.config
    model.rotary = rotary_table(config.context, config.dim // config.heads, 500_000.0)


def other_eps(model: GPT) -> None:
    """An epsilon of another library in every norm."""
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.eps = 1e-2


def swap_sites(model: GPT) -> None:
    """The two sites of each block exchanged."""
    for block in model.blocks:
        block.site_attention, block.site_ffn = block.site_ffn, block.site_attention


def shuffle_readout(model: GPT) -> None:
    """The read-out's weights in another order of streams."""
    model.readout.base.data = model.readout.base.data.roll(1)


def narrow_base(model: GPT) -> None:
    """Everything in bf16 but the maps."""
    model.to(torch.bfloat16)


# -- adapters are added wrongly


def on_head(run: Run) -> None:
    """By hand, past the check of targets: the head, whose matrix is the embedding."""
    add_lora(run.model, run.setting.targets, rank=run.setting.rank, alpha=run.setting.alpha)
    head: Any = run.model.head
    head.__class__ = LoRALinear
    head.adapt(run.setting.rank, run.setting.alpha, 0.0)


def with_peft(targets: list[str], parameters: list[str] | None = None) -> Callable[[Run], None]:
    """PEFT's adapters instead of laneway's."""

    def add(run: Run) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        s = run.setting
        config = LoraConfig(r=s.rank, lora_alpha=int(s.alpha), target_modules=targets, target_parameters=parameters)
        inject_adapter_in_model(config, run.model)

    return add


def random_b(run: Run) -> None:
    """B drawn like A instead of zero."""
    for layer in adapters(run.model).values():
        nn.init.kaiming_uniform_(layer.lora.B, a=math.sqrt(5))


def zero_a(run: Run) -> None:
    """A zero as well as B."""
    for layer in adapters(run.model).values():
        layer.lora.A.data.zero_()


def half_factors(run: Run) -> None:
    """Factors in fp16."""
    for layer in adapters(run.model).values():
        for factor in (layer.lora.A, layer.lora.B):
            _data(factor, factor.data.half())


class EvalOnly(LoRAConnection):
    """A map whose adapter takes part in eval mode only."""

    @property
    def fn(self) -> Tensor:  # pyrefly: ignore[bad-override]
        """φ, with its adapter in eval mode."""
        return self.original() if self.training or not self.lora.enabled else self.original() + self.lora.delta()


def eval_only(run: Run) -> None:
    """Maps' adapters that training does not see; they come from elsewhere, so B is not zero for long."""
    for layer in adapters(run.model).values():
        if isinstance(layer, LoRAConnection):
            layer.__class__ = EvalOnly


def nudge_maps(run: Run) -> None:
    """Maps' factors as another run left them."""
    for layer in adapters(run.model).values():
        if isinstance(layer, LoRAConnection):
            nn.init.normal_(layer.lora.B, std=0.02)


def always_dropout(run: Run) -> None:
    """Dropout that does not know of eval mode."""
    for layer in adapters(run.model).values():
        dropout = layer.lora.dropout
        dropout.forward = lambda x, p=dropout.p: F.dropout(x, p, training=True)  # pyrefly: ignore


def share_factors(run: Run) -> None:
    """Every block has the first block's adapters."""
    first: dict[str, nn.Module] = {}
    for name, layer in adapters(run.model).items():
        kind = name.split(".", 2)[-1]
        layer.lora = first.setdefault(kind, layer.lora)  # pyrefly: ignore[bad-assignment]


def untie(run: Run) -> None:
    """The head gets a copy of the embedding."""
    run.model.head.weight = nn.Parameter(run.model.head.weight.detach().clone(), requires_grad=False)


# -- adapters are loaded wrongly


def sliced(run: Run, state: dict[str, Tensor]) -> None:
    """Rank 8 into rank 4: A by its first rows, B by its last columns."""
    r = run.setting.rank
    cut = {"A": lambda t: t[:r], "B": lambda t: t[:, -r:], "alpha": lambda t: t}
    load_lora_state_dict(run.model, {key: cut[key.rpartition(".")[2]](value) for key, value in state.items()})


def shifted(run: Run, state: dict[str, Tensor]) -> None:
    """The adapters of block i in block i + 1."""
    count = len(run.model.blocks)
    moved = {}
    for key, value in state.items():
        _, index, rest = key.split(".", 2)
        moved[f"blocks.{(int(index) + 1) % count}.{rest}"] = value
    load_lora_state_dict(run.model, moved)


def swapped(run: Run, state: dict[str, Tensor]) -> None:
    """A as B and B as A, which fits where a layer is square."""
    load_lora_state_dict(run.model, {k: state[_other(k)].T if k[-1] in "AB" else v for k, v in state.items()})


def _other(key: str) -> str:
    return key[:-1] + ("B" if key.endswith("A") else "A")


def without_alpha(run: Run, state: dict[str, Tensor]) -> None:
    """A file without α: the loader's default counts."""
    own = {f"{name}.lora.alpha": layer.lora.alpha.clone() for name, layer in adapters(run.model).items()}
    load_lora_state_dict(run.model, state | own)


def half_of_it(run: Run, state: dict[str, Tensor]) -> None:
    """Names of every second layer don't fit, and a loader that is not strict says nothing."""
    for index, (name, layer) in enumerate(adapters(run.model).items()):
        if index % 2 == 0:
            layer.lora.load_state_dict({key: state[f"{name}.lora.{key}"] for key in ("A", "B", "alpha")})


# -- training goes wrong


def add_twice(run: Run) -> None:
    """Weights merged by hand, the adapters still at work."""
    for layer in adapters(run.model).values():
        layer.original().data.add_(layer.lora.delta().detach())


def subtract(run: Run) -> None:
    """An unmerge of what was never merged."""
    for layer in adapters(run.model).values():
        layer.original().data.sub_(layer.lora.delta().detach())


def thaw(run: Run) -> None:
    """Everything trains."""
    run.model.requires_grad_(True)


def ignore_all(step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """One batch in which no target counts: its mean loss is 0 / 0."""
    return inputs, torch.full_like(targets, IGNORED) if step == MIDDLE else targets


def unused(run: Run) -> torch.optim.Optimizer:
    """An optimizer that was made before the adapters were there."""
    adapted = {id(p) for layer in adapters(run.model).values() for p in layer.lora.parameters()}
    return run.adam([p for p in run.model.parameters() if id(p) not in adapted])


def renewed(run: Run) -> None:
    """Adapters made anew while the optimizer holds the old ones."""
    for layer in adapters(run.model).values():
        for key in ("A", "B"):
            setattr(layer.lora, key, nn.Parameter(getattr(layer.lora, key).detach().clone()))


def merge_and_back(run: Run) -> None:
    """What a healthy run may do for an export."""
    merge(run.model)
    run.validate()
    unmerge(run.model)
