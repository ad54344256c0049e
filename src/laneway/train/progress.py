"""What a person sees while a run goes on: a bar on a terminal, a plain line every few seconds anywhere else."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY_SECONDS = 5.0


class Display:
    """Tells how far a run is. With ``enabled=False`` (every rank but the first) it says nothing.

    ``to_stderr``: leave stdout to the caller's own JSON.
    """

    def __init__(self, steps: int, enabled: bool = True, to_stderr: bool = False) -> None:
        self.console = Console(stderr=to_stderr, quiet=not enabled, highlight=False, soft_wrap=True)
        self.steps, self.enabled = steps, enabled
        self._bar: Progress | None = None
        self._last_line = 0.0
        self._started: tuple[float, int] | None = None
        self._latest: dict[str, float] = {}

    @contextmanager
    def running(self, done: int) -> Generator[Display]:
        """Around the loop, which begins after ``done`` steps."""
        self._started = (time.perf_counter(), done)
        if not (self.enabled and self.console.is_terminal):
            yield self
            return
        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        with Progress(*columns, console=self.console) as self._bar:
            self._bar.add_task("train", total=self.steps, completed=done, figures="")
            yield self
        self._bar = None

    def say(self, text: str) -> None:
        """One line, above the bar where there is one."""
        self.console.print(text, markup=False)

    def step(self, step: int, figures: dict[str, float]) -> None:
        """Show a finished step; figures that are missing this time keep their last value."""
        self._latest |= {key: value for key, value in figures.items() if isinstance(value, float)}
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, figures=self._figures())
        elif time.perf_counter() - self._last_line >= EVERY_SECONDS or step == self.steps:
            self._last_line = time.perf_counter()
            self.say(f"step {step}/{self.steps}  {self._figures()}{self._left(step)}")

    def _figures(self) -> str:
        shown = [
            ("loss", "loss", "{:.3f}"),
            ("bits_per_byte", "bits/byte", "{:.3f}"),
            ("val_bits_per_byte", "val", "{:.3f}"),
            ("tokens_per_s", "tokens/s", "{:,.0f}"),
            ("gain_forward", "gain", "{:.2f}"),
        ]
        return "  ".join(f"{label} {form.format(self._latest[key])}" for key, label, form in shown if key in self._latest)

    def _left(self, step: int) -> str:
        start, done = self._started or (time.perf_counter(), step)
        if step <= done or step >= self.steps:
            return ""
        seconds = (time.perf_counter() - start) / (step - done) * (self.steps - step)
        return f"  {duration(seconds)} left"


def duration(seconds: float) -> str:
    """Seconds as a person says them: 41 s, 2 min 05 s, 3 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
