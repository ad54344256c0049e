"""One preallocated file without a name: bytes in and out at offsets, past the page cache where the file system takes that."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import socket
import weakref
from pathlib import Path

from laneway.core import InputError, LanewayError

BLOCK = 4096
NAME = re.compile(r"laneway-tier\.(?P<host>.+)\.(?P<process>\d+)\.[0-9a-f]+")


class BackingFile:
    """A file of ``nbytes`` in ``folder`` that vanishes with this process, however it ends.

    Args:
        nbytes: a multiple of 4096.
        direct: True: O_DIRECT or an error; False: through the page cache; None: O_DIRECT where the file system takes it.

    Attributes:
        direct: whether reads and writes go past the page cache: then addresses, lengths and offsets are multiples of 4096.
        name: where it lies, on file systems that know no files without a name; None elsewhere.
    """

    def __init__(self, folder: Path, nbytes: int, direct: bool | None) -> None:
        self.folder, self.nbytes = folder, nbytes
        self.name: Path | None = None
        if not folder.is_dir():
            raise InputError("folder", str(folder), "a folder that exists")
        remove_stale(folder)
        self._require_room()
        self.fd = self._open()
        self._finalizer = weakref.finalize(self, _discard, self.fd, self.name)
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
            self.direct = direct is not False and self._bypass_cache()
            if direct and not self.direct:
                raise InputError("direct", direct, f"False or None: the file system of {folder} takes no O_DIRECT")
        except OSError as error:
            self.close()
            raise LanewayError(f"disk tier: {folder} refused a file of {nbytes} bytes: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data``; OSError where the file system doesn't take it."""
        at = 0
        while at < len(data):
            at += self._progress(os.pwrite(self.fd, data[at:], offset + at), len(data) - at, "written")
        self._uncache(offset, len(data))

    def read(self, data: memoryview, offset: int) -> None:
        """Fill all of ``data``; OSError where the file ends before or can't be read."""
        at = 0
        while at < len(data):
            at += self._progress(os.preadv(self.fd, [data[at:]], offset + at), len(data) - at, "read")
        self._uncache(offset, len(data))

    def close(self) -> None:
        """Close it, and with that remove it. Safe to call twice."""
        self._finalizer()

    def _progress(self, done: int, wanted: int, what: str) -> int:
        """Bytes to count as done: the next call of direct IO has to begin at a whole block again."""
        if self.direct and done < wanted:
            done -= done % BLOCK
        if done <= 0:
            raise OSError(errno.EIO, f"disk tier: {wanted} bytes could not be {what} in {self.folder}")
        return done

    def _uncache(self, offset: int, nbytes: int) -> None:
        if not self.direct:
            os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _require_room(self) -> None:
        found = os.statvfs(self.folder)
        free = found.f_bavail * found.f_frsize
        if free < self.nbytes:
            raise LanewayError(f"disk tier: {self.folder} has {free} bytes free, {self.nbytes} are needed")

    def _open(self) -> int:
        try:
            return os.open(self.folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
                raise LanewayError(f"disk tier: no file can be made in {self.folder}: {error.strerror}") from error
        return self._open_named()

    def _open_named(self) -> int:
        """On file systems without O_TMPFILE: a file that is unlinked at once, or else named for ``remove_stale`` to find."""
        path = self.folder / f"laneway-tier.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(8)}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LanewayError(f"disk tier: no file can be made in {self.folder}: {error.strerror}") from error
        try:
            os.unlink(path)
        except OSError:
            self.name = path
            _lock(fd)
        return fd

    def _bypass_cache(self) -> bool:
        """Switch O_DIRECT on and try it: some file systems take the flag and refuse the IO."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError:
            return False
        page = memoryview(mmap.mmap(-1, BLOCK))
        try:
            if os.pwrite(self.fd, page, 0) == BLOCK and os.preadv(self.fd, [page], 0) == BLOCK:
                return True
        except OSError:
            pass
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
        return False


def remove_stale(folder: Path) -> list[Path]:
    """Remove the named files of processes of this host that are gone; returns them."""
    removed = []
    for path in folder.glob("laneway-tier.*"):
        found = NAME.fullmatch(path.name)
        if found is None or found["host"] != socket.gethostname() or _alive(int(found["process"])):
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if _lock(fd):  # else its owner lives where process numbers differ: another container
                path.unlink(missing_ok=True)
                removed.append(path)
        except OSError:
            pass
        finally:
            os.close(fd)
    return removed


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _discard(fd: int, name: Path | None) -> None:
    os.close(fd)
    if name is not None:
        name.unlink(missing_ok=True)
