from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.core import InputError, LanewayError
from laneway.data import (
    BatchLoader,
    CorruptShardError,
    TextDataConfig,
    check,
    documents,
    evaluation_batches,
    load_tokenizer,
    prepare,
    text,
    train_bpe,
)
from laneway.data.build import SplitRule, block_bytes
from laneway.data.cache import CACHE_VARIABLE


def stretches(corpus, split: str) -> list[str]:
    """The documents of a split, as its separators part them."""
    ids = corpus.split(split).array
    ends = np.flatnonzero(ids == corpus.tokenizer.separator)
    assert ends[-1] == len(ids) - 1
    assert len(ends) == corpus.split(split).documents
    return [corpus.tokenizer.decode(part[part != corpus.tokenizer.separator]) for part in np.split(ids, ends[:-1] + 1)]


def write_documents(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(parents=True)
    for number, content in enumerate(texts):
        (folder / f"{number:04}.txt").write_bytes(content.encode())
    return folder


def test_real_text_becomes_two_splits_that_together_are_all_of_it(texts: Path, cache: Path) -> None:
    config = TextDataConfig(path=str(texts), cache=str(cache), validation_fraction=0.1)
    corpus = prepare(config)
    whole = list(documents(config))
    assert len(whole) > 15
    found = sum(len(part) for split in ("train", "validation") for part in stretches(corpus, split))
    assert found == sum(map(len, whole))
    assert all(any(part in document for document in whole) for part in stretches(corpus, "validation"))
    share = corpus.validation.text_bytes / (corpus.train.text_bytes + corpus.validation.text_bytes)
    assert share == pytest.approx(0.1, abs=0.01)
    assert corpus.bytes_per_token("train") == corpus.bytes_per_token("validation") == 1
    assert corpus.bits_per_byte(math.log(2)) == pytest.approx(1)


@given(
    st.lists(st.text("abc \nü", max_size=3000), min_size=3, max_size=30),
    st.floats(0.02, 0.6),
)
@settings(deadline=None, max_examples=40)
def test_no_text_is_lost_moved_or_in_both_splits(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str], fraction: float
) -> None:
    """Each document names itself in every line, so a line that is in both splits would show."""
    folder = tmp_path_factory.mktemp("split")
    lines = [
        [f"{number}:{index}:{line}" for index, line in enumerate(content.split("\n"))] for number, content in enumerate(contents)
    ]
    write_documents(folder / "texts", ["\n".join(document) for document in lines])
    try:
        corpus = prepare(TextDataConfig(path=str(folder / "texts"), cache=str(folder / "cache"), validation_fraction=fraction))
    except InputError as error:
        assert "2 tokens in each split" in str(error)  # noqa: PT017 - small corpora may have too little for validation
        return
    parts = {split: "".join(stretches(corpus, split)) for split in ("train", "validation")}
    assert sorted("".join(parts.values())) == sorted("".join("\n".join(document) for document in lines))
    total = sum(len(part.encode()) for part in parts.values())
    limit = block_bytes(total, fraction)
    assert abs(len(parts["validation"].encode()) - fraction * total) <= limit + 1


@given(st.lists(st.integers(1, 100), min_size=1, max_size=300), st.floats(0.01, 0.99))
def test_the_share_of_validation_is_within_a_block_of_its_aim(sizes: list[int], fraction: float) -> None:
    rule = SplitRule(fraction, limit=100)
    validation = 0
    for seen, size in enumerate(sizes, start=1):
        validation += size * (rule.assign(size) == "validation")
        assert abs(validation - fraction * sum(sizes[:seen])) <= 150


def test_the_size_of_a_block_has_no_say_in_where_it_goes() -> None:
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 1000, 20_000)
    rule = SplitRule(0.05, limit=1000)
    split = np.array([rule.assign(int(size)) for size in sizes])
    chosen = sizes[split == "validation"]
    assert len(chosen) > 800
    assert abs(chosen.mean() - sizes.mean()) < 4 * sizes.std() / math.sqrt(len(chosen))


