"""Tokenise a corpus into a shard folder, and decide on the way which text is for validation.

The rule of the split: a corpus is a row of blocks. A block is a document, or a piece of one that is longer than L, an eighth
of the validation split (within 512 B … 256 KiB). Blocks are taken in order, and the next one goes to validation when that
split is at least L / 2 bytes short of ``validation_fraction`` of the bytes before it. So the size of a block has no say in where
it goes (else validation would fill up with short documents), a block is wholly in one split, the splits share no text,
and validation is spread over the whole corpus. There is no chance in it.

Each document ends with the separator token where the vocabulary has one; of a document whose pieces go to both splits, each
unbroken stretch does. Pieces are encoded on their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from laneway.core import LanewayError
from laneway.data.progress import ByteProgress
from laneway.data.shards import ShardWriter, token_dtype, write_manifest
from laneway.data.sources import Sources
from laneway.data.tokenizer import Tokenizer

SPLIT_RULE = "blocks in order, to validation when it is half a block short of validation_fraction of the bytes so far"
_MIN_BLOCK, _MAX_BLOCK = 512, 256 * 2**10
_BATCH_BYTES = 4 * 2**20  # text encoded at once: enough work for all cores, little memory


def block_bytes(total_bytes: int, validation_fraction: float) -> int:
    """Longest block, in bytes: an eighth of the validation split, within 512 B … 256 KiB."""
    return int(min(_MAX_BLOCK, max(_MIN_BLOCK, total_bytes * validation_fraction / 8)))


class SplitRule:
    """Assigns blocks to splits, in order (see the head of this file)."""

    def __init__(self, validation_fraction: float, limit: int) -> None:
        self.fraction, self.limit = validation_fraction, limit
        self.seen = self.validation = 0

    def assign(self, size: int) -> str:
        """``train`` or ``validation`` for the next block, of ``size`` bytes."""
        short = self.fraction * self.seen - self.validation
        self.seen += size
        if short < self.limit / 2:
            return "train"
        self.validation += size
        return "validation"


class CorpusWriter:
    """Gathers blocks, encodes them in batches and appends them to the two splits in order."""

    def __init__(self, writers: dict[str, ShardWriter], tokenizer: Tokenizer, rule: SplitRule) -> None:
        self._writers, self._tokenizer, self._rule = writers, tokenizer, rule
        self._open: str | None = None  # split of the document's last block, until the document ends
        self._waiting: list[tuple[str, str | None]] = []  # split and text; None for the end of a stretch
        self._waiting_bytes = 0

    def add(self, text: str, end: bool) -> None:
        """Take the next block; ``end`` says that its document ends with it."""
        if text:
            size = len(text.encode())
            split = self._rule.assign(size)
            if self._open not in (None, split):
                self._end_stretch()
            self._open = split
            self._waiting.append((split, text))
            self._waiting_bytes += size
        if end and self._open is not None:
            self._end_stretch()
        if self._waiting_bytes >= _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Encode and write what is waiting."""
        encoded = iter(self._tokenizer.encode_many([text for _, text in self._waiting if text is not None]))
        for split, text in self._waiting:
            if text is not None:
                self._writers[split].write(next(encoded), len(text.encode()))
            else:
                self._writers[split].documents += 1
                if self._tokenizer.separator is not None:
                    self._writers[split].write(np.array([self._tokenizer.separator], dtype=np.uint32), 1)
        self._waiting, self._waiting_bytes = [], 0

    def _end_stretch(self) -> None:
        if self._open is not None:
            self._waiting.append((self._open, None))
        self._open = None


def build(folder: Path, sources: Sources, tokenizer: Tokenizer, validation_fraction: float) -> None:
    """Write train.bin, validation.bin and manifest.json into ``folder``, which exists and is empty.

    Raises InputError for text that cannot be read, LanewayError where a file changes meanwhile, OSError for a full disk.
    """
    limit = block_bytes(sources.total_bytes, validation_fraction)
    with (
        ShardWriter(folder / "train.bin", tokenizer.vocab_size) as train,
        ShardWriter(folder / "validation.bin", tokenizer.vocab_size) as validation,
        ByteProgress(f"tokenising {sources.given}", sources.total_bytes) as progress,
    ):
        corpus = CorpusWriter({"train": train, "validation": validation}, tokenizer, SplitRule(validation_fraction, limit))
        for piece in sources.pieces(limit):
            corpus.add(piece.text, piece.end)
            progress.advance(piece.read)
        corpus.flush()
    changed = next((file.path for file in sources.files if not file.unchanged()), None)
    if changed is not None:
        raise LanewayError(f"{changed} changed while it was being tokenised; start again when it is complete")
    write_manifest(folder, _manifest(sources, tokenizer, validation_fraction, limit, train, validation))


def _manifest(
    sources: Sources, tokenizer: Tokenizer, fraction: float, limit: int, train: ShardWriter, validation: ShardWriter
) -> dict[str, Any]:
    vocabulary = {"name": tokenizer.name, "vocab_size": tokenizer.vocab_size, "separator": tokenizer.separator}
    return {
        "dtype": token_dtype(tokenizer.vocab_size).str,
        "tokenizer": {**vocabulary, "fingerprint": tokenizer.fingerprint},
        "source": {"given": sources.given, "files": len(sources.files), "bytes": sources.total_bytes, "skipped": sources.skipped},
        "split": {"rule": SPLIT_RULE, "validation_fraction": fraction, "block_bytes": limit},
        "splits": {"train": train.entry(), "validation": validation.entry()},
    }
