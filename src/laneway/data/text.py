"""Text to a corpus that is ready to train on: configuration, cache of token shards, and what a run needs to know of it.

sources.py   files -> documents in pieces        tokenizer.py   text -> ids
build.py     documents -> splits -> shards       shards.py      the files and their checksums
cache.py     atomic folders, locks               loader.py      shards -> batches (order.py: the shuffle)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from laneway.core import InputError, choice, wrong_types
from laneway.data import shards
from laneway.data.build import SPLIT_RULE, build
from laneway.data.cache import cache_folder, discard, locked, new_folder, remove_leftovers
from laneway.data.progress import say
from laneway.data.shards import SPLITS, CorruptShardError, TokenFile
from laneway.data.sources import Sources, find_sources
from laneway.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class TextDataConfig:
    """Text to train on.

    Args:
        path: "stdlib" (this Python's own library sources), a text file, a .jsonl file, or a folder (searched recursively).
        tokenizer: "byte", or the path of a tokenizer.json (needs `pip install 'laneway[data]'`).
        validation_fraction: share of the text's bytes kept for validation, between 0 and 1.
        cache: folder for token shards; by default $LANEWAY_CACHE, else ~/.cache/laneway.
        suffixes: which files of a folder are text, such as .txt .md; none given means the usual ones.
        text_field: field of a JSON line that holds the text.
        verify: check all shards in full when they are opened; without it, those over 64 MiB by size only.
        rebuild: replace a corrupt shard in a folder given by `cache`; in the default folder that happens anyway.
    """

    path: str = "stdlib"
    tokenizer: str = "byte"
    validation_fraction: float = 0.05
    cache: str | None = None
    suffixes: tuple[str, ...] = ()
    text_field: str = "text"
    verify: bool = False
    rebuild: bool = False

    def __post_init__(self) -> None:
        for name in ("path", "tokenizer", "text_field"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise InputError(f"data.{name}", getattr(self, name), "text that is not empty")
        if self.cache is not None and not isinstance(self.cache, str):
            raise InputError("data.cache", self.cache, "the path of a folder")
        fraction = self.validation_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
            raise InputError("data.validation_fraction", fraction, "a number between 0 and 1, both excluded")
        if isinstance(self.suffixes, str) or not all(isinstance(item, str) and item.startswith(".") for item in self.suffixes):
            raise InputError("data.suffixes", self.suffixes, "suffixes that begin with a dot, such as .txt .md")
        object.__setattr__(self, "suffixes", tuple(self.suffixes))  # a list, where it comes from a file
        for problem in wrong_types(self, "data.").values():
            raise problem


@dataclass(frozen=True)
class Corpus:
    """Token shards of both splits, with their tokenizer. ``folder`` holds the files."""

    train: TokenFile
    validation: TokenFile
    tokenizer: Tokenizer
    folder: Path

    def split(self, name: str) -> TokenFile:
        """The split ``train`` or ``validation``."""
        return {"train": self.train, "validation": self.validation}[choice("split", name, SPLITS)]

    def bytes_per_token(self, split: str = "validation") -> float:
        """UTF-8 bytes of text (and one a separator) for each token of a split; exactly 1 for the byte tokenizer."""
        file = self.split(split)
        return file.text_bytes / file.tokens

    def bits_per_byte(self, nats_per_token: float, split: str = "validation") -> float:
        """A mean loss in nats a token of ``split`` as bits a byte of text, which compares across tokenizers."""
        return shards.bits_per_byte(nats_per_token, self.bytes_per_token(split))

    @property
    def fingerprint(self) -> str:
        """Equal for two corpora exactly if their tokens and their tokenizers are equal, whatever machine built them."""
        parts = f"{self.train.digest} {self.validation.digest} {self.train.dtype} {self.tokenizer.fingerprint}"
        return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def prepare(config: TextDataConfig) -> Corpus:
    """Open the corpus of ``config``, tokenising it first where the cache has no shards of exactly these files and settings.

    Any number of processes may call this at once: one builds, the others wait. Raises InputError for unusable input,
    LanewayError for a full disk or a corrupt shard that is not ours to replace.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    sources = find_sources(config.path, config.suffixes, config.text_field)
    cache = cache_folder(config.cache)
    folder = cache / f"text-{cache_key(config, sources, tokenizer)}"
    corpus = _open_or_none(folder, config, tokenizer)
    if corpus is None:
        with locked(cache / f".lock-{folder.name}") as alone:
            corpus = _open_or_none(folder, config, tokenizer, replace=True)  # another process may have been first
            if corpus is None:
                if alone:
                    remove_leftovers(folder)
                with new_folder(folder) as temporary:
                    build(temporary, sources, tokenizer, config.validation_fraction)
                    _require_both_splits(temporary, config)
                _say_skipped(sources)
                corpus = _open(folder, config, tokenizer)
    return corpus


def cache_key(config: TextDataConfig, sources: Sources, tokenizer: Tokenizer) -> str:
    """Depends on all that decides the shards: format and rule, each file's name, size and time, tokenizer, split."""
    parts = {
        "format": [shards.FORMAT, shards.VERSION, SPLIT_RULE],
        "root": str(sources.root),
        "files": [[file.name, file.size, file.mtime_ns] for file in sources.files],
        "text_field": config.text_field,
        "tokenizer": tokenizer.fingerprint,
        "validation_fraction": float(config.validation_fraction),
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=12).hexdigest()


def check(config: TextDataConfig) -> None:
    """Raise what ``prepare`` would about paths and tokenizer, without reading the text or writing anything."""
    load_tokenizer(config.tokenizer)
    find_sources(config.path, config.suffixes, config.text_field)


def documents(config: TextDataConfig) -> Iterator[str]:
    """The texts of a corpus, one document after the other: what ``train_bpe`` learns from. Each is held in memory whole."""
    parts: list[str] = []
    for piece in find_sources(config.path, config.suffixes, config.text_field).pieces(2**20):
        parts.append(piece.text)
        if piece.end:
            if any(parts):
                yield "".join(parts)
            parts = []


def _open_or_none(folder: Path, config: TextDataConfig, tokenizer: Tokenizer, replace: bool = False) -> Corpus | None:
    """The corpus in ``folder``; None where there is none yet, or a corrupt one that may be (``replace``: is now) thrown away."""
    if not folder.is_dir():
        return None
    try:
        return _open(folder, config, tokenizer)
    except CorruptShardError as error:
        if config.rebuild or config.cache is None:
            if replace:
                say(f"{error}; building it anew")
                discard(folder)
            return None
        raise CorruptShardError(f"{error}; set data.rebuild to build it anew, or remove {folder}") from error


def _open(folder: Path, config: TextDataConfig, tokenizer: Tokenizer) -> Corpus:
    manifest = shards.read_manifest(folder)
    splits = shards.open_splits(folder, manifest, config.path, config.verify)
    return Corpus(splits["train"], splits["validation"], tokenizer, folder)


def _require_both_splits(folder: Path, config: TextDataConfig) -> None:
    """A split without tokens cannot be used at any context length: refuse it before it enters the cache."""
    counts = {name: entry["tokens"] for name, entry in shards.read_manifest(folder)["splits"].items()}
    empty = next((name for name, tokens in counts.items() if tokens < 2), None)
    if empty is not None:
        found = ", ".join(f"{tokens} in {name}" for name, tokens in counts.items())
        accepted = "a corpus with at least 2 tokens in each split"
        hint = f"it has {found}: add text" + (" or raise data.validation_fraction" if empty == "validation" else "")
        raise InputError("data.path", config.path, accepted, hint)


def _say_skipped(sources: Sources) -> None:
    if sources.skipped:
        names = ", ".join(sources.skipped[:3]) + (" …" if len(sources.skipped) > 3 else "")
        say(f"{sources.given}: left out {len(sources.skipped)} files that are no text in their declared encoding: {names}")
