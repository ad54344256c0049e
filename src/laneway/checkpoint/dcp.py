"""torch.distributed.checkpoint (DCP) as it is, with three changes at its edges.

1. **Nothing is unpickled freely.** DCP's ``.metadata`` file is a pickle: here it is read with a list of the classes it may name.
   DCP stores tensors with ``torch.save`` and reads them with ``weights_only=True``. It stores other objects as free pickles, so
   none are given to it (``tree.py``).
2. **A failure to write says why.** A full disk reaches the caller as OSError, not as the serializer's "unexpected pos".
3. **The metadata names no path of this machine.**
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from laneway.checkpoint.ranks import line, lost, rank_and_size
from laneway.core import LanewayError

METADATA = ".metadata"

_MODULE = "torch.distributed.checkpoint."
_ALLOWED = {
    *(
        (f"{_MODULE}metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    (f"{_MODULE}filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles DCP's metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise LanewayError(f"{METADATA} names {module}.{name}, which no checkpoint of tensors needs; it is not loaded")


class _Writer(torch_dcp.FileSystemWriter):
    """Writes one file a rank, each flushed to the disk; a failure of the file system is raised as OSError."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch's zip writer raises "unexpected pos" while the OSError of the file below it is on its way up.
            raise _root_os_error(error) or error from None

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


def _root_os_error(error: BaseException | None) -> OSError | None:
    """The OSError at the bottom of a chain of exceptions."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


class _Reader(torch_dcp.FileSystemReader):
    """Reads what ``_Writer`` wrote, without unpickling anything unexpected."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def read_metadata(folder: Path) -> Metadata:
    """DCP's description of the tensors in ``folder``. Raises LanewayError where it is anything else."""
    data = (folder / METADATA).read_bytes()
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, ValueError, KeyError) as error:
        raise LanewayError(f"{folder / METADATA} is no description of tensors ({line(error, folder)})") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise LanewayError(f"{folder / METADATA} is no description of tensors (it holds a {type(metadata).__name__})")
    if any(os.path.basename(info.relative_path) != info.relative_path for info in metadata.storage_data.values()):
        raise LanewayError(f"{folder / METADATA} points outside its folder; it is not loaded")
    return metadata


def shapes(metadata: Metadata) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Key -> (global shape, dtype) of every saved tensor."""
    entries = metadata.state_dict_metadata.items()
    return {key: (entry.size, entry.properties.dtype) for key, entry in entries if isinstance(entry, TensorStorageMetadata)}


def save_tensors(tensors: dict[str, torch.Tensor], folder: Path, what: str) -> list[str]:
    """Write all tensors (every rank calls this) and return the names of the files that this rank wrote.

    Plain tensors are taken to be equal on all ranks and are written once; of a DTensor each rank writes its own part.
    Raises LanewayError on all ranks where one fails.
    """
    rank, size = rank_and_size()
    writer = _Writer(folder, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=False)
    with _in_words(what, folder), _no_process_group_is_fine(size, "save"):
        torch_dcp.save(dict(tensors), storage_writer=writer, no_dist=size == 1)
    mine = sorted(path.name for path in folder.glob(f"__{rank}_*"))
    return [*mine, METADATA] if rank == 0 else mine


def load_tensors(tensors: dict[str, torch.Tensor], folder: Path, what: str) -> None:
    """Fill ``tensors`` in place (every rank calls this); DTensors take their own part, whatever the number of ranks was.

    Raises LanewayError on all ranks where one fails.
    """
    _, size = rank_and_size()
    with _in_words(what, folder), _no_process_group_is_fine(size, "load"):
        torch_dcp.load(dict(tensors), storage_reader=_Reader(folder), no_dist=size == 1)


@contextmanager
def _no_process_group_is_fine(size: int, verb: str) -> Generator[None]:
    """DCP warns where there is one process only; that is a case we mean."""
    with warnings.catch_warnings():
        if size == 1:
            message = "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to " + verb
            warnings.filterwarnings("ignore", message=message, category=UserWarning)
        yield


@contextmanager
def _in_words(what: str, folder: Path) -> Generator[None]:
    """DCP's exceptions, which derive from BaseException and hold a traceback of every rank, as one line."""
    rank, size = rank_and_size()
    try:
        yield
    except CheckpointException as error:
        failures = {failed: pair[0] for failed, pair in error.failures.items()}
        for cause in failures.values():
            if isinstance(cause, (KeyboardInterrupt, SystemExit)):
                raise cause from None
        failed, cause = min(failures.items())
        where = f" on rank {failed}" if size > 1 else ""
        raise LanewayError(f"{what} failed{where}: {line(cause, folder)}") from error
    except RuntimeError as error:
        if size == 1:
            raise
        raise lost(what, rank, error) from error
