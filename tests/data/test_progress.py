from __future__ import annotations

import io

from laneway.data.progress import LINE_S, QUIET_S, ByteProgress


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_short_work_is_silent() -> None:
    clock = Clock()
    for stream in (io.StringIO(), Terminal()):
        with ByteProgress("reading", 100, stream, clock) as progress:
            for _ in range(10):
                clock.now += QUIET_S / 11
                progress.advance(10)
        assert stream.getvalue() == ""


def test_plain_lines_with_percent_and_time_left() -> None:
    clock, stream = Clock(), io.StringIO()
    with ByteProgress("reading", 100, stream, clock) as progress:
        for _ in range(10):
            clock.now += 4
            progress.advance(10)
    assert stream.getvalue().splitlines() == [
        "reading: 10 %, about 36 s left",
        "reading: 40 %, about 24 s left",
        "reading: 70 %, about 12 s left",
        "reading: 100 %, about 0 s left",
        "reading: done in 40 s",
    ]
    assert LINE_S == 10


def test_no_closing_line_after_an_error() -> None:
    clock, stream = Clock(), io.StringIO()
    try:
        with ByteProgress("reading", 100, stream, clock) as progress:
            clock.now += 5
            progress.advance(50)
            raise KeyError
    except KeyError:
        pass
    assert stream.getvalue() == "reading: 50 %, about 5 s left\n"


def test_a_bar_on_a_terminal(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    clock, stream = Clock(), Terminal()
    with ByteProgress("reading", 2_000_000, stream, clock) as progress:
        clock.now += QUIET_S + 1
        progress.advance(500_000)
        progress.advance(10**9)
        assert progress.done == 2_000_000
    shown = stream.getvalue()
    assert "reading" in shown
    assert "2.0/2.0 MB" in shown
    assert "\x1b[" in shown