def test_a_long_document_is_cut_and_each_stretch_ends(tmp_path: Path, cache: Path, library: Path) -> None:
    content = (library / "argparse.py").read_text("utf-8")
    (tmp_path / "a.txt").write_text(content)
    corpus = prepare(TextDataConfig(path=str(tmp_path / "a.txt"), cache=str(cache)))
    validation = stretches(corpus, "validation")
    assert len(validation) > 3
    assert all(part in content for part in validation)
    train = stretches(corpus, "train")
    assert len(train) == len(validation) + 1
    woven = train[0] + "".join(held + part for held, part in zip(validation, train[1:], strict=True))
    assert woven == content


def test_json_lines_with_a_named_field(tmp_path: Path, cache: Path) -> None:
    rows = [{"body": f"document {number} " * 20} for number in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = prepare(TextDataConfig(path=str(tmp_path / "a.jsonl"), cache=str(cache), text_field="body"))
    found = stretches(corpus, "train") + stretches(corpus, "validation")
    assert sorted(found) == sorted(row["body"] for row in rows)


def test_the_standard_library_is_the_default(cache: Path) -> None:
    corpus = prepare(TextDataConfig(cache=str(cache)))
    assert corpus.train.tokens > 20 * corpus.validation.tokens * 0.9
    assert corpus.validation.tokens > 100_000
    inputs, _ = next(BatchLoader(corpus.train, 256, 4, seed=0))
    assert inputs.shape == (4, 256)
    assert sum(1 for _ in evaluation_batches(corpus.validation, 256, 4, limit=5)) == 5


def test_bpe_corpus_has_fewer_tokens_and_says_bytes_per_token(texts: Path, cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = train_bpe(documents(TextDataConfig(path=str(texts))), 1000)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    config = TextDataConfig(path=str(texts), cache=str(cache), tokenizer=str(tmp_path / "tokenizer.json"))
    corpus, plain = prepare(config), prepare(TextDataConfig(path=str(texts), cache=str(cache)))
    assert corpus.train.dtype == "<u2"
    assert corpus.train.text_bytes == plain.train.text_bytes
    assert stretches(corpus, "validation") == stretches(plain, "validation")
    assert 2 < corpus.bytes_per_token("train") < 6
    assert corpus.bytes_per_token("train") == plain.train.tokens / corpus.train.tokens
    assert corpus.fingerprint != plain.fingerprint


def test_bpe_without_an_end_of_text_token_has_no_separators(texts: Path, cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = train_bpe(documents(TextDataConfig(path=str(texts / "json"))), 300)
    content = tokenizer.to_json().replace("<|endoftext|>", "<|nothing|>")
    (tmp_path / "tokenizer.json").write_text(content)
    corpus = prepare(TextDataConfig(path=str(texts / "json"), cache=str(cache), tokenizer=str(tmp_path / "tokenizer.json")))
    assert corpus.tokenizer.separator is None
    whole = sum(len(document.encode()) for document in documents(TextDataConfig(path=str(texts / "json"))))
    assert corpus.train.text_bytes + corpus.validation.text_bytes == whole


def test_the_second_time_opens_what_the_first_built(texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TextDataConfig(path=str(texts), cache=str(cache))
    first = prepare(config)
    monkeypatch.setattr(text, "build", None)
    second = prepare(config)
    assert second.folder == first.folder
    assert second.fingerprint == first.fingerprint
    assert sorted(os.listdir(cache)) == [first.folder.name]
    assert sorted(os.listdir(first.folder)) == ["manifest.json", "train.bin", "validation.bin"]


def test_the_same_text_elsewhere_gives_the_same_shards(texts: Path, tmp_path: Path) -> None:
    shutil.copytree(texts, tmp_path / "copy")
    one = prepare(TextDataConfig(path=str(texts), cache=str(tmp_path / "one")))
    two = prepare(TextDataConfig(path=str(tmp_path / "copy"), cache=str(tmp_path / "two")))
    assert one.fingerprint == two.fingerprint
    assert one.folder.name != two.folder.name, "names, sizes and times may be equal by chance: the place counts too"


def test_whatever_changes_the_shards_changes_the_key(texts: Path, cache: Path) -> None:
    config = TextDataConfig(path=str(texts), cache=str(cache))
    folders = [prepare(config).folder]
    target = texts / "json" / "tool.py"
    content = target.read_bytes()

    target.write_bytes(content + b"#")
    folders.append(prepare(config).folder)
    target.write_bytes(content[:-1] + b"#")
    os.utime(target, ns=(1, 1))
    folders.append(prepare(config).folder)
    target.rename(texts / "json" / "other.py")
    folders.append(prepare(config).folder)
    folders.append(prepare(TextDataConfig(path=str(texts), cache=str(cache), validation_fraction=0.06)).folder)
    assert len(set(folders)) == len(folders)


def test_the_default_cache_is_the_variable_then_the_home(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "by variable"))
    assert prepare(TextDataConfig(path=str(texts))).folder.parent == tmp_path / "by variable"
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert prepare(TextDataConfig(path=str(texts))).folder.parent == tmp_path / "home" / ".cache" / "laneway"


def spoil(folder: Path) -> None:
    raw = bytearray((folder / "train.bin").read_bytes())
    raw[1000] ^= 4
    (folder / "train.bin").write_bytes(raw)


def test_a_corrupt_shard_in_the_users_folder_is_an_error_until_asked(texts: Path, cache: Path, capsys) -> None:
    config = TextDataConfig(path=str(texts), cache=str(cache))
    corpus = prepare(config)
    spoil(corpus.folder)
    with pytest.raises(
        CorruptShardError, match=r"train\.bin is corrupt: .*; set data\.rebuild to build it anew, or remove"
    ) as caught:
        prepare(config)
    assert "\n" not in str(caught.value)
    again = prepare(TextDataConfig(path=str(texts), cache=str(cache), rebuild=True))
    assert again.fingerprint == corpus.fingerprint
    again.train.verify()
    assert os.listdir(cache) == [again.folder.name]
    assert capsys.readouterr().err.count("building it anew") == 1
    assert prepare(config).fingerprint == corpus.fingerprint


def test_a_corrupt_shard_in_the_default_folder_is_built_anew(texts: Path, cache: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    corpus = prepare(TextDataConfig(path=str(texts)))
    spoil(corpus.folder)
    prepare(TextDataConfig(path=str(texts))).train.verify()
    assert capsys.readouterr().err.count("building it anew") == 1


def test_verify_reads_large_shards_too(texts: Path, cache: Path, monkeypatch) -> None:
    monkeypatch.setattr("laneway.data.shards.ALWAYS_CHECKED_BYTES", 0)
    config = TextDataConfig(path=str(texts), cache=str(cache))
    spoil(prepare(config).folder)
    prepare(config)
    with pytest.raises(CorruptShardError, match="checksum"):
        prepare(TextDataConfig(path=str(texts), cache=str(cache), verify=True))


def test_a_file_that_changes_while_it_is_read(texts: Path, cache: Path, monkeypatch) -> None:
    target = texts / "json" / "tool.py"

    class Growing(SplitRule):
        def assign(self, size: int) -> str:
            target.write_text("# another text")
            return super().assign(size)

    monkeypatch.setattr("laneway.data.build.SplitRule", Growing)
    with pytest.raises(LanewayError, match=r"tool\.py changed while it was being tokenised"):
        prepare(TextDataConfig(path=str(texts), cache=str(cache)))
    assert os.listdir(cache) == []


def test_a_binary_file_leaves_nothing_behind(texts: Path, cache: Path) -> None:
    (texts / "z.txt").write_bytes(b"\0")
    with pytest.raises(InputError, match=r"z\.txt"):
        prepare(TextDataConfig(path=str(texts), cache=str(cache)))
    assert os.listdir(cache) == []


def test_too_little_text_is_refused_with_the_numbers(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(
        InputError, match=r"at least 2 tokens in each split; it has 6 in train, 0 in validation: .*validation_fraction"
    ):
        prepare(TextDataConfig(path=str(tmp_path / "a.txt"), cache=str(cache)))
    assert os.listdir(cache) == []


def test_a_corpus_shorter_than_a_sequence_is_named_with_its_split(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("a line of text\n" * 100)
    corpus = prepare(TextDataConfig(path=str(tmp_path / "a.txt"), cache=str(cache), validation_fraction=0.5))
    accepted = r"accepted: at least 2001 tokens \(context 2000 \+ 1\); train split of .*a\.txt is too short"
    with pytest.raises(InputError, match=rf"^data: got '\d+ tokens'; {accepted}"):
        BatchLoader(corpus.train, 2000, 1, 0)
    with pytest.raises(InputError, match=r"validation split of .*a\.txt is too short"):
        evaluation_batches(corpus.validation, 2000, 1)


@pytest.mark.parametrize("fraction", [0, 1, 0.0, 1.0, -0.1, 2, math.nan, "0.1", True, None])
def test_validation_fraction_outside_its_range(fraction) -> None:
    with pytest.raises(InputError, match=r"^data\.validation_fraction: got .*; accepted: a number between 0 and 1"):
        TextDataConfig(validation_fraction=fraction)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"path": ""}, "path"),
        ({"path": 3}, "path"),
        ({"tokenizer": ""}, "tokenizer"),
        ({"text_field": ""}, "text_field"),
        ({"cache": 3}, "cache"),
        ({"suffixes": ".txt"}, "suffixes"),
        ({"suffixes": ("txt",)}, "suffixes"),
    ],
)
def test_fields_of_the_wrong_kind(options: dict, field: str) -> None:
    with pytest.raises(InputError, match=rf"^data\.{field}: got "):
        TextDataConfig(**options)


def test_suffixes_may_come_as_a_list() -> None:
    assert TextDataConfig(suffixes=[".md", ".txt"]).suffixes == (".md", ".txt")  # pyrefly: ignore


def test_an_unknown_split_is_refused(texts: Path, cache: Path) -> None:
    with pytest.raises(
        InputError, match=r"^split: got 'valid'; accepted: one of train, validation; did you mean 'validation'\?$"
    ):
        prepare(TextDataConfig(path=str(texts), cache=str(cache))).bytes_per_token("valid")


def test_check_finds_what_is_wrong_without_building(texts: Path, cache: Path) -> None:
    check(TextDataConfig(path=str(texts), cache=str(cache)))
    assert not cache.exists()
    with pytest.raises(InputError, match=r"data\.path"):
        check(TextDataConfig(path=str(texts / "nowhere")))
    with pytest.raises(InputError, match=r"data\.tokenizer"):
        check(TextDataConfig(tokenizer="nowhere.json"))


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_cache_that_cannot_be_a_folder(texts: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"^data\.cache: got '.*file.*'; accepted: a folder"):
        prepare(TextDataConfig(path=str(texts), cache=str(tmp_path / name)))


def test_the_manifest_says_what_the_shards_are(texts: Path, cache: Path) -> None:
    corpus = prepare(TextDataConfig(path=str(texts), cache=str(cache)))
    manifest = json.loads((corpus.folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["dtype"]) == ("laneway-tokens", 1, "|u1")
    assert manifest["tokenizer"] == {
        "name": "byte",
        "vocab_size": 256,
        "separator": 0,
        "fingerprint": load_tokenizer("byte").fingerprint,
    }
    assert manifest["splits"]["train"]["tokens"] == os.path.getsize(corpus.folder / "train.bin")
    assert manifest["source"]["files"] == sum(1 for path in texts.rglob("*") if path.is_file())
