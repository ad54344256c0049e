"""Where text comes from: one file, a folder, JSON lines, or the interpreter's own standard library.

Text is UTF-8 without NUL bytes; anything else is refused by name, because training on a mis-decoded file only shows much
later. A document is one file, or the text field of one JSON line. It is read in pieces of bounded size, cut after a newline
where there is one, so the largest file needs no more memory than a few pieces (a JSON line is held whole).
"""

from __future__ import annotations

import codecs
import io
import json
import os
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from laneway.core import InputError, nearest

STDLIB = "stdlib"
JSONL_SUFFIXES = (".jsonl", ".ndjson")
# fmt: off
# What counts as text inside a folder unless `data.suffixes` says otherwise.
TEXT_SUFFIXES = (
    ".txt", ".text", ".md", ".markdown", ".rst", ".org", ".adoc", ".tex", ".jsonl", ".ndjson",
    ".py", ".pyi", ".pyx", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".swift",
    ".js", ".ts", ".jsx", ".tsx", ".rb", ".lua", ".jl", ".r", ".scala", ".hs", ".ml", ".pl", ".php", ".sh", ".sql",
    ".html", ".css", ".xml", ".toml", ".yaml", ".yml", ".json", ".ini", ".cfg",
)
# Left out of the standard library: other people's packages, tests and demonstrations, tables and generated text.
STDLIB_LEFT_OUT = frozenset({
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo",
    "encodings", "pydoc_data", "ensurepip", "lib-dynload",
})
# fmt: on
# Files that differ between two machines with the same Python.
STDLIB_LOCAL = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


