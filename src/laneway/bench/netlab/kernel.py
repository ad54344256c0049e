"""Linux system calls that Python 3.11 lacks."""

from __future__ import annotations

import ctypes
import functools
import os
import signal

__all__ = ["NEWNET", "NEWNS", "NEWPID", "NEWUSER", "NEWUTS", "die_with_parent", "mount", "setns", "unshare"]

NEWNS, NEWUTS, NEWUSER, NEWPID, NEWNET = 0x00020000, 0x04000000, 0x10000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc(), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """New namespaces for this process; NEWPID takes effect for its children. NEWUSER makes it root in the new one."""
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", flags)
    if flags & NEWUSER:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def setns(path: str, kind: int) -> None:
    """Enter the namespace that ``path`` stands for."""
    file = os.open(path, os.O_RDONLY)
    try:
        _call("setns", file, kind)
    finally:
        os.close(file)


def sethostname(name: str) -> None:
    """Name of the host in this UTS namespace."""
    raw = name.encode()
    _call("sethostname", raw, len(raw))


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0) -> None:
    """mount(2)."""
    _call("mount", *(None if text is None else text.encode() for text in (source, target, kind)), flags, None)


def bind(source: str, target: str) -> None:
    """The file ``source`` shows under the name ``target`` too."""
    mount(source, target, None, MS_BIND)


def private_mounts() -> None:
    """Nothing that is mounted in this mount namespace shows elsewhere."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)


def die_with_parent() -> None:
    """SIGKILL for this process when the thread that started it ends. Look afterwards whether that one ended before the call."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
