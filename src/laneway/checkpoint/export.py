"""A trained model in files that other programs read: ``model.safetensors``, ``config.json`` and, if given, ``tokenizer.json``.

safetensors stores each tensor once. Tied weights (one tensor under several names) are written under the first name; the others
stand in the file's metadata under ``tied``, a JSON object of name -> name, and ``load_export`` ties them again. A program that
does not know of it sees the first name only, as is usual for tied heads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from laneway.checkpoint import atomic
from laneway.checkpoint.ranks import on_all, on_first, rank_and_size
from laneway.core import InputError, LanewayError

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


def export(
    model: nn.Module | Mapping[str, torch.Tensor],
    config: dict[str, Any],
    folder: str | Path,
    tokenizer_file: str | Path | None = None,
) -> Path:
    """Write a model to ``folder``, all or nothing, in the place of an older export there; returns the folder.

    Args:
        model: a module, wrapped or not (with several ranks every rank calls this and rank 0 writes), or a dict of tensors.
        config: what is needed to build the model again; plain JSON data.
        folder: is created; an existing one must be an export or empty.
        tokenizer_file: a file to copy in as ``tokenizer.json``.

    Raises:
        InputError: the folder holds something else, the config is no JSON data, there is no such tokenizer file.
        LanewayError: it could not be written (full disk, no permission); an older export is as it was.
    """
    target = Path(folder)
    what = f"exporting to {target}"
    # Every rank checks: bad input must stop all of them before the first collective call on the weights.
    text = on_all(what, target, lambda: _check(model, config, target, tokenizer_file))
    tensors, tied = _full_tensors(model)
    on_first(what, target, lambda: _write(target, tensors, tied, text, tokenizer_file))
    return target


def load_export(folder: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors (on the CPU, tied again where they were) and the config of an export.

    Raises:
        InputError: there is no such folder, or a file is missing.
        LanewayError: a file is cut or damaged. A changed byte within a weight cannot be seen: the format has no checksum.
    """
    folder = atomic.locate(Path(folder))
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise InputError("folder", str(folder), f"a folder with {WEIGHTS} and {CONFIG}", f"it holds no {name}")
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except ValueError as error:
        raise LanewayError(f"{folder / CONFIG} is no JSON, it is cut or damaged ({error})") from error
    if not isinstance(config, dict):
        raise LanewayError(f"{folder / CONFIG} holds no JSON object")
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            tied = json.loads((file.metadata() or {}).get("tied", "{}"))
            # A copy: the file's own tensors are a map of it, and a file that is cut later would then end the process.
            state = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no dict
        return {**state, **{name: state[first] for name, first in tied.items()}}, config
    except (SafetensorError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise LanewayError(f"{folder / WEIGHTS} is cut or damaged ({error})") from error


def _check(model: Any, config: Any, target: Path, tokenizer_file: str | Path | None) -> str:
    """The text of ``config.json``. Raises InputError for whatever is wrong with the arguments."""
    if not isinstance(model, nn.Module):
        wrong = (
            [name for name, value in model.items() if not isinstance(value, torch.Tensor)] if isinstance(model, Mapping) else [""]
        )
        if wrong:
            raise InputError("model", wrong[0] or type(model).__name__, "a module or a dict of tensors by name")
    if not isinstance(config, dict):
        raise InputError("config", type(config).__name__, "a dict")
    if tokenizer_file is not None and not Path(tokenizer_file).is_file():
        raise InputError("tokenizer_file", str(tokenizer_file), "an existing file")
    if target.exists() and not target.is_dir():
        raise InputError("folder", str(target), "a folder", "there is a file of this name")
    foreign = (
        sorted(path.name for path in target.iterdir() if path.name not in (WEIGHTS, CONFIG, TOKENIZER)) if target.exists() else []
    )
    if foreign:
        raise InputError("folder", str(target), "a new or empty folder, or an older export", f"it holds {foreign[0]!r}")
    try:
        return json.dumps(config, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise InputError("config", config, "plain JSON data", str(error)) from error


def _full_tensors(model: nn.Module | Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Whole tensors on the CPU, each once, by name, and the names that are tied: name -> first name. Ranks > 0 get no tensors."""
    state: dict[str, Any] = dict(get_model_state_dict(model) if isinstance(model, nn.Module) else model)
    other = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if other:
        raise InputError("model", other[0], "a state of tensors only")
    tied = _tied(state)
    whole = {}
    for name, value in state.items():
        if name in tied:
            continue
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if rank_and_size()[0] == 0:  # a copy: two views of one storage are two tensors in the file
            whole[name] = full.detach().cpu().clone(memory_format=torch.contiguous_format)
    return whole, tied


def _tied(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Names that are the same tensor as an earlier name."""
    seen: dict[tuple[Any, ...], str] = {}
    tied = {}
    for name, value in state.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.numel() == 0:
            continue  # no data, so nothing to share
        place = (local.data_ptr(), local.device, tuple(value.shape), local.stride(), local.dtype)
        if place in seen:
            tied[name] = seen[place]
        else:
            seen[place] = name
    return tied


def _write(
    target: Path, tensors: dict[str, torch.Tensor], tied: dict[str, str], config: str, tokenizer_file: str | Path | None
) -> None:
    """Rank 0: all files into a folder beside ``target``, flushed, then put in its place."""
    temporary = atomic.temporary(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        atomic.settle(target)
        temporary.mkdir()
        metadata = {"format": "pt", **({"tied": json.dumps(tied)} if tied else {})}
        try:
            save_file(tensors, temporary / WEIGHTS, metadata=metadata)
        except SafetensorError as error:
            raise _io_error(error, temporary) from error
        atomic.sync(temporary / WEIGHTS)
        atomic.write_synced(temporary / CONFIG, config.encode())
        if tokenizer_file is not None:
            atomic.write_synced(temporary / TOKENIZER, Path(tokenizer_file).read_bytes())
        atomic.swap_in(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _io_error(error: SafetensorError, folder: Path) -> LanewayError:
    """safetensors wraps the failures of the file system in a text of its own."""
    free = shutil.disk_usage(folder).free / 2**20
    return LanewayError(f"{WEIGHTS} could not be written: {error} ({free:.1f} MiB free on the disk)")