class Piece(NamedTuple):
    """A stretch of one document: its text, the bytes read from disk for it, and whether the document ends here."""

    text: str
    read: int
    end: bool


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus as it was when it was listed; ``name`` is its path below the corpus, with slashes."""

    path: Path
    name: str
    size: int
    mtime_ns: int

    def unchanged(self) -> bool:
        """Whether size and time of change are still the same."""
        try:
            now = self.path.stat()
        except OSError:
            return False
        return (now.st_size, now.st_mtime_ns) == (self.size, self.mtime_ns)


@dataclass(frozen=True)
class Sources:
    """The files of a corpus in reading order (by name), and how to read them."""

    given: str
    root: Path
    files: tuple[SourceFile, ...]
    text_field: str
    lenient: bool = False
    skipped: list[str] = field(default_factory=list, compare=False)

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self.files)

    def pieces(self, limit: int) -> Iterator[Piece]:
        """All documents in order, in pieces of about ``limit`` bytes. Raises InputError at the first file that is no text.

        Of the standard library only, files that are not text in their declared encoding are left out (their names are
        appended to ``skipped``): a user cannot repair those.
        """
        for file in self.files:
            if self.lenient:
                text = _python_source(file.path)
                if text is None:
                    self.skipped.append(file.name)
                else:
                    yield from cut(text, limit, file.size)
            elif file.path.suffix.lower() in JSONL_SUFFIXES:
                yield from _json_lines(file.path, self.text_field, limit)
            else:
                yield from _text_file(file.path, limit)


def find_sources(given: str, suffixes: Sequence[str] = (), text_field: str = "text") -> Sources:
    """List the files of the corpus ``given``: ``stdlib``, a file, a ``.jsonl`` file or a folder (searched recursively).

    In a folder the files whose suffix is in ``suffixes`` (TEXT_SUFFIXES if empty) count; hidden files and folders don't.
    Raises InputError for a missing path, an empty file, or a folder without text.
    """
    if given == STDLIB:
        return _stdlib()
    accepted = f"{STDLIB!r}, a text file, a .jsonl file or a folder"
    try:
        path = Path(given).expanduser()
        if path.is_dir():
            files = _folder(path, tuple(suffix.lower() for suffix in suffixes) or TEXT_SUFFIXES)
            if not files:
                wanted = " ".join(suffixes) or "the usual text suffixes"
                raise InputError(
                    "data.path", given, "a folder with text files", f"none in it ends in {wanted}; see data.suffixes"
                )
        elif path.is_file():
            files = [_listed(path, path.name)]
        else:
            close = nearest(given, [STDLIB])
            raise InputError(
                "data.path", given, accepted, f"did you mean {close!r}?" if close else "there is no such file or folder"
            )
    except (OSError, RuntimeError) as error:  # RuntimeError: the home of an unknown user
        raise InputError("data.path", given, accepted, str(error)) from error
    if not any(file.size for file in files):
        raise InputError(
            "data.path", given, "text", "the file is empty" if path.is_file() else "all files in the folder are empty"
        )
    return Sources(given, path.resolve(), tuple(files), text_field)


def cut(text: str, limit: int, read: int) -> Iterator[Piece]:
    """A document held in memory as pieces of about ``limit`` characters, cut after the last newline that fits.

    ``read`` is counted with the first piece. An empty document has no piece.
    """
    start = 0
    while start < len(text):
        stop = start + limit
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield Piece(text[start:stop], read if start == 0 else 0, stop >= len(text))
        start = stop


def _listed(path: Path, name: str) -> SourceFile:
    status = path.stat()
    return SourceFile(path, name, status.st_size, status.st_mtime_ns)


def _folder(root: Path, suffixes: tuple[str, ...]) -> list[SourceFile]:
    """Text files below ``root`` by name; links to folders are not followed, so there is no way to go in circles."""
    found = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.suffix.lower() in suffixes and path.is_file():
                found.append(_listed(path, path.relative_to(root).as_posix()))
    return sorted(found, key=lambda file: file.name)


def _raise(error: OSError) -> None:
    raise error


def _stdlib() -> Sources:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in STDLIB_LEFT_OUT and not name.startswith((".", "config-"))]
        for name in names:
            if name.endswith(".py") and not name.startswith(STDLIB_LOCAL):
                files.append(_listed(Path(folder, name), Path(folder, name).relative_to(root).as_posix()))
    if not any(file.size for file in files):
        raise InputError("data.path", STDLIB, "a text file or folder", f"this Python has no library sources in {root}")
    return Sources(STDLIB, root.resolve(), tuple(sorted(files, key=lambda file: file.name)), "", lenient=True)


def _python_source(path: Path) -> str | None:
    """A Python source in its declared encoding (PEP 263), or None where it is not text in it."""
    raw = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        return None
    return None if "\0" in text else text


def _text_file(path: Path, limit: int) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    carry, offset = "", 0
    with _open(path) as file:
        while raw := file.read(limit):
            if (nul := raw.find(b"\0")) >= 0:
                raise _binary(str(path), f"there is a NUL byte at {offset + nul}")
            try:
                text = carry + decoder.decode(raw)
            except UnicodeDecodeError as error:
                raise _binary(str(path), f"near byte {offset + error.start} it is no UTF-8 ({error.reason})") from error
            offset += len(raw)
            # Without a newline everything goes out, so the carry never exceeds one read.
            stop = text.rfind("\n") + 1 or len(text)
            yield Piece(text[:stop], len(raw), False)
            carry = text[stop:]
    try:
        carry += decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise _binary(str(path), f"it ends inside a UTF-8 character ({error.reason})") from error
    yield Piece(carry, 0, True)


def _json_lines(path: Path, text_field: str, limit: int) -> Iterator[Piece]:
    with _open(path) as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                where = f"{path}, line {number}"
                yield from cut(_text_of_line(raw, text_field, where), limit, len(raw))


def _text_of_line(raw: bytes, text_field: str, where: str) -> str:
    try:
        row = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _binary(where, f"it is no UTF-8 ({error.reason})") from error
    except (ValueError, RecursionError) as error:
        raise InputError("data.path", where, "one JSON object a line", f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InputError("data.path", where, "one JSON object a line", f"it is a {type(row).__name__}")
    if text_field not in row:
        names = ", ".join(map(repr, list(row)[:8])) or "none"
        hint = f"the line has no field {text_field!r}; its fields: {names}; see data.text_field"
        raise InputError("data.path", where, f"an object with the text in field {text_field!r}", hint)
    text = row[text_field]
    if not isinstance(text, str):
        raise InputError("data.path", where, f"text in field {text_field!r}", f"it is a {type(text).__name__}")
    if "\0" in text:
        raise _binary(where, "there is a NUL character in the text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _binary(where, f"the text is no valid Unicode ({error.reason})") from error
    return text


def _open(path: Path) -> io.BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError("data.path", str(path), "a readable file", error.strerror) from error


def _binary(where: str, why: str) -> InputError:
    return InputError("data.path", where, "UTF-8 text", why)
