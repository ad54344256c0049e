from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.core import LanewayError
from laneway.data import shards
from laneway.data.shards import MANIFEST, CorruptShardError, ShardWriter, open_splits, read_manifest, token_dtype, write_manifest


def write(folder: Path, vocab_size: int, train: list[int], validation: list[int]) -> Path:
    """A shard folder with these ids."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = {}
    for name, ids in {"train": train, "validation": validation}.items():
        with ShardWriter(folder / f"{name}.bin", vocab_size) as writer:
            for start in range(0, len(ids), 3):
                part = np.array(ids[start : start + 3], dtype=np.int64)
                writer.write(part, 2 * len(part))
            writer.documents = 1
        entries[name] = writer.entry()
    write_manifest(folder, {"dtype": token_dtype(vocab_size).str, "splits": entries})
    return folder


def open_all(folder: Path, verify: bool = False):
    return open_splits(folder, read_manifest(folder), "a test", verify)


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "size"),
    [(2, "|u1", 1), (256, "|u1", 1), (257, "<u2", 2), (2**16, "<u2", 2), (2**16 + 1, "<u4", 4), (2**32, "<u4", 4)],
)
def test_the_narrowest_type_that_holds_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str, size: int) -> None:
    ids = [0, vocab_size - 1, 1, vocab_size // 2]
    folder = write(tmp_path, vocab_size, ids, ids[::-1])
    assert token_dtype(vocab_size).str == dtype
    assert (folder / "train.bin").read_bytes() == b"".join(item.to_bytes(size, "little") for item in ids)
    splits = open_all(folder)
    assert splits["train"].array.tolist() == ids
    assert splits["validation"][1:3].tolist() == ids[::-1][1:3]
    assert len(splits["train"]) == 4
    assert splits["train"].text_bytes == 8
    assert splits["train"].label == "train split of a test"


def test_the_file_is_mapped_not_read_and_cannot_be_written(tmp_path: Path) -> None:
    array = open_all(write(tmp_path, 256, [1, 2, 3], [4]))["train"].array
    assert isinstance(array, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 9


def test_a_token_file_travels_as_its_path(tmp_path: Path) -> None:
    file = open_all(write(tmp_path, 2**16, list(range(5000)), [4]))["train"]
    assert file[:3].tolist() == [0, 1, 2]
    packed = pickle.dumps(file)
    assert len(packed) < 1000
    assert pickle.loads(packed)[4998:].tolist() == [4998, 4999]


def test_an_empty_split_is_an_empty_array(tmp_path: Path) -> None:
    assert open_all(write(tmp_path, 256, [1], []))["validation"].array.shape == (0,)


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LanewayError, match="gave id 300 with a vocabulary of 300"):
        write(tmp_path, 300, [1, 300], [1])


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_any_flipped_bit_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = write(tmp_path_factory.mktemp("flip"), 300, list(range(200)), list(range(90)))
    name = data.draw(st.sampled_from(["train.bin", "validation.bin", MANIFEST]))
    raw = bytearray((folder / name).read_bytes())
    place, bit = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, 7))
    before = json.loads(raw) if name == MANIFEST else None
    raw[place] ^= 1 << bit
    (folder / name).write_bytes(raw)
    try:
        same = before is not None and json.loads(raw) == before  # white space may change without harm
    except ValueError:
        same = False
    if same:
        open_all(folder)
    else:
        with pytest.raises(CorruptShardError, match=name.replace(".", r"\.")):
            open_all(folder)


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", MANIFEST])
def test_a_file_cut_anywhere_or_missing_is_noticed(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, 256, list(range(50)), list(range(20)))
    raw = (folder / name).read_bytes()
    for length in (*range(0, len(raw), max(1, len(raw) // 25)), len(raw) - 1):
        (folder / name).write_bytes(raw[:length])
        with pytest.raises(CorruptShardError, match=str(folder)):
            open_all(folder)
    (folder / name).unlink()
    with pytest.raises(CorruptShardError, match=str(folder)):
        open_all(folder)


def test_a_large_shard_is_checked_by_size_and_in_full_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ALWAYS_CHECKED_BYTES", 10)
    folder = write(tmp_path, 256, list(range(50)), list(range(20)))
    raw = bytearray((folder / "train.bin").read_bytes())
    raw[7] ^= 1
    (folder / "train.bin").write_bytes(raw)
    assert len(open_all(folder)["train"].array) == 50
    with pytest.raises(CorruptShardError, match=r"train\.bin is corrupt: its content does not match its checksum"):
        open_all(folder, verify=True)
    (folder / "train.bin").write_bytes(raw[:-1])
    with pytest.raises(CorruptShardError, match=r"train\.bin has 49 bytes instead of 50"):
        open_all(folder)


def test_a_manifest_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "VERSION", 99)
    folder = write(tmp_path, 256, [1], [2])
    monkeypatch.undo()
    with pytest.raises(CorruptShardError, match="in another format than laneway-tokens version 1"):
        read_manifest(folder)


def test_bits_per_byte() -> None:
    assert shards.bits_per_byte(math.log(256), 1.0) == pytest.approx(8)
    assert shards.bits_per_byte(math.log(2) * 6, 3.0) == pytest.approx(2)
