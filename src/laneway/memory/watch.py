"""Hooks on a model's modules: which of them could compute a saved tensor again, and which blocks could be checkpointed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from laneway.memory.activations import Activations
from laneway.memory.extents import key_of, plain
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
        self._handles: list[Any] = []
        self._undo: list[Callable[[], None]] = []

    def record(self, recorder: Recorder) -> None:
        """Note recipes and blocks of the pass that begins."""
        for name, leaf in self._leaves():
            self._handles.append(leaf.register_forward_hook(_Leaf(name, self.activations, recorder), with_kwargs=True))
        for number, (name, block) in enumerate(self.blocks):
            hook = _Block(number, name, recorder)
            self._handles.append(block.register_forward_pre_hook(hook.begin, with_kwargs=True))
            self._handles.append(block.register_forward_hook(hook.end))

    def follow(self, recomputed: Collection[str], checkpointed: Iterable[int]) -> None:
        """Note the recipes of these modules, and checkpoint these blocks."""
        for name, leaf in self._leaves():
            if name in recomputed:
                self._handles.append(leaf.register_forward_hook(_Leaf(name, self.activations, None), with_kwargs=True))
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
        return [(name, module) for name, module in self.model.named_modules() if not any(True for _ in module.children())]

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


class _Leaf:
    """After a leaf module: note how its output can be made again. While recording also try it: same bits, no side effects."""

    def __init__(self, name: str, activations: Activations, recorder: Recorder | None) -> None:
        self.name, self.activations, self.recorder = name, activations, recorder

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled() or kwargs or not isinstance(output, Tensor) or not plain(output):
            return
        if output.untyped_storage().nbytes() < self.activations.min_bytes or output.device != self.activations.device:
            return
        keys = {key_of(given) for given in args if isinstance(given, Tensor) and plain(given)}
        if key_of(output) in keys:
            return
        recipe = self.activations.recipe(self.name, module, args, output)
        if recipe is None or self.recorder is None:
            return
        with self.recorder.aside():
            recipe.seconds = self._tried(module, args, output)

    def _tried(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> float | None:
        """Seconds that making the output again took; None where it came out otherwise or touched what it must not."""
        assert self.recorder is not None
        buffers = [(buffer, buffer._version) for buffer in module.buffers()]
        generator = _generator_states(output.device)
        start = self.recorder.clock.now()
        try:
            with torch.no_grad():
                again = module.forward(*args)
            self.recorder.settle()
        except Exception:  # whatever it is, the module does not work twice: it is not computed again
            return None
        seconds = self.recorder.clock.now() - start
        same = isinstance(again, Tensor) and again.untyped_storage().nbytes() == output.untyped_storage().nbytes()
        same = same and again.stride() == output.stride() and torch.equal(again, output)
        untouched = all(buffer._version == version for buffer, version in buffers)
        undrawn = all(torch.equal(a, b) for a, b in zip(generator, _generator_states(output.device), strict=True))
        return seconds if same and untouched and undrawn else None


def _generator_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


class _Block:
    """Around a block: its time, and what it was given."""

    def __init__(self, number: int, name: str, recorder: Recorder) -> None:
        self.number, self.name, self.recorder = number, name, recorder
        self.began = 0.0

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            tensors = [given for given in (*args, *kwargs.values()) if isinstance(given, Tensor) and plain(given)]
            self.began = self.recorder.enter_block(self.number, self.name, {key_of(given) for given in tensors})

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self.recorder.leave_block(self.number, self.began)
