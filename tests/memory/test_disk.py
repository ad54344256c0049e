"""The disk tier's file: it vanishes however the process ends, and what the disk refuses becomes an error."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import Ends, noise, same

from laneway.core import InputError, LanewayError
from laneway.memory import backing
from laneway.memory.backing import remove_stale
from laneway.memory.disk import DiskTier

MIB = 1 << 20


@pytest.fixture(params=["unnamed", "unlinked", "named"])
def file_system(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """File systems that know O_TMPFILE, that don't, and that don't unlink what is open either."""
    real_open, real_unlink = os.open, os.unlink

    def no_unnamed(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
        return real_open(path, flags, *rest)

    def no_unlink_while_open(path: Any) -> None:
        monkeypatch.setattr(backing.os, "unlink", real_unlink)  # after this one it is closed
        raise OSError(errno.EBUSY, "in use")

    if request.param != "unnamed":
        monkeypatch.setattr(backing.os, "open", no_unnamed)
    if request.param == "named":
        monkeypatch.setattr(backing.os, "unlink", no_unlink_while_open)
    return str(request.param)


def test_nothing_is_left_after_closing(file_system: str, tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIB)
    assert len(list(tmp_path.iterdir())) == (file_system == "named")
    source, target = noise(300_000), noise(300_000)
    slot = tier.allocate(300_000)
    tier.write(slot, source, Ends()).wait()
    tier.read(slot, target, Ends()).wait()
    assert same(source, target)
    tier.close()
    tier.close()
    assert list(tmp_path.iterdir()) == []


def test_the_file_has_its_full_size_from_the_start(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 5 * MIB + 1)
    found = os.fstat(tier._file.fd)
    assert tier.capacity == found.st_size == 5 * MIB + 4096
    assert found.st_blocks * 512 >= found.st_size
    tier.close()


PROGRAM = """
import sys, time
import torch
from laneway.memory.disk import DiskTier
tier = DiskTier(sys.argv[1], 1 << 20)
data = torch.full((1000,), int(sys.argv[2]), dtype=torch.uint8).untyped_storage()
slots = [tier.allocate(1000) for _ in range(100)]
for slot in slots:
    tier.write(slot, data, lambda error: None).wait()
print("ready", flush=True)
sys.stdin.readline()
for slot in slots:
    back = torch.zeros(1000, dtype=torch.uint8)
    tier.read(slot, back.untyped_storage(), lambda error: None).wait()
    assert bool((back == int(sys.argv[2])).all())
