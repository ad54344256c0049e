"""Token shards: one raw file of ids a split, and a manifest that says what they are.

Format ``laneway-tokens``, version 1. A folder holds

    train.bin, validation.bin   token ids, little-endian, no header: ``numpy.memmap(file, dtype)`` reads them
    manifest.json               format, version, dtype (``|u1``, ``<u2`` or ``<u4``, by vocabulary size), tokenizer, source,
                                and for each split: file, tokens, text_bytes, documents, blake2b (256 bits over the file);
                                then its own blake2b over all of that, so no byte of the folder can change unseen

``text_bytes`` is the length of the split's text in UTF-8 plus one for each separator token: with it a loss in nats a token
becomes bits a byte, which compares across vocabularies. For the byte tokenizer it equals the number of tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from laneway.core import LanewayError

FORMAT, VERSION = "laneway-tokens", 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
# Shards up to this size are checked in full whenever they are opened (about 0.1 s); larger ones when asked.
ALWAYS_CHECKED_BYTES = 64 * 2**20
_CHUNK = 2**20


class CorruptShardError(LanewayError):
    """A shard folder that is not what its manifest says."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest of uint8, uint16 and uint32 (little-endian) that holds every id below ``vocab_size``."""
    return np.dtype("|u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<u4")


@dataclass(frozen=True)
class TokenFile:
    """The ids of one split, memory-mapped on first use. Slicing gives a read-only numpy array.

    Picklable: another process maps the file again instead of receiving a copy.
    """

    path: Path
    dtype: str
    tokens: int
    text_bytes: int
    documents: int
    digest: str
    label: str = "tokens"

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, key: slice) -> np.ndarray:
        return self.array[key]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "array"}

    @cached_property
    def array(self) -> np.ndarray:
        """All ids, shape [tokens]; raises CorruptShardError where the file's size is wrong."""
        self.check_size()
        if not self.tokens:  # a file of no bytes cannot be mapped
            return np.empty(0, dtype=self.dtype)
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.tokens,))

    @property
    def size(self) -> int:
        """Bytes the file must have."""
        return self.tokens * np.dtype(self.dtype).itemsize

    def check_size(self) -> None:
        """Raise CorruptShardError unless the file is there and as long as it must be."""
        found = self.path.stat().st_size if self.path.is_file() else None
        if found != self.size:
            what = "is missing" if found is None else f"has {found} bytes instead of {self.size}"
            raise CorruptShardError(f"token shard {self.path} {what}")

    def verify(self) -> None:
        """Read the whole file; raises CorruptShardError unless it holds exactly what was written."""
        self.check_size()
        hasher = hashlib.blake2b(digest_size=32)
        with self.path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
        if hasher.hexdigest() != self.digest:
            raise CorruptShardError(f"token shard {self.path} is corrupt: its content does not match its checksum")


class ShardWriter:
    """Writes one split's ids, counting and hashing as it goes. A context manager; leaving it makes the file durable."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.path, self.vocab_size = path, vocab_size
        self.dtype = token_dtype(vocab_size)
        self.tokens = self.text_bytes = self.documents = 0
        self._hasher = hashlib.blake2b(digest_size=32)
        self._file = path.open("xb")

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def write(self, ids: np.ndarray, text_bytes: int) -> None:
        """Append ``ids`` (shape [tokens]), which stand for ``text_bytes`` bytes of text."""
        if ids.size and int(ids.max()) >= self.vocab_size:
            raise LanewayError(f"the tokenizer gave id {int(ids.max())} with a vocabulary of {self.vocab_size}")
        raw = ids.astype(self.dtype).tobytes()
        self._file.write(raw)
        self._hasher.update(raw)
        self.tokens += len(ids)
        self.text_bytes += text_bytes

    def entry(self) -> dict[str, Any]:
        """The split's part of the manifest."""
        counts = {"tokens": self.tokens, "text_bytes": self.text_bytes, "documents": self.documents}
        return {"file": self.path.name, **counts, "blake2b": self._hasher.hexdigest()}


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write ``manifest.json`` with its own checksum, and make it durable."""
    content = {"format": FORMAT, "version": VERSION, **content}
    with (folder / MANIFEST).open("x", encoding="utf-8") as file:
        json.dump({**content, "blake2b": _digest(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a shard folder; raises CorruptShardError where it is absent, broken or of another version."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
        claimed = content.pop("blake2b")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptShardError(f"token shards in {folder}: {MANIFEST} cannot be read ({error})") from error
    if claimed != _digest(content):
        raise CorruptShardError(f"token shards in {folder}: {MANIFEST} is corrupt: its content does not match its checksum")
    if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        raise CorruptShardError(f"token shards in {folder} are in another format than {FORMAT} version {VERSION}")
    return content


def open_splits(folder: Path, manifest: dict[str, Any], label: str, verify: bool) -> dict[str, TokenFile]:
    """The splits of a shard folder, sizes checked, contents too where they are small or ``verify`` is set."""
    splits = {}
    for name in SPLITS:
        entry = manifest["splits"][name]
        counts = {key: entry[key] for key in ("tokens", "text_bytes", "documents")}
        file = TokenFile(
            folder / entry["file"], manifest["dtype"], **counts, digest=entry["blake2b"], label=f"{name} split of {label}"
        )
        if verify or file.size <= ALWAYS_CHECKED_BYTES:
            file.verify()
        else:
            file.check_size()
        splits[name] = file
    return splits


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """A loss in nats a token as bits a byte of text."""
    return nats_per_token / math.log(2) / bytes_per_token


def _digest(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=32).hexdigest()
