"""Signals ask once and then act; the guard counts steps in a row."""

import os
import signal
import threading

import pytest

from laneway.train.faults import NonfiniteGuard, StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_remembered(number):
    stop = StopRequest()
    before = signal.getsignal(number)
    with stop.listening():
        assert stop.name is None
        os.kill(os.getpid(), number)
        assert stop.name == number.name
    assert signal.getsignal(number) is before


def test_the_second_interrupt_is_not_held_back():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in the background without
    stop = StopRequest()

    def twice() -> None:
        with stop.listening():
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.name == "SIGINT"
            os.kill(os.getpid(), signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            twice()
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), StopRequest().listening():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread_nothing_is_listened_to():
    seen = []

    def work() -> None:
        with StopRequest().listening() as stop:
            seen.append(stop.name)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]


def test_the_guard_counts_in_a_row():
    guard = NonfiniteGuard(limit=3)
    for finite in (False, False, True, False, False):
        guard.see(finite)
    assert not guard.exhausted
    assert not guard.healthy
    guard.see(False)
    assert guard.exhausted
    guard.see(True)
    assert guard.healthy
    assert not guard.exhausted


@pytest.mark.parametrize(
    ("saved", "words"), [(None, "no checkpoint had been written"), (40, "the checkpoint of step 40 is kept")]
)
def test_the_error_says_what_is_left_and_what_to_try(saved, words):
    guard = NonfiniteGuard(limit=1)
    guard.see(False)
    message = str(guard.error(50, saved))
    assert words in message
    assert "step 50" in message
    assert "optimizer.lr" in message