print("right", flush=True)
"""


def start(folder: Path, number: int) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )


def test_killed_processes_leave_nothing_and_living_ones_share_a_folder(tmp_path: Path) -> None:
    ours, data = DiskTier(tmp_path, MIB), noise(MIB)
    slot = ours.allocate(MIB)
    first, second = (start(tmp_path, number) for number in (7, 8))
    ours.write(slot, data, Ends()).wait()
    for process in (first, second):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    assert list(tmp_path.iterdir()) == []
    second.send_signal(signal.SIGKILL)
    second.communicate(timeout=60)
    assert first.communicate("go\n", timeout=60)[0] == "right\n"
    back = torch.UntypedStorage(MIB)
    ours.read(slot, back, Ends()).wait()
    assert same(data, back)
    ours.close()
    assert (first.returncode, second.returncode) == (0, -signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def dead_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_named_files_of_dead_processes_are_removed_and_others_stay(tmp_path: Path) -> None:
    host, dead = socket.gethostname(), dead_process()
    stale = tmp_path / f"laneway-tier.{host}.{dead}.00ff"
    kept = [
        tmp_path / f"laneway-tier.{host}.{os.getpid()}.00ff",
        tmp_path / f"laneway-tier.elsewhere.{dead}.00ff",
        tmp_path / f"laneway-tier.{host}.{dead}.notes",
        tmp_path / "data.bin",
    ]
    held = tmp_path / f"laneway-tier.{host}.{dead}.00aa"  # its owner has another number in another container
    for path in (stale, held, *kept):
        path.write_bytes(b"x")
    import fcntl

    with held.open("rb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        DiskTier(tmp_path, MIB).close()
    assert sorted(tmp_path.iterdir()) == sorted([held, *kept])
    assert remove_stale(tmp_path) == [held]


def test_too_little_room_names_folder_and_bytes(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(LanewayError, match=rf"{tmp_path} has \d+ bytes free, {2 * free // 4096 * 4096} are needed"):
        DiskTier(tmp_path, 2 * free // 4096 * 4096)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_reservation_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(backing.os, "posix_fallocate", refuse)
    with pytest.raises(LanewayError, match=rf"{tmp_path} refused a file of {MIB} bytes: No space left"):
        DiskTier(tmp_path, MIB)
    assert len(os.listdir("/proc/self/fd")) == before


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="folder"):
        DiskTier(tmp_path / "missing", MIB)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="folder"):
        DiskTier(tmp_path / "file", MIB)
    with pytest.raises(InputError, match="capacity"):
        DiskTier(tmp_path, 0)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_read_only_folder(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(backing.os, "open", refuse)
    with pytest.raises(LanewayError, match=f"no file can be made in {tmp_path}: {os.strerror(number)}"):
        DiskTier(tmp_path, MIB)


def test_a_folder_without_rights(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("needs a user who is not root: root may write anywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(LanewayError, match="Permission denied"):
        DiskTier(tmp_path, MIB)
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("direct", [None, False])
def test_a_file_that_was_cut_is_an_error_of_the_read(tmp_path: Path, direct: bool | None) -> None:
    tier = DiskTier(tmp_path, MIB, direct=direct)
    slots = [tier.allocate(100_000) for _ in range(2)]
    for slot in slots:
        tier.write(slot, noise(100_000), Ends()).wait()
    os.ftruncate(tier._file.fd, 4096)
    ends = Ends()
    for slot in slots:
        with pytest.raises(OSError, match="could not be read"):
            tier.read(slot, noise(100_000), ends).wait()
    assert [getattr(e, "errno", None) for e in ends.errors] == [errno.EIO] * 2
    tier.close()


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("step", [1, 4096, 5000, 12_288])
def test_short_writes_and_reads_go_on(tmp_path: Path, step: int, direct: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that moves less than it was asked to is followed by another for the rest."""
    tier = DiskTier(tmp_path, MIB, direct=direct)
    if tier.direct and step < 4096:
        tier.close()
        pytest.skip("direct IO moves whole blocks")
    real_write, real_read = os.pwrite, os.preadv

    def short_write(fd: int, data: Any, offset: int) -> int:
        return min(real_write(fd, data, offset), step)

    def short_read(fd: int, buffers: list[Any], offset: int) -> int:
        return min(real_read(fd, buffers, offset), step)

    nbytes = 999 if step == 1 else 99_999
    source, target = noise(nbytes), noise(nbytes)
    slot = tier.allocate(nbytes)
    monkeypatch.setattr(backing.os, "pwrite", short_write)
    monkeypatch.setattr(backing.os, "preadv", short_read)
    tier.write(slot, source, Ends()).wait()
    tier.read(slot, target, Ends()).wait()
    assert same(source, target)
    tier.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_what_the_disk_refuses_is_the_transfers_error(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, MIB)
    slot, ends = tier.allocate(5000), Ends()

    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(backing.os, "pwrite", refuse)
        with pytest.raises(OSError, match=os.strerror(number)):
            tier.write(slot, noise(5000), ends).wait()
    assert getattr(ends.errors[0], "errno", None) == number
    source, target = noise(5000), noise(5000)
    tier.write(slot, source, ends).wait()
    tier.read(slot, target, ends).wait()
    assert same(source, target)
    tier.release(slot)
    assert tier.used == 0
    tier.close()


def test_without_direct_io_there_is_one_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backing.BackingFile, "_bypass_cache", lambda self: False)
    with caplog.at_level(logging.WARNING, logger="laneway"):
        tier = DiskTier(tmp_path, MIB)
    assert not tier.direct
    assert [r.getMessage() for r in caplog.records] == [
        f"disk tier: the file system of {tmp_path} takes no O_DIRECT; the page cache stands between"
    ]
    tier.close()
    with pytest.raises(InputError, match="direct"):
        DiskTier(tmp_path, MIB, direct=True)


def test_pages_go_straight_where_they_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that begins at a page is handed to the system itself, all but what isn't a whole block."""
    tier = DiskTier(tmp_path, MIB)
    if not tier.direct:
        tier.close()
        pytest.skip("needs a file system with O_DIRECT")
    import mmap

    pages = torch.frombuffer(mmap.mmap(-1, 3 * 4096), dtype=torch.uint8, count=2 * 4096 + 10)
    sizes: list[int] = []
    real = os.pwrite
    monkeypatch.setattr(backing.os, "pwrite", lambda fd, data, at: sizes.append(len(data)) or real(fd, data, at))
    slot = tier.allocate(pages.numel())
    tier.write(slot, pages.untyped_storage(), Ends()).wait()
    assert sizes == [2 * 4096, 4096]
    tier.close()
