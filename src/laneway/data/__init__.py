"""Text and batches: a corpus on disk becomes memory-mapped token shards, and those become batches in a fixed order.

Only the batches need torch, so they are imported on first use: reading and tokenising text stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from laneway.data.shards import CorruptShardError, TokenFile
from laneway.data.text import Corpus, TextDataConfig, check, documents, prepare
from laneway.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe

if TYPE_CHECKING:
    from laneway.data.loader import BatchLoader, evaluation_batches

__all__ = [
    "BPETokenizer",
    "BatchLoader",
    "ByteTokenizer",
    "Corpus",
    "CorruptShardError",
    "TextDataConfig",
    "TokenFile",
    "Tokenizer",
    "check",
    "documents",
    "evaluation_batches",
    "load_tokenizer",
    "prepare",
    "train_bpe",
]


def __getattr__(name: str) -> Any:
    """Import the batches on first use (PEP 562)."""
    if name not in ("BatchLoader", "evaluation_batches"):
        raise AttributeError(f"module 'laneway.data' has no attribute {name!r}")
    from laneway.data import loader

    return getattr(loader, name)
