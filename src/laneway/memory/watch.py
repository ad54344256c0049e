"""Hooks on a model's modules: which of them could compute a saved tensor again, and which blocks could be checkpointed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from laneway.memory.activations import Activations
from laneway.memory.extents import key_of, plain, version_of
from laneway.memory.record import Recorder


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of a model: the members of its outermost ModuleLists and Sequentials of two or more alike."""
    found: list[tuple[str, nn.Module]] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            members = list(module.named_children())
            if len({type(member) for _, member in members}) == 1 and any(True for _ in members[0][1].children()):
                found += [(f"{name}.{child}" if name else child, member) for child, member in members]
                inside = (*inside, f"{name}." if name else "")
    return found


class Watch:
    """Hooks that are on the model while a pass is recorded, or while a plan computes something again."""

    def __init__(self, model: nn.Module, activations: Activations, blocks: list[tuple[str, nn.Module]]) -> None:
        self.model, self.activations, self.blocks = model, activations, blocks
        self.parameters_leave = False  # then nothing is run again past the hooks that bring them
        self._handles: list[Any] = []
        self._undo: list[Callable[[], None]] = []

    def record(self, recorder: Recorder) -> None:
        """Note recipes and blocks of the pass that begins."""
        for name, leaf in self._leaves():
            hook = _Leaf(name, self.activations, recorder)
            self._handles.append(leaf.register_forward_pre_hook(hook.begin))
            self._handles.append(leaf.register_forward_hook(hook.end, with_kwargs=True))
        for number, (name, block) in enumerate(self.blocks):
            if _compiled(block) or (self.parameters_leave and _owns(block)):
                continue
            around = _Block(number, name, recorder)
            self._handles.append(block.register_forward_pre_hook(around.begin, with_kwargs=True))
            self._handles.append(block.register_forward_hook(around.end))

    def follow(self, recomputed: Collection[str], checkpointed: Iterable[int]) -> None:
        """Note the recipes of these modules, and checkpoint these blocks."""
        for name, leaf in self._leaves():
            if name in recomputed:
                hook = _Leaf(name, self.activations, None)
                self._handles.append(leaf.register_forward_pre_hook(hook.begin))
                self._handles.append(leaf.register_forward_hook(hook.end, with_kwargs=True))
        for number in checkpointed:
            self._checkpoint(self.blocks[number][1])

    def clear(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        for undo in self._undo:
            undo()
        self._handles, self._undo = [], []

    def _leaves(self) -> list[tuple[str, nn.Module]]:
        """Modules without children, outside of what is compiled."""
        modules = dict(self.model.named_modules())
        compiled = tuple(f"{name}." if name else "" for name, module in modules.items() if _compiled(module))
        return [
            (name, module)
            for name, module in modules.items()
            if not any(True for _ in module.children())
            and not _compiled(module)
            and not name.startswith(compiled)
            and not (self.parameters_leave and _owns(module))
        ]

    def _checkpoint(self, block: nn.Module) -> None:
        forward = block.forward

        def again(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        own = block.__dict__.get("forward")
        block.__dict__["forward"] = again

        def undo() -> None:
            if own is None:
                block.__dict__.pop("forward", None)
            else:
                block.__dict__["forward"] = own

        self._undo.append(undo)


def _owns(module: nn.Module) -> bool:
    """Whether it has parameters itself."""
    return any(True for _ in module.parameters(recurse=False))


class _Leaf:
    """Around a leaf module: note how its output can be made again.

    Its forward pass must leave the module and the generators as they were. While recording, a second one must also give the same
    bits.
    """

    def __init__(self, name: str, activations: Activations, recorder: Recorder | None) -> None:
        self.name, self.activations, self.recorder = name, activations, recorder
        self._before: list[Any] = []

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before its forward pass."""
        if torch.is_grad_enabled():
            self._before = _state(module, self.activations.device)

    def end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """After it."""
        if not torch.is_grad_enabled() or kwargs or not isinstance(output, Tensor) or not plain(output):
            return
        if output.untyped_storage().nbytes() < self.activations.min_bytes or output.device != self.activations.device:
            return
        keys = {key_of(given) for given in args if isinstance(given, Tensor) and plain(given)}
        changed = self._before != _state(module, self.activations.device)
        if changed or key_of(output) in keys or _keeps_statistics(module):
            return
        recipe = self.activations.recipe(self.name, module, args, output)
        if recipe is not None and self.recorder is not None:
            with self.recorder.aside():
                recipe.seconds = self._tried(module, args, output)

    def _tried(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> float | None:
        """Seconds that making the output again took; None where it came out otherwise."""
        assert self.recorder is not None
        start = self.recorder.clock.now()
        with torch.no_grad():
            again = module.forward(*args)
        self.recorder.settle()
        seconds = self.recorder.clock.now() - start
        same = isinstance(again, Tensor) and again.untyped_storage().nbytes() == output.untyped_storage().nbytes()
        return seconds if same and again.stride() == output.stride() and torch.equal(again, output) else None


def _state(module: nn.Module, device: torch.device) -> list[Any]:
    """What a forward pass with side effects would change: attributes, contents of containers, buffers, generators."""
    found: list[Any] = [torch.get_rng_state().numpy().tobytes()]
    if device.type != "cpu":
        found.append(torch.get_device_module(device).get_rng_state(device).numpy().tobytes())
    held = {**module.__dict__, **module._buffers, **module._parameters}
    for name, value in held.items():
        size = len(value) if isinstance(value, list | dict | set) else None
        found.append((name, id(value), size, version_of(value) if isinstance(value, Tensor) else None))
    return found


def _keeps_statistics(module: nn.Module) -> bool:
    """Batch normalisation writes its statistics without raising the tensors' version."""
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def _compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


class _Block:
    """Around a block: its time and what it was given; whether it may be checkpointed at all.

    It must be a function of tensors and plain values, and leave its buffers alone: running statistics would be updated twice.
    """

    def __init__(self, number: int, name: str, recorder: Recorder) -> None:
        self.number, self.name, self.recorder = number, name, recorder
        self.began: float | None = None
        self.buffers: list[int | None] = []

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        if not torch.is_grad_enabled() or not all(isinstance(value, Tensor | int | float | str | None) for value in given):
            return
        self.buffers = [version_of(buffer) for buffer in module.buffers()]
        tensors = {key_of(value) for value in given if isinstance(value, Tensor) and plain(value)}
        self.began = self.recorder.enter_block(self.number, self.name, tensors)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.began is None:
            return
        began, self.began = self.began, None
        pure = isinstance(output, Tensor) or (isinstance(output, tuple) and all(isinstance(o, Tensor) for o in output))
        pure = pure and not any(map(_keeps_statistics, module.modules()))
        pure = pure and self.buffers == [version_of(buffer) for buffer in module.buffers()]
        self.recorder.leave_block(self.number, began, usable=pure)
