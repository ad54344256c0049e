"""Several processes, killed processes, full disks: real ones, each in its own Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laneway.core import LanewayError
from laneway.data import TextDataConfig, cache, prepare

# What a child runs: the call under test, with one line for each build it really did.
CHILD = """
import sys, time
from pathlib import Path
from laneway.core import LanewayError
from laneway.data import TextDataConfig, prepare, text
{before}
real = text.build
def counted(*arguments):
    with open({log!r}, "a") as log:
        log.write("build\\n")
    return real(*arguments)
text.build = counted
while {gate!r} and not Path({gate!r}).exists():
    time.sleep(0.001)
try:
    corpus = prepare(TextDataConfig(path={texts!r}, cache={folder!r}))
    corpus.train.verify()
    print(corpus.folder.name, corpus.fingerprint)
except LanewayError as error:
    print(type(error).__name__, error)
    sys.exit(7)
"""


def start(texts: Path, folder: Path, log: Path, before: str = "", gate: str = "") -> subprocess.Popen[str]:
    code = CHILD.format(before=before, log=str(log), gate=gate, texts=str(texts), folder=str(folder))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=100)
    return child.returncode, out, err


@pytest.mark.parametrize(("before", "builds"), [("", {1}), ("from laneway.data import cache; cache.fcntl = None", {1, 2, 3})])
def test_processes_that_build_at_once_get_one_corpus(texts: Path, tmp_path: Path, before: str, builds: set[int]) -> None:
    """With locks one process builds; on a file system without them several may, and all still agree."""
    folder, log, gate = tmp_path / "cache", tmp_path / "log", tmp_path / "gate"
    children = [start(texts, folder, log, before, str(gate)) for _ in range(3)]
    time.sleep(0.5)
    gate.touch()
    results = [finish(child) for child in children]
    assert [code for code, _, _ in results] == [0, 0, 0], results
    assert len({out for _, out, _ in results}) == 1
    assert log.read_text().count("build") in builds
    assert os.listdir(folder) == [results[0][1].split()[0]]


def test_a_build_that_was_killed_leaves_nothing_after_the_next(texts: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "cache", tmp_path / "log"
    kill = "import os; from laneway.data import build; build.write_manifest = lambda *_: os.kill(os.getpid(), 9)"
    code, out, _ = finish(start(texts, folder, log, kill))
    assert (code, out) == (-signal.SIGKILL, "")
    left = sorted(os.listdir(folder))
    assert [name.split("-")[0] for name in left] == [".building", ".lock"]
    assert len(list((folder / left[0]).iterdir())) == 2

    corpus = prepare(TextDataConfig(path=str(texts), cache=str(folder)))
    corpus.train.verify()
    assert os.listdir(folder) == [corpus.folder.name]


def test_an_interrupted_build_leaves_nothing(texts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    interrupt = "from laneway.data import build\ndef stop(*_):\n    raise KeyboardInterrupt\nbuild.write_manifest = stop"
    code, _, err = finish(start(texts, folder, tmp_path / "log", interrupt))
    assert code != 0
    assert "KeyboardInterrupt" in err
    assert os.listdir(folder) == []


def assert_full(code: int, out: str, err: str, folder: Path) -> None:
    assert code == 7, err
    assert out.startswith("LanewayError no space left while building"), out
    assert "nothing was kept" in out
    assert out.count("\n") == 1
    assert err == ""
    assert os.listdir(folder) == []


def test_a_limit_on_file_size_is_a_full_disk(texts: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "cache", tmp_path / "log"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"
    assert_full(*finish(start(texts, folder, log, limit)), folder)
    assert finish(start(texts, folder, log))[0] == 0


@pytest.fixture
def tiny_disk(tmp_path: Path):
    """A real file system of 128 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(folder)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a tiny disk can only be mounted by root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(texts: Path, tmp_path: Path, tiny_disk: Path) -> None:
    assert_full(*finish(start(texts, tiny_disk, tmp_path / "log")), tiny_disk)
    small = texts / "json" / "tool.py"
    corpus = prepare(TextDataConfig(path=str(small), cache=str(tiny_disk), validation_fraction=0.3))
    assert corpus.train.tokens + corpus.validation.tokens > 2000


def test_an_error_that_is_no_full_disk_is_told_as_it_is(tmp_path: Path) -> None:
    with (
        pytest.raises(LanewayError, match=r"corpus could not be built: .*Permission denied"),
        cache.new_folder(tmp_path / "corpus"),
    ):
        raise PermissionError(13, "Permission denied")
    assert os.listdir(tmp_path) == []


def test_the_first_folder_stays(tmp_path: Path) -> None:
    final = tmp_path / "corpus"
    for content in ("one", "two"):
        with cache.new_folder(final) as folder:
            assert folder != final
            (folder / content).write_text(content)
    assert [path.name for path in final.iterdir()] == ["one"]
    with pytest.raises(ZeroDivisionError), cache.new_folder(final) as folder:
        (folder / "three").write_text(str(1 / 0))
    assert [path.name for path in final.iterdir()] == ["one"]
    assert os.listdir(tmp_path) == ["corpus"]
    cache.discard(final)
    cache.discard(final)
    assert os.listdir(tmp_path) == []


def test_leftovers_of_other_folders_stay(tmp_path: Path) -> None:
    for name in (".building-a-1", ".discarded-a-2", ".building-b-1", "a"):
        (tmp_path / name).mkdir()
    cache.remove_leftovers(tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == [".building-b-1", "a"]


def test_a_lock_file_removed_under_a_waiting_process_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lock we get belongs to a file that has lost its name, as after a holder that finished: it must not count."""
    path = tmp_path / "lock"
    real, taken = cache.fcntl.flock, []

    def flock(handle: int, kind: int) -> None:
        real(handle, kind)
        taken.append(handle)
        if len(taken) == 1:
            path.unlink()

    monkeypatch.setattr(cache.fcntl, "flock", flock)
    with cache.locked(path) as alone:
        assert alone
        assert path.exists()
        assert len(taken) == 2
    assert not path.exists()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(cache.fcntl, "flock", flock)
    with cache.locked(tmp_path / "lock") as alone:
        assert not alone
    assert os.listdir(tmp_path) == []
