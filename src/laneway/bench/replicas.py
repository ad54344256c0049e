"""Many runs of one configuration that differ in their seed, trained together on one core.

Each replica is a real model with its own AdamW. Only the forward and backward pass is shared: ``torch.func.vmap`` of the model's
own code over the replicas' parameters (``connections/batching.py`` has the ops' rules). No sum crosses replicas: a number that is
not finite stays in its run, and each goes on as it would alone, to float rounding.

All parameters of a replica lie in one row of ``flat`` [R, P], and their gradients in one row of ``grad``; the models' parameters,
the stacked ones and what the optimizers update are views of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import laneway.connections.batching  # noqa: F401  the ops' rules under vmap
from laneway.connections import HyperConnection, param_groups
from laneway.connections.control import StreamControl
from laneway.core import InputError
from laneway.models.gpt import GPT, Block
from laneway.train.config import OptimizerConfig
from laneway.train.step import token_loss


@dataclass(frozen=True)
class ReplicaStep:
    """What one step came to, one entry a replica.

    ``loss`` in nats per token; ``norm`` of the gradient before clipping; ``finite``: the parameters were updated;
    ``gain_forward`` and ``gain_backward``: composite gain of the training forward pass, 1 without maps.
    """

    loss: Tensor
    norm: Tensor
    finite: Tensor
    gain_forward: Tensor
    gain_backward: Tensor


def narrow_streams(model: GPT, dtype: torch.dtype) -> None:
    """Keep a model's streams in ``dtype`` from site to site while its sub-layers go on in fp32; nothing changes for fp32.

    The embedding and every sub-layer's output are rounded to it, and with them what each site writes; the norms read it widened.
    """
    if dtype == torch.float32:
        return
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    for module in (model.embedding, *(part for block in blocks for part in (block.attention, block.ffn))):
        module.register_forward_hook(lambda _, __, out: out.to(dtype))
    for module in (model.norm, *(norm for block in blocks for norm in (block.norm_attention, block.norm_ffn))):
        module.register_forward_pre_hook(lambda _, given: (given[0].float(), *given[1:]))


class GainWatch:
    """Collects H_res of the sites of one forward pass, and their composite gain as ``StreamProbe`` has it."""

    def __init__(self, model: nn.Module) -> None:
        self.product: Tensor | None = None
        for site in model.modules():
            if isinstance(site, HyperConnection) and not site.disabled:
                site.observers.append(self._see)

    def _see(self, site: HyperConnection, x: Tensor, res: Tensor) -> None:
        with torch.no_grad():
            self.product = res if self.product is None else res @ self.product

    def take(self, like: Tensor) -> Tensor:
        """Gain [2], forward and backward: mean over tokens of the largest |row sum| and |column sum|."""
        product, self.product = self.product, None
        if product is None:
            return torch.ones(2, device=like.device)
        return torch.stack([product.sum(dim).abs().amax(-1).mean() for dim in (-1, -2)])


class ControlNotes:
    """Tensors that controls of streams write beside their buffers (samples, decisions): stacked for a pass, then handed back.

    Each replica's control keeps its own tensors; what the template's controls wrote under vmap is copied into them. Those that
    take a gradient are ``meters``: nothing is written to them, and each replica's own is given its gradient.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        controls = [[m for m in model.modules() if isinstance(m, StreamControl)] for model in models]
        self.places = [
            (same, name)
            for same in zip(*controls, strict=True)
            for name, value in vars(same[0]).items()
            if isinstance(value, Tensor)
        ]
        self.meters: list[Tensor] = []

    def stacked(self) -> list[Tensor]:
        """One tensor [R, …] for each."""
        rows = [torch.stack([getattr(control, name).detach() for control in same]) for same, name in self.places]
        metered = [getattr(same[0], name).requires_grad for same, name in self.places]
        self.meters = [row.requires_grad_() for row, is_meter in zip(rows, metered, strict=True) if is_meter]
        return rows

    def credit(self, gradients: Sequence[Tensor]) -> None:
        """Give each replica's meters their rows of the gradients [R, …] of ``meters``."""
        metered = [(same, name) for same, name in self.places if getattr(same[0], name).requires_grad]
        for (same, name), rows in zip(metered, gradients, strict=True):
            for control, row in zip(same, rows, strict=True):
                meter = getattr(control, name)
                meter.grad = row.clone() if meter.grad is None else meter.grad + row

    def put(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Give the template's controls these, under vmap; returns what they had."""
        before = [getattr(same[0], name) for same, name in self.places]
        for (same, name), tensor in zip(self.places, tensors, strict=True):
            setattr(same[0], name, tensor)
        return before

    def take(self, before: Sequence[Tensor]) -> list[Tensor]:
        """What the template's controls have now; gives them back what they had."""
        return self.put(before)

    def hand_back(self, tensors: Sequence[Tensor]) -> None:
        """Copy the rows of tensors [R, …] to the replicas' controls."""
        for (same, name), rows in zip(self.places, tensors, strict=True):
            for control, row in zip(same, rows, strict=True):
                if not getattr(control, name).requires_grad:
                    getattr(control, name).copy_(row)


class Replicas:
    """R models of one shape that advance together.

    Args:
        models: R ≥ 1 models with parameters of the same names and shapes; they become views of the common rows.
        config: AdamW and clipping, for each replica its own.

    Raises:
        InputError: no model, or models of different shapes.
    """

    def __init__(self, models: Sequence[GPT], config: OptimizerConfig) -> None:
        if not models:
            raise InputError("models", 0, "one or more models")
        self.models, self.config = list(models), config
        self.decayed, names = _ordered(self.models[0], config.weight_decay)
        shapes = {name: p.shape for name, p in self.models[0].named_parameters()}
        for model in self.models:
            if {name: p.shape for name, p in model.named_parameters()} != shapes:
                raise InputError("models", type(model).__name__, "models of one shape")
        sizes = [shapes[name].numel() for name in names]
        self.flat = torch.empty(len(self.models), sum(sizes))
        self.grad = torch.zeros_like(self.flat)
        self.parameters: dict[str, Tensor] = {}
        self.gradients: list[Tensor] = []
        self.columns: dict[str, slice] = {}
        start = 0
        for name, size in zip(names, sizes, strict=True):
            self.columns[name] = slice(start, start + size)
            self._share(name, shapes[name])
            start += size
        self.buffers = self._stack_buffers()
        self.optimizers = [self._optimizer(row, grad) for row, grad in zip(self.flat, self.grad, strict=True)]
        self.watch, self.notes = GainWatch(self.models[0]), ControlNotes(self.models)

    def __len__(self) -> int:
        return len(self.models)

    def _share(self, name: str, shape: torch.Size) -> None:
        """Move one parameter of every model into the rows."""
        here = self.columns[name]
        rows, grads = (t[:, here].view(len(self), *shape) for t in (self.flat, self.grad))
        for row, grad, model in zip(rows, grads, self.models, strict=True):
            parameter = model.get_parameter(name)
            row.copy_(parameter.detach())
            parameter.data, parameter.grad = row, grad
        self.parameters[name] = rows.detach().requires_grad_()
        self.gradients.append(grads)

    def _stack_buffers(self) -> dict[str, Tensor]:
        """The models' buffers, stacked; each model then holds its own row, so that what a pass writes is seen there too."""
        stacked = {}
        for name, _ in self.models[0].named_buffers():
            rows = torch.stack([model.get_buffer(name) for model in self.models])
            for row, model in zip(rows, self.models, strict=True):
                path, _, leaf = name.rpartition(".")
                model.get_submodule(path)._buffers[leaf] = row
            stacked[name] = rows
        return stacked

    def _optimizer(self, row: Tensor, grad: Tensor) -> torch.optim.AdamW:
        """AdamW of one replica over its two groups, as ``laneway train`` makes it."""
        config, groups = self.config, []
        for part, decay in ((slice(0, self.decayed), config.weight_decay), (slice(self.decayed, None), 0.0)):
            if row[part].numel():
                parameter = nn.Parameter(row[part])
                parameter.grad = grad[part]
                groups.append({"params": [parameter], "weight_decay": decay})
        return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)

    def step(self, inputs: Tensor, targets: Tensor, lr: float, after_backward: Callable[[], None] = lambda: None) -> ReplicaStep:
        """One optimizer step of every replica: inputs and targets int64 [R, b, t]. One that is not finite changes nothing."""
        loss, gain = self._forward(inputs, targets)
        trained, meters = list(self.parameters.values()), self.notes.meters
        found = torch.autograd.grad(loss.sum(), [*trained, *meters], materialize_grads=True)
        torch._foreach_copy_(self.gradients, found[: len(trained)])
        self.notes.credit(found[len(trained) :])
        after_backward()
        norm = self.grad.norm(dim=1)
        loss = loss.detach()
        finite = loss.isfinite() & norm.isfinite()
        if self.config.clip_norm:
            self.grad.mul_((self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0)[:, None])
        for index in finite.nonzero().flatten().tolist():
            optimizer = self.optimizers[index]
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        return ReplicaStep(loss, norm, finite, *gain.unbind(1))

    @torch.no_grad()
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Loss [R] in nats per token of inputs and targets [R, b, t] or, the same for all, [b, t]; nothing is changed."""
        if inputs.ndim == 2:
            inputs, targets = (t.expand(len(self), *t.shape) for t in (inputs, targets))
        template = self.models[0]
        training = template.training
        template.eval()
        try:
            return self._forward(inputs, targets)[0]
        finally:
            template.train(training)

    def _forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no rule under vmap
            stacked = self.parameters, self.buffers, self.notes.stacked(), inputs, targets
            loss, gain, notes = vmap(self._one, randomness="different")(*stacked)
        self.notes.hand_back(notes)
        return loss, gain

    def _one(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], notes: list[Tensor], inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """One model's loss, gain, and what its controls noted."""
        before = self.notes.put(notes)
        try:
            logits = functional_call(self.models[0], (parameters, buffers), (inputs,))
        finally:
            noted = self.notes.take(before)
        return token_loss(logits, targets), self.watch.take(logits), noted


def _ordered(model: nn.Module, weight_decay: float) -> tuple[int, list[str]]:
    """Names of the parameters, those with weight decay first, and how many numbers these are."""
    decayed = {id(p) for group in param_groups(model, 1.0) if group["weight_decay"] for p in group["params"]}
    found = list(model.named_parameters())
    first = [(name, p) for name, p in found if id(p) in decayed]
    return sum(p.numel() for _, p in first), [n for n, _ in first] + [n for n, p in found if id(p) not in decayed]
