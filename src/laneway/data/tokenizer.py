"""Text to token ids and back: bytes in the core, BPE through the `tokenizers` package (the ``data`` extra).

Every tokenizer here maps *any* text to ids and back without loss, and text never turns into a special token: where a
corpus holds the characters ``<|endoftext|>``, they are characters. The document separator is therefore unambiguous:
byte 0 for the byte tokenizer (text files may not contain it), the end-of-text token of a BPE vocabulary where it has one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from laneway.core import InputError, nearest, positive_int

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _Tokenizers

# The names under which published vocabularies keep their end-of-text token, in the order in which they are looked for.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")


class Tokenizer(Protocol):
    """What the data code and the command line need of a tokenizer."""

    @property
    def name(self) -> str:
        """``byte`` or ``bpe``."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is below it."""
        ...

    @property
    def separator(self) -> int | None:
        """Id that ends a document, or None where the vocabulary has none."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes whenever the mapping from text to ids may have changed."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; no special token is added or recognised."""
        ...

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of several texts at once, each a 1-D integer array."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of ``tokens``; bytes that are no UTF-8 come as U+FFFD."""
        ...

    def to_json(self) -> str:
        """What ``load_tokenizer`` reads back from a file."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0…255; byte 0 separates documents."""

    name = "byte"
    vocab_size = 256
    separator: int | None = 0
    fingerprint = "byte"

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of ``text`` (undecodable bytes of a command line come back as the bytes they were)."""
        return list(_utf8(text))

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One uint8 array a text."""
        return [np.frombuffer(_utf8(text), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of bytes; raises InputError for an id outside 0…255."""
        ids = [index(token) for token in tokens]
        wrong = next((token for token in ids if not 0 <= token < 256), None)
        if wrong is not None:
            raise InputError("tokens", wrong, "byte values from 0 to 255")
        return bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """A marker file; there is nothing to learn in a byte tokenizer."""
        return json.dumps({"laneway_tokenizer": "byte"}) + "\n"


class BPETokenizer:
    """A vocabulary in the JSON format of the `tokenizers` package.

    Args:
        inner: the package's tokenizer; truncation and padding are switched off.
    """

    name = "bpe"

    def __init__(self, inner: _Tokenizers) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # special tokens in the text are read as the characters they are written with
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self._inner = inner
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self.separator: int | None = next((vocabulary[name] for name in END_OF_TEXT if name in vocabulary), None)
        self.fingerprint = "bpe-" + hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``."""
        return self._inner.encode(_characters(text), add_special_tokens=False).ids

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One uint32 array a text; the package spreads the texts over the cores."""
        found = self._inner.encode_batch([_characters(text) for text in texts], add_special_tokens=False)
        return [np.asarray(item.ids, dtype=np.uint32) for item in found]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of ``tokens``, special tokens spelled out; raises InputError for an id outside the vocabulary."""
        ids = [index(token) for token in tokens]
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise InputError("tokens", wrong, f"token ids from 0 to {self.vocab_size - 1}")
        return self._inner.decode(ids, skip_special_tokens=False)

    def to_json(self) -> str:
        """The vocabulary in the package's own format."""
        return self._inner.to_str()


def load_tokenizer(given: str, field: str = "data.tokenizer") -> Tokenizer:
    """The tokenizer named ``given``: ``byte`` or the path of a JSON file (of `tokenizers`, or from ``to_json``).

    Raises InputError for an unknown name, an unreadable file, or where the ``data`` extra is needed and absent.
    """
    if given == "byte":
        return ByteTokenizer()
    accepted = "'byte' or the path of a tokenizer.json"
    try:
        path = Path(given).expanduser()
        if not path.is_file():
            close = nearest(given, ["byte"])
            raise InputError(field, given, accepted, f"did you mean {close!r}?" if close else "there is no such file")
        text = path.read_text("utf-8")
        content = json.loads(text)
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(field, given, accepted, f"the file cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise InputError(field, given, accepted, "the file holds no JSON object")
    if content.get("laneway_tokenizer") == "byte":
        return ByteTokenizer()
    package = _tokenizers_package(field, given)
    try:
        inner = package.Tokenizer.from_str(text)
    except Exception as error:  # the package raises bare Exception for whatever is wrong with the file
        raise InputError(field, given, accepted, f"`tokenizers` cannot read it ({error})") from error
    if not inner.get_vocab_size():
        raise InputError(field, given, accepted, "its vocabulary is empty")
    return BPETokenizer(inner)


def train_bpe(texts: Iterable[str], vocab_size: int, separator: str = END_OF_TEXT[0]) -> BPETokenizer:
    """Learn a byte-level BPE vocabulary: all 256 bytes, ``separator``, and merges until ``vocab_size`` (or no pair is left).

    Write it with ``Path(...).write_text(tokenizer.to_json())`` and name that file in ``data.tokenizer``.
    ``separator`` must be one of ``END_OF_TEXT``, or it would not be found again. Raises InputError.
    """
    positive_int("vocab_size", vocab_size, at_least=257)
    if separator not in END_OF_TEXT:
        raise InputError("separator", separator, "one of " + ", ".join(END_OF_TEXT))
    package = _tokenizers_package("vocab_size", vocab_size)
    inner = package.Tokenizer(package.models.BPE())
    inner.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[separator],
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(_non_empty(texts), trainer)
    return BPETokenizer(inner)


def _non_empty(texts: Iterable[str]) -> Iterator[str]:
    """``texts`` as they come; raises InputError where there is not a single character, of which nothing can be learnt."""
    empty = True
    for text in texts:
        empty = empty and not text
        yield _characters(text)
    if empty:
        raise InputError("texts", "no text", "at least one text that is not empty")


def _tokenizers_package(field: str, given: object) -> Any:
    """The `tokenizers` package with the submodules used here, or an InputError that says how to get it."""
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        hint = "a BPE vocabulary needs the `tokenizers` package: pip install 'laneway[data]'"
        raise InputError(field, given, "'byte' while that package is absent", hint) from error
    return tokenizers


def _utf8(text: str) -> bytes:
    """UTF-8 of ``text``; the escapes that Python makes of a command line's undecodable bytes become those bytes again."""
    try:
        return text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise InputError("text", text[error.start], "characters that UTF-8 can carry", "it is a lone surrogate") from error


def _characters(text: str) -> str:
    """``text`` as UTF-8 can carry it, since a vocabulary of characters has no place for single undecodable bytes."""
    return _utf8(text).decode("utf-8", errors="replace")
