"""Text and batches: a corpus on disk becomes memory-mapped token shards, and those become batches in a fixed order."""

from laneway.data.loader import BatchLoader, evaluation_batches
from laneway.data.shards import CorruptShardError, TokenFile
from laneway.data.text import Corpus, TextDataConfig, check, documents, prepare
from laneway.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe

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
