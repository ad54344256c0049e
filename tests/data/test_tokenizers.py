from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.core import InputError
from laneway.data import ByteTokenizer, documents, load_tokenizer, train_bpe
from laneway.data.text import TextDataConfig

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def bpe(library: Path):
    pytest.importorskip("tokenizers")
    return train_bpe(documents(TextDataConfig(path=str(library / "json"))), 600)


@given(TEXT)
def test_bytes_round_trip_and_are_utf8(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_many([text])[0].tolist() == ids


def test_bytes_of_a_broken_sequence_decode_to_replacement_characters() -> None:
    assert ByteTokenizer().decode([0x61, 0xE2, 0x82]) == "a\N{REPLACEMENT CHARACTER}"
    assert ByteTokenizer().decode(np.array([104, 105], dtype=np.int64)) == "hi"


def test_undecodable_bytes_of_a_command_line_survive() -> None:
    prompt = b"\xe9t\xe9".decode("utf-8", errors="surrogateescape")
    assert bytes(ByteTokenizer().encode(prompt)) == b"\xe9t\xe9"


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InputError, match="lone surrogate"):
        ByteTokenizer().encode("a\ud800")


@pytest.mark.parametrize("wrong", [256, -1])
def test_ids_beyond_a_byte_are_refused(wrong: int) -> None:
    with pytest.raises(InputError, match=rf"^tokens: got {wrong}; accepted: byte values from 0 to 255$"):
        ByteTokenizer().decode([1, wrong])


@given(TEXT)
@settings(deadline=None)
def test_bpe_round_trips_any_text(bpe, text: str) -> None:
    ids = bpe.encode(text)
    assert all(0 <= token < bpe.vocab_size for token in ids)
    assert bpe.decode(ids) == text
    assert bpe.encode_many([text, "and"])[0].tolist() == ids


def test_bpe_learns_shorter_codes_than_bytes(bpe, library: Path) -> None:
    text = (library / "json" / "encoder.py").read_text("utf-8")
    assert bpe.vocab_size == 600
    assert len(bpe.encode(text)) < 0.6 * len(text.encode())


def test_bpe_training_is_deterministic(bpe, library: Path) -> None:
    again = train_bpe(documents(TextDataConfig(path=str(library / "json"))), 600)
    assert again.to_json() == bpe.to_json()
    assert again.fingerprint == bpe.fingerprint


def test_text_never_becomes_a_special_token(bpe) -> None:
    ids = bpe.encode("before <|endoftext|> after")
    assert bpe.separator == 0
    assert bpe.separator not in ids
    assert bpe.decode(ids) == "before <|endoftext|> after"
    assert bpe.decode([bpe.separator]) == "<|endoftext|>"


def test_bpe_from_a_file_is_the_same(bpe, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe.to_json(), "utf-8")
    loaded = load_tokenizer(str(path))
    assert (loaded.name, loaded.vocab_size, loaded.separator) == ("bpe", 600, bpe.separator)
    assert loaded.fingerprint == bpe.fingerprint
    assert loaded.encode("def encode(self):") == bpe.encode("def encode(self):")


def test_truncation_and_padding_in_a_file_are_switched_off(bpe, tmp_path: Path) -> None:
    content = json.loads(bpe.to_json())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), "utf-8")
    assert load_tokenizer(str(path)).encode("a long enough text of many words") == bpe.encode("a long enough text of many words")


def test_bpe_ids_beyond_the_vocabulary_are_refused(bpe) -> None:
    with pytest.raises(InputError, match=r"tokens: got 600; accepted: token ids from 0 to 599"):
        bpe.decode([600])


def test_byte_tokenizer_by_name_and_from_its_file(tmp_path: Path) -> None:
    assert load_tokenizer("byte").vocab_size == 256
    path = tmp_path / "tokenizer.json"
    path.write_text(ByteTokenizer().to_json(), "utf-8")
    assert isinstance(load_tokenizer(str(path)), ByteTokenizer)


def test_a_misspelled_name_gets_a_suggestion() -> None:
    with pytest.raises(InputError, match=r"^data\.tokenizer: got 'bytes'; accepted: 'byte' or .*did you mean 'byte'\?$"):
        load_tokenizer("bytes")


@pytest.mark.parametrize("name", ["nowhere/tokenizer.json", "x" * 5000, "~nobody-of-this-name/x"])
def test_a_missing_file_is_named(name: str) -> None:
    with pytest.raises(InputError, match=r"data\.tokenizer"):
        load_tokenizer(name)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": 1}', "\x00\x01", '{"version": "1.0"}'])
def test_files_that_hold_no_vocabulary(tmp_path: Path, content: str) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(content, "utf-8")
    with pytest.raises(InputError, match=r"data\.tokenizer: got .*tokenizer\.json") as caught:
        load_tokenizer(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {}}', "utf-8")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for call in (lambda: load_tokenizer(str(path)), lambda: train_bpe(["text"], 300)):
        with pytest.raises(InputError, match=r"pip install 'laneway\[data\]'"):
            call()
    assert load_tokenizer("byte").encode("a") == [97]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [((["text"], 256), "vocab_size"), ((["text"], 300, "<mine>"), "separator"), (([], 300), "texts"), ((["", ""], 300), "texts")],
)
def test_training_refuses_what_cannot_be_learnt_from(arguments: tuple, field: str) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(InputError, match=f"^{field}: "):
        train_bpe(*arguments)
