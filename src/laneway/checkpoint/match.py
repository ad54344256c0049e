"""A saved tree back into a caller's state: into the caller's own tensors where there are any, as new values elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import torch

from laneway.checkpoint.tree import PerRank, decode_array, entries


def has_tensor(value: Any) -> bool:
    """Whether a tensor is anywhere in ``value``."""
    if isinstance(value, PerRank):
        return has_tensor(value.value)
    if isinstance(value, dict):
        return any(has_tensor(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(has_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)


class Loader:
    """Matches a caller's state with a saved tree, without changing either.

    Where the caller's part holds tensors, its shape must match and the tensors are filled in place; every other part is
    replaced as a whole. The top level may ask for a part of what was saved. An optimizer's state may lack whole parameters
    (those that had had no gradient): they are taken out of the caller's.

    After ``Loader(...)``: ``tensors`` (key -> tensor to fill), ``problems`` (what does not match), ``notices`` (what a person
    should know), and ``finish()``, which puts the plain values in their places once the tensors are filled.
    """

    def __init__(self, target: dict[str, Any], saved: dict[str, Any], own: dict[str, Any], like: dict[str, tuple]) -> None:
        """``own``: this rank's PerRank nodes by path; ``like``: saved key -> (shape, dtype)."""
        self.tensors: dict[str, torch.Tensor] = {}
        self.problems: list[str] = []
        self.notices: list[str] = []
        self._own, self._like = own, like
        self._later: list[Callable[[], Any]] = []
        self._match_dict(target, saved, "", subset=True)

    def finish(self) -> None:
        """Put plain values and new tensors into the caller's containers."""
        for action in self._later:
            action()

    def _match(self, target: Any, node: Any, path: str) -> Any:
        """The value that belongs at ``path``; ``target`` itself where it is filled in place."""
        if isinstance(target, torch.Tensor):
            return self._match_tensor(target, node, path)
        if isinstance(target, PerRank):
            return self._match_per_rank(target, node, path)
        if path == "optimizer/param_groups" and _grouping(target) != _grouping(node):
            self.problems.append("the optimizer's parameter groups hold other parameters in the checkpoint")
        if not has_tensor(target):
            return self._decode(node)
        if isinstance(target, dict):
            return self._match_dict(target, node, path)
        return self._match_sequence(target, node, path)

    def _match_dict(self, target: dict[Any, Any], node: Any, path: str, subset: bool = False) -> dict[Any, Any]:
        saved = entries(node)
        if saved is None:
            self.problems.append(f"{path} is no dict in the checkpoint")
            return target
        for key in target:
            here = f"{path}/{key}".removeprefix("/")
            if key in saved:
                value = self._match(target[key], saved[key], here)
                if value is not target[key]:
                    self._later.append(lambda key=key, value=value: target.__setitem__(key, value))
            elif path == "optimizer/state":
                self._later.append(lambda key=key: target.pop(key))
            else:
                self.problems.append(f"{here} is not in the checkpoint")
        if not subset:
            self.problems += [f"{path}/{key} is only in the checkpoint" for key in saved if key not in target]
        return target

    def _match_sequence(self, target: Any, node: Any, path: str) -> Any:
        saved = node.get("$tuple") if isinstance(node, dict) else node
        if not isinstance(saved, list) or len(saved) != len(target):
            self.problems.append(f"{path} has another length in the checkpoint")
            return target
        items = [self._match(item, saved[number], f"{path}/{number}") for number, item in enumerate(target)]
        if all(new is old for new, old in zip(items, target, strict=True)):
            return target
        if isinstance(target, tuple):
            return tuple(items)
        self._later.append(lambda: target.__setitem__(slice(None), items))
        return target

    def _match_tensor(self, target: torch.Tensor, node: Any, path: str) -> torch.Tensor:
        key = node.get("$tensor") if isinstance(node, dict) else None
        if key is None or key not in self._like:
            self.problems.append(f"{path} is no tensor in the checkpoint")
            return target
        shape, dtype = self._like[key]
        if (tuple(target.shape), target.dtype) != (tuple(shape), dtype):
            self.problems.append(f"{path} is {_shape(shape, dtype)} in the checkpoint, {_shape(target.shape, target.dtype)} here")
        self.tensors[key] = target
        return target

    def _match_per_rank(self, target: PerRank, node: Any, path: str) -> PerRank:
        where = node.get("$per_rank") if isinstance(node, dict) else None
        if where is None:
            self.problems.append(f"{path} is not kept by rank in the checkpoint")
        elif self._has_own(where):
            value = self._match(target.value, self._own[where], path)
            if value is not target.value:
                self._later.append(lambda: setattr(target, "value", value))
        return target

    def _has_own(self, where: str) -> bool:
        if where not in self._own:
            self.notices.append(f"the checkpoint has no {where.removeprefix('/')} for this rank; it is left as it is")
        return where in self._own

    def _decode(self, node: Any) -> Any:
        """A saved node as a new value; its tensors are allocated on the CPU and filled with the others."""
        if isinstance(node, list):
            return [self._decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$tensor" in node:
            shape, dtype = self._like[node["$tensor"]]
            return self.tensors.setdefault(node["$tensor"], torch.empty(shape, dtype=dtype))
        if "$tuple" in node:
            return tuple(self._decode(item) for item in node["$tuple"])
        if "$bytes" in node:
            return base64.b64decode(node["$bytes"])
        if "$array" in node:
            return decode_array(node["$array"])
        if "$per_rank" in node:
            return PerRank(self._decode(self._own[node["$per_rank"]]) if self._has_own(node["$per_rank"]) else None)
        return {key: self._decode(item) for key, item in (entries(node) or {}).items()}


def _grouping(groups: Any) -> set[frozenset[str]] | None:
    """Which parameters share a group, whatever the order; None for what is no list of groups by name."""
    if not isinstance(groups, list) or not all(isinstance(group, dict) and "params" in group for group in groups):
        return None
    return {frozenset(map(str, group["params"])) for group in groups}


def _shape(shape: Any, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
