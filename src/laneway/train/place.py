"""Where a run lives: choosing its folder, and holding it so that no second process writes there."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from laneway.checkpoint.atomic import explain
from laneway.core import InputError, LanewayError
from laneway.rundir import RunDirectory
from laneway.train.ranks import Ranks

LOCK = ".lock"


@contextmanager
def claimed(folder: str | Path, resume: bool | None, patience: float = 0.0) -> Generator[RunDirectory]:
    """Hold ``folder`` as this process's run directory.

    The lock is the operating system's: it goes when the process goes, however that happens.

    Args:
        folder: it is made where there is none.
        resume: whether it must hold a run; None: it may.
        patience: seconds to wait for a process that holds it, such as a former rank 0 that has just lost contact.

    Raises:
        InputError: the folder is in use, holds a run already (without ``resume``), holds none (with it), or can't be written.
    """
    folder = Path(folder)
    if resume and not (folder / "config.toml").is_file():
        raise InputError("resume", str(folder), "the folder of an earlier run", "leave --resume out to start a new run there")
    if resume is False and (folder / "config.toml").exists():
        if in_use(folder):
            _lock(folder).close()  # raises, and names the process: a run that is being written can't be continued
        raise _taken(folder)
    lock = _lock_within(folder, patience)
    try:
        # A process that held the folder between the look above and the lock may have started a run in it.
        if resume is False and (folder / "config.toml").exists():
            raise _taken(folder)
        yield RunDirectory(folder)
    finally:
        if not (folder / "config.toml").exists():
            _leave_nothing(folder)
        lock.close()


def _taken(folder: Path) -> InputError:
    hint = f"continue it with `--resume --out {folder}`, or choose another --out"
    return InputError("out", str(folder), "a folder that holds no run yet", hint)


def _leave_nothing(folder: Path) -> None:
    """Remove a folder in which no run began (its text was unusable, say), unless it holds something else."""
    (folder / LOCK).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def _lock_within(folder: Path, patience: float) -> IO[str]:
    until = time.monotonic() + patience
    while time.monotonic() < until and in_use(folder):
        time.sleep(0.1)
    return _lock(folder)


def _lock(folder: Path) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise InputError("out", str(folder), "a folder that can be made and written", error.strerror) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        hint = "wait for it, stop it, or choose another --out"
        raise InputError(
            "out", str(folder), "a run directory no process is using", f"process {owner} is writing to it; {hint}"
        ) from None
    if not _same_file(lock, folder / LOCK):  # its owner removed it between our opening and locking it
        lock.close()
        return _lock(folder)
    lock.seek(0)
    lock.truncate()
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def _same_file(lock: IO[str], path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat())


def free_folder(wanted: str | Path) -> Path:
    """``wanted`` if it holds no run and is not in use, else the first free one of ``wanted-2``, ``wanted-3``, …"""
    wanted = Path(wanted)
    number, folder = 1, wanted
    while (folder / "config.toml").exists() or in_use(folder):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def newest_run(wanted: str | Path) -> Path:
    """Of ``wanted``, ``wanted-2``, … the run that was written to last; ``wanted`` itself where there is none."""
    wanted = Path(wanted)
    runs = [p for p in wanted.parent.glob(f"{wanted.name}*") if p == wanted or p.name.removeprefix(f"{wanted.name}-").isdigit()]
    runs = [run for run in runs if (run / "config.toml").is_file()]
    return max(runs, key=_last_written, default=wanted)


def _last_written(folder: Path) -> float:
    run = RunDirectory(folder)
    return max(path.stat().st_mtime for path in (run.config, run.events, run.metrics()) if path.exists())


def in_use(folder: Path) -> bool:
    """Whether a live process holds ``folder``."""
    try:
        with (folder / LOCK).open("r", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextmanager
def disk_errors(folder: Path) -> Generator[None]:
    """A full disk, a missing permission and the like become one line that a user can act on."""
    try:
        yield
    except OSError as error:
        raise LanewayError(f"the run stopped: {explain(error, folder)}") from error


@contextmanager
def run_folder(
    ranks: Ranks, out: Path, resume: bool | None, spare: bool, patience: float
) -> Generator[tuple[RunDirectory, bool]]:
    """The run directory, held by rank 0 for as long as the block runs, and whether to go on with the run in it."""
    with ExitStack() as held:

        def hold() -> tuple[RunDirectory, bool]:
            folder = free_folder(out) if spare and resume is False else out
            run = held.enter_context(claimed(folder, resume, patience))
            return run, run.config.is_file() if resume is None else resume

        yield ranks.on_first(hold)
