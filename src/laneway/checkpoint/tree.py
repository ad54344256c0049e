"""Tensors apart from plain data. A state is a tree of dicts, lists and tuples; its leaves are tensors or plain Python values.

``Encoder`` turns it into a flat dict of tensors, which go to torch.distributed.checkpoint, and a JSON tree of everything else,
in which a tensor is a reference. Nothing is pickled, so loading a state runs no code that came with it. The way back is
``match.Loader``.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from laneway.core import InputError

ACCEPTED = "tensors, numpy arrays, None, bool, int, float, str, bytes, and lists, tuples and dicts of these"
_PLAIN = (type(None), bool, int, float, str)


@dataclass
class PerRank:
    """A value that differs between ranks (random number generators, say): each rank saves its own and gets its own back.

    Everything else in a state is taken to be equal on all ranks, or to be a DTensor.
    Where a checkpoint comes from fewer ranks than load it, the others' ``value`` is left as it is (None in a new tree).
    """

    value: Any = None


class Encoder:
    """One rank's state as ``tree`` (JSON), ``own`` (JSON, by path: the PerRank values) and ``tensors`` (by key)."""

    def __init__(self, state: dict[str, Any], rank: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.own: dict[str, Any] = {}
        self._prefix = ""
        self._rank = rank
        self.tree = self._encode(state, "")

    def _encode(self, value: Any, path: str) -> Any:
        if isinstance(value, PerRank):
            return self._per_rank(value, path)
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._tensor(value, path)}
        if isinstance(value, (np.ndarray, np.generic)):
            return _array(value, path)
        if type(value) in _PLAIN:  # not a subclass, which would come back as another type
            return value
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, dict):
            return self._dict(value, path)
        if type(value) in (list, tuple):
            items = [self._encode(item, f"{path}/{number}") for number, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        raise InputError(f"state{path.replace('/', '.')}", type(value).__name__, ACCEPTED)

    def _dict(self, value: dict[Any, Any], path: str) -> dict[str, Any]:
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: self._encode(item, f"{path}/{key}") for key, item in value.items()}
        for key in value:
            if not isinstance(key, (str, int, float, bool, type(None), tuple)):
                raise InputError(
                    f"state{path.replace('/', '.')}", key, "dict keys that are numbers, strings, None or tuples of these"
                )
        pairs = [[self._encode(key, f"{path}/key"), self._encode(item, f"{path}/{key!r}")] for key, item in value.items()]
        return {"$dict": pairs}

    def _per_rank(self, value: PerRank, path: str) -> dict[str, Any]:
        if self._prefix:
            raise InputError(f"state{path.replace('/', '.')}", "PerRank", "no PerRank inside another")
        self._prefix = f"rank{self._rank}:"
        self.own[path] = self._encode(value.value, path)
        self._prefix = ""
        return {"$per_rank": path}

    def _tensor(self, value: torch.Tensor, path: str) -> str:
        key = f"{self._prefix}{path.removeprefix('/')}"
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            given = f"a tensor of layout {value.layout} on {value.device}"
            raise InputError(f"state{path.replace('/', '.')}", given, "dense tensors that hold data")
        if key in self.tensors:
            raise InputError(f"state{path.replace('/', '.')}", key, "keys that stay different when joined by '/'")
        self.tensors[key] = value
        return key


def _array(value: np.ndarray | np.generic, path: str) -> dict[str, Any]:
    """A numpy array or scalar as JSON."""
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.fields:
        raise InputError(f"state{path.replace('/', '.')}", f"an array of dtype {array.dtype}", "arrays of plain numbers")
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    node = {"dtype": array.dtype.str, "shape": list(array.shape), "data": data, "scalar": isinstance(value, np.generic)}
    return {"$array": node}


def entries(node: Any) -> dict[Any, Any] | None:
    """A dict node as key -> node; None where the node is something else."""
    if not isinstance(node, dict):
        return None
    if "$dict" in node:
        return {_plain_key(key): item for key, item in node["$dict"]}
    return None if any(key.startswith("$") for key in node) else node


def _plain_key(node: Any) -> Any:
    return tuple(_plain_key(item) for item in node["$tuple"]) if isinstance(node, dict) else node


def decode_array(node: dict[str, Any]) -> Any:
    """A numpy array or scalar from its JSON."""
    data = base64.b64decode(node["data"])
    array = np.frombuffer(data, dtype=np.dtype(node["dtype"])).reshape(node["shape"]).copy()
    return array[()] if node["scalar"] else array
