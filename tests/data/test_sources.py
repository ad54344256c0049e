from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.core import InputError
from laneway.data.sources import STDLIB_LEFT_OUT, cut, find_sources


def read(path: Path | str, limit: int = 1000, **options) -> list[str]:
    """All documents of a corpus."""
    found, parts = [], []
    for piece in find_sources(str(path), **options).pieces(limit):
        parts.append(piece.text)
        if piece.end:
            found.append("".join(parts))
            parts = []
    assert not parts, "the last document has no end"
    return found


def test_a_file_is_one_document_whatever_the_pieces(library: Path) -> None:
    path = library / "json" / "decoder.py"
    text = path.read_bytes().decode()
    for limit in (1, 7, 100, 10**6):
        assert read(path, limit) == [text]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff"), min_size=1), st.integers(1, 40))
@settings(deadline=None)
def test_any_text_comes_back_and_its_bytes_are_counted(tmp_path_factory: pytest.TempPathFactory, text: str, limit: int) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    pieces = list(find_sources(str(path)).pieces(limit))
    assert "".join(piece.text for piece in pieces) == text
    assert sum(piece.read for piece in pieces) == path.stat().st_size
    assert [piece.end for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@given(st.text(st.sampled_from("ab\n")), st.integers(1, 20))
def test_cut_bounds_pieces_and_prefers_line_ends(text: str, limit: int) -> None:
    pieces = list(cut(text, limit, 9))
    assert "".join(piece.text for piece in pieces) == text
    assert all(0 < len(piece.text) <= limit for piece in pieces)
    for piece in pieces[:-1]:
        assert piece.text.endswith("\n") or "\n" not in piece.text
    assert [piece.end for piece in pieces] == ([False] * (len(pieces) - 1) + [True] if text else [])


def test_windows_line_ends_stay_and_a_byte_order_mark_goes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert read(tmp_path / "a.txt") == ["one\r\ntwo"]


def test_a_folder_is_read_by_name_and_by_suffix(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/y.TXT", ".hidden/x.txt", ".x.txt", "__pycache__/x.txt", "image.png", "empty.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.txt" else name)
    names = [file.name for file in find_sources(str(tmp_path)).files]
    assert names == ["a/y.TXT", "a/z.md", "b.txt", "empty.txt"]
    assert [text for text in read(tmp_path) if text] == ["a/y.TXT", "a/z.md", "b.txt"]
    assert read(tmp_path, suffixes=(".md",)) == ["a/z.md"]
    assert read(tmp_path, suffixes=(".PNG",)) == ["image.png"]


def test_a_link_to_a_parent_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert read(tmp_path) == ["text"]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "one", "n": 1}, {"text": ""}, {"text": "zwei\nü \u2028 end"}]
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    assert read(path) == ["one", "zwei\nü \u2028 end"]
    assert read(path, limit=2) == ["one", "zwei\nü \u2028 end"]
    path.write_text('{"body": "x"}\n')
    assert read(path, text_field="body") == ["x"]


def test_json_lines_inside_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "b.txt").write_text("three")
    assert read(tmp_path) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": "x"', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"text": ' + b"1" * 5000 + b"}", "not JSON"),
        (b'["x"]', "it is a list"),
        (b'{"Text": "x", "id": 3}', r"no field 'text'; its fields: 'Text', 'id'; see data\.text_field"),
        (b"{}", "its fields: none"),
        (b'{"text": 3}', "it is a int"),
        (b'{"text": null}', "it is a NoneType"),
        (b'{"text": "a\\u0000b"}', "NUL"),
        (b'{"text": "a\\ud800b"}', "no valid Unicode"),
        (b'{"text": "\xff"}', "no UTF-8"),
    ],
)
def test_a_broken_json_line_is_named_by_number(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(InputError, match=rf"^data\.path: got '.*rows\.jsonl, line 3'; accepted: .*{why}") as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"text\0more", "NUL byte at 4"),
        (b"a" * 1500 + b"\0", "NUL byte at 1500"),
        (b"abc\xe9 au lait", "near byte 3 it is no UTF-8"),
        (b"end \xe2\x82", "ends inside a UTF-8 character"),
        ("text".encode("utf-16"), r"no UTF-8|NUL byte"),
    ],
)
def test_a_binary_file_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "a.txt").write_text("fine")
    path = tmp_path / "b.txt"
    path.write_bytes(content)
    for corpus in (path, tmp_path):
        with pytest.raises(InputError, match=rf"^data\.path: got '.*b\.txt'; accepted: UTF-8 text; .*({why})"):
            read(corpus)


def test_missing_empty_and_textless(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"got '.*nowhere\.txt'; .*there is no such file or folder"):
        find_sources(str(tmp_path / "nowhere.txt"))
    with pytest.raises(InputError, match=r"did you mean 'stdlib'\?"):
        find_sources("stdllib")
    with pytest.raises(InputError, match=r"data\.path"):
        find_sources("x" * 5000)
    with pytest.raises(InputError, match=r"data\.path"):
        find_sources("~nobody-of-this-name/x")
    with pytest.raises(InputError, match=r"none in it ends in the usual text suffixes; see data\.suffixes"):
        find_sources(str(tmp_path))
    (tmp_path / "a.txt").touch()
    with pytest.raises(InputError, match=r"got '.*a\.txt'; accepted: text; the file is empty"):
        find_sources(str(tmp_path / "a.txt"))
    with pytest.raises(InputError, match="all files in the folder are empty"):
        find_sources(str(tmp_path))
    with pytest.raises(InputError, match=r"none in it ends in \.md"):
        find_sources(str(tmp_path), suffixes=(".md",))


def test_a_file_that_vanishes_after_listing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    sources = find_sources(str(path))
    path.unlink()
    assert not sources.files[0].unchanged()
    with pytest.raises(InputError, match=r"got '.*a\.txt'; accepted: a readable file; No such file"):
        list(sources.pieces(100))


def test_the_standard_library_is_its_sources_without_tests(library: Path) -> None:
    sources = find_sources("stdlib")
    names = [file.name for file in sources.files]
    assert names == sorted(names)
    assert {"json/decoder.py", "argparse.py", "asyncio/tasks.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    assert not {part for name in names for part in name.split("/")} & STDLIB_LEFT_OUT
    assert sources.total_bytes > 3 * 2**20
    assert sources.files == find_sources("stdlib").files


def test_standard_library_files_in_their_declared_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9t\xe9\n")
    (tmp_path / "broken.py").write_bytes(b"# \xe9t\xe9\n")
    (tmp_path / "nul.py").write_bytes(b"x = '\0'\n")
    (tmp_path / "unknown.py").write_bytes(b"# coding: no-such-encoding\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    sources = find_sources("stdlib")
    assert [piece.text for piece in sources.pieces(1000)] == ["# -*- coding: latin-1 -*-\n# été\n"]
    assert sources.skipped == ["broken.py", "nul.py", "unknown.py"]


def test_a_python_without_sources_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(InputError, match="this Python has no library sources"):
        find_sources("stdlib")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    path.chmod(0)
    with pytest.raises(InputError, match=r"got '.*a\.txt'; accepted: a readable file; Permission denied"):
        read(path)
