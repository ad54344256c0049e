"""What the data code must not need: torch for text, memory for size; and what it must say while it works."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import laneway.data
from laneway.core import LanewayError
from laneway.data import BatchLoader, TextDataConfig, cache, documents, evaluation_batches, prepare, progress
from laneway.data.sources import find_sources


class Endless:
    """Tokens of a corpus far larger than any memory: each is its own position."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: slice) -> np.ndarray:
        return np.arange(key.start, key.stop)


def peak_bytes(work) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_text_needs_no_torch(texts: Path, tmp_path: Path) -> None:
    code = (
        "import sys, laneway.data as data\n"
        f"data.prepare(data.TextDataConfig(path={str(texts)!r}, cache={str(tmp_path / 'cache')!r}))\n"
        "assert 'torch' not in sys.modules\n"
        "data.BatchLoader\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(hasattr(laneway.data, name) for name in laneway.data.__all__)
    with pytest.raises(AttributeError, match=r"module 'laneway\.data' has no attribute 'Batchloader'"):
        laneway.data.Batchloader  # noqa: B018 - the look-up is the test


def test_batches_of_a_huge_corpus_need_the_memory_of_a_batch() -> None:
    tokens, rows, context = Endless(10**13), 16, 512

    def work() -> None:
        loader = BatchLoader(tokens, context, rows, seed=0)
        loader.load_state_dict({**loader.state_dict(), "position": loader.windows - rows // 2})
        inputs, targets = next(loader)
        assert loader.epoch == 1
        assert (targets - inputs == 1).all()
        assert int(inputs.max()) > 10**12
        next(evaluation_batches(tokens, context, rows))

    next(BatchLoader(Endless(2000), 10, 1, seed=0))  # what is imported and cached once is not counted
    assert peak_bytes(work) < 20 * rows * context * 8


def test_a_large_file_is_read_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    path.write_text("a line of an ordinary length, as text has them\n" * 1_000_000)
    size = path.stat().st_size
    assert size == 47_000_000
    config = TextDataConfig(path=str(path), cache=str(tmp_path / "cache"), validation_fraction=0.01)
    assert peak_bytes(lambda: prepare(config)) < size / 3
    assert peak_bytes(lambda: sum(len(piece.text) for piece in find_sources(str(path)).pieces(2**16))) < 2**20


def test_long_work_is_shown_and_short_work_is_not(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    prepare(TextDataConfig(path=str(texts), cache=str(tmp_path / "quick")))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    prepare(TextDataConfig(path=str(texts), cache=str(tmp_path / "shown")))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"tokenising {texts}: ")
    assert " %, about " in lines[0]
    assert lines[-1] == f"tokenising {texts}: done in 0 s"


def test_left_out_library_files_are_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "good.py").write_text("x = 1  # a line of code\n" * 2000)
    for number in range(5):
        (tmp_path / "lib" / f"bad{number}.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    for _ in range(2):
        prepare(TextDataConfig(cache=str(tmp_path / "cache")))
    said = "stdlib: left out 5 files that are no text in their declared encoding: bad0.py, bad1.py, bad2.py …\n"
    assert capsys.readouterr().err == said


def test_documents_come_whole_and_empty_ones_not_at_all(tmp_path: Path) -> None:
    long = "a long line without end " * 100_000
    for name, content in {"a.txt": long, "b.txt": "", "c.txt": "short"}.items():
        (tmp_path / name).write_text(content)
    assert list(documents(TextDataConfig(path=str(tmp_path)))) == [long, "short"]


def test_a_disk_too_full_for_a_lock_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "open", full)
    with (
        pytest.raises(LanewayError, match=r"no space left while building .*MiB free now.*nothing was kept"),
        cache.locked(tmp_path / "l"),
    ):
        pass
