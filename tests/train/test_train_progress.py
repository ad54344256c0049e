"""What a person reads: durations in words, a bar on a terminal, few lines elsewhere."""

import pytest
from rich.console import Console

from laneway.train import progress
from laneway.train.progress import Display, duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (41.4, "41 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (3599.7, "1 h 00 min"), (11400, "3 h 10 min")],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_plain_lines_come_every_few_seconds_and_at_the_end(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    display = Display(steps=10)
    with display.running(0):
        for step in range(1, 11):
            now[0] += 2.0
            display.step(step, {"loss": 3.0 / step, "tokens_per_s": 12345.0})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/10", "step 4/10", "step 7/10", "step 10/10"]
    assert "loss 3.000" in lines[0]
    assert "tokens/s 12,345" in lines[0]
    assert lines[1].endswith("12 s left")
    assert "left" not in lines[-1]


def test_figures_that_come_rarely_are_remembered(capsys):
    display = Display(steps=2)
    with display.running(0):
        display.step(1, {"loss": 2.0, "gain_forward": 1.25, "val_bits_per_byte": 2.5, "site_gain_forward": [1.0, 1.25]})
        display.step(2, {"loss": 1.0})
    last = capsys.readouterr().out.splitlines()[-1]
    assert all(words in last for words in ("loss 1.000", "gain 1.25", "val 2.500"))


def test_the_time_left_counts_from_where_the_run_resumed(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    display = Display(steps=100)
    with display.running(90):
        now[0] = 10.0
        display.step(92, {"loss": 1.0})
    assert capsys.readouterr().out.strip().endswith("40 s left")


def test_a_terminal_gets_a_bar(monkeypatch):
    display = Display(steps=4)
    display.console = Console(force_terminal=True, width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with display.running(0):
        for step in range(1, 5):
            display.step(step, {"loss": 1.5, "tokens_per_s": 1000.0})
        display.say("a line above")
    shown = display.console.export_text()
    display.console.file.close()
    assert "4/4" in shown
    assert "loss 1.500" in shown
    assert "a line above" in shown


def test_other_ranks_are_silent(capsys):
    display = Display(steps=1, enabled=False)
    with display.running(0):
        display.step(1, {"loss": 1.0})
        display.say("hello")
    assert capsys.readouterr() == ("", "")
