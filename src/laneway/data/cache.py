"""Folders that appear whole or not at all, built once however many processes ask at the same time.

A folder is written under a temporary name and renamed when complete. A lock file (``flock``) makes other processes wait
instead of doing the same work; where the file system has no locks the rename still lets exactly one of them win.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Generator
from pathlib import Path

from laneway.core import InputError, LanewayError
from laneway.rundir import FULL_DISK

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

CACHE_VARIABLE = "LANEWAY_CACHE"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def cache_folder(given: str | None) -> Path:
    """The folder for shards, made if need be: ``given``, else $LANEWAY_CACHE, else ~/.cache/laneway. Raises InputError."""
    try:
        path = Path(given or os.environ.get(CACHE_VARIABLE) or "~/.cache/laneway").expanduser()
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        shown = given or os.environ.get(CACHE_VARIABLE) or "~/.cache/laneway"
        raise InputError("data.cache", shown, "a folder that can be made and written to", str(error)) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError("data.cache", str(path), "a folder that can be written to", f"set data.cache or ${CACHE_VARIABLE}")
    return path


@contextlib.contextmanager
def locked(path: Path) -> Generator[bool]:
    """Hold the lock file ``path``; gives False where the file system has no locks. The file is gone afterwards."""
    handle = _acquire(path)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            path.unlink(missing_ok=True)  # before the lock goes, so that nobody can hold a file that has lost its name
            os.close(handle)


def _acquire(path: Path) -> int | None:
    if fcntl is None:
        return None
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _failure(path, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            # The holder before us may have removed the file while we waited: then we hold nothing, and start over.
            if os.fstat(handle).st_nlink:
                return handle
        except BaseException as error:
            os.close(handle)
            if isinstance(error, OSError) and error.errno in _NO_LOCKS:
                path.unlink(missing_ok=True)
                return None
            raise
        os.close(handle)


@contextlib.contextmanager
def new_folder(final: Path) -> Generator[Path]:
    """A temporary folder beside ``final`` that becomes ``final`` when the block ends well, and vanishes when it doesn't.

    Where there is a ``final`` already, made by another process meanwhile, that one stays.
    Any OSError, a full disk above all, comes as a LanewayError.
    """
    temporary = final.with_name(f".building-{final.name}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        yield temporary
        _put_in_place(temporary, final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _failure(final, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def discard(final: Path) -> None:
    """Remove the folder ``final``, which is gone as a whole before its files are."""
    aside = final.with_name(f".discarded-{final.name}-{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):  # another process discarded it first
        os.rename(final, aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(final: Path) -> None:
    """Remove what killed builds of ``final`` left behind. Only for the holder of its lock."""
    for kind in ("building", "discarded"):
        for folder in final.parent.glob(f".{kind}-{final.name}-*"):
            shutil.rmtree(folder, ignore_errors=True)


def _failure(path: Path, error: OSError) -> LanewayError:
    """What to tell of an error of the file system, after everything half-written is gone."""
    if error.errno not in FULL_DISK:
        return LanewayError(f"{path} could not be built: {error}")
    free = shutil.disk_usage(path.parent).free
    return LanewayError(
        f"no space left while building {path} ({error.strerror}; {free / 2**20:.1f} MiB free now); nothing was kept: "
        f"free some space, or choose another folder with data.cache or ${CACHE_VARIABLE}"
    )


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename ``temporary`` to ``final``, durably; where another process was first, its folder stays."""
    try:
        os.rename(temporary, final)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.EACCES) and final.is_dir():
            return
        raise
    if os.name == "posix":
        handle = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
