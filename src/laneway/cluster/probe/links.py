"""Active probe: start-up time and rate of links, by small timed transfers off the critical path.

A thread of each rank does a round when it is told to: pair after pair sends a few bytes back and forth, then a message each way,
on a process group of its own. Pairs that share a link never measure at the same time. All ranks get all results, so that what
follows from them is the same everywhere.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from laneway.cluster.agree import agree_on_groups
from laneway.cluster.probe.locate import Tree
from laneway.cluster.probe.paths import Pair, busiest, pairs, slots
from laneway.cluster.reduce.groups import LevelGroups
from laneway.core import InputError, positive_int

__all__ = ["LinkProbe", "PathTime", "Round"]

LEAST_BYTES = 4096
BUSY = 4
"""A round is followed by at least so many times its own duration without one."""


@dataclass(frozen=True)
class PathTime:
    """One pair's transfers.

    Attributes:
        ranks: the pair.
        level: how far apart they are, innermost 0.
        alpha_s: seconds of an empty message one way.
        seconds: of the message from the first to the second, and back, without α.
        rates: bytes per second each way.
    """

    ranks: Pair
    level: int
    alpha_s: float
    seconds: tuple[float, float]
    rates: tuple[float, float]


@dataclass(frozen=True)
class Round:
    """All pairs, once; the same on every rank.

    Attributes:
        number: of the round, from 1 on.
        paths: every pair.
        seconds: that the round took.
    """

    number: int
    paths: tuple[PathTime, ...]
    seconds: float


class LinkProbe:
    """Measures links between ranks on a gloo group of its own. All ranks make, tell and close it together.

    Args:
        groups: whose places say who shares a link.
        nbytes: of the timed message.
        repeats: of each transfer; the fastest counts, so that traffic that comes and goes does not.
        bytes_per_second: that all rounds together may put on one link, each way; `interval` follows from it.
        timeout: of a transfer; after it the probe has failed.

    Attributes:
        tree: who shares which link.
        pairs: that are measured.
        error: what the probe failed with; None while it works.

    Raises:
        InputError: a number out of range, or a backend other than gloo.
    """

    def __init__(
        self,
        groups: LevelGroups,
        *,
        nbytes: int = 256 * 1024,
        repeats: int = 1,
        bytes_per_second: int = 2**20,
        timeout: timedelta = timedelta(seconds=20),
    ) -> None:
        if "gloo" not in str(dist.get_backend_config()):
            raise InputError("backend", dist.get_backend(), "gloo", "links are timed by this process's clock")
        self.nbytes, self.repeats = positive_int("nbytes", nbytes, LEAST_BYTES), positive_int("repeats", repeats)
        self.bytes_per_second = positive_int("bytes_per_second", bytes_per_second)
        self.rank, self.world, self.tree = groups.rank, groups.world, Tree(groups.places)
        self.pairs = pairs(self.tree)
        self._slots = slots(self.tree, self.pairs)
        self._small, self._large = torch.zeros(1), torch.zeros(self.nbytes, dtype=torch.uint8)
        agree_on_groups(("probe", self.pairs), torch.device("cpu"), "the ranks want to probe different links")
        self._group: Any = dist.new_group(timeout=timeout, backend="gloo", group_desc="laneway_probe")
        self.error: Exception | None = None
        self._rounds: dict[int, Round] = {}
        self._asked = self._done = 0
        self._began = self._ended = self._took = 0.0
        self._busy = False
        self._wake, self._closing = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="laneway probe", daemon=True)
        self._thread.start()

    @property
    def round_bytes(self) -> int:
        """Bytes that a round puts on the link that most pairs pass, each way."""
        return busiest(self.tree, self.pairs) * self.repeats * (self.nbytes + 2 * self._small.nbytes)

    @property
    def interval(self) -> float:
        """Seconds from the begin of one round to that of the next, at least."""
        return max(self.round_bytes / self.bytes_per_second, (1 + BUSY) * self._took)

    @property
    def due(self) -> bool:
        """Whether another round may begin, as this rank sees it."""
        return self.completed == self._asked and time.monotonic() - self._began >= self.interval

    @property
    def completed(self) -> int:
        """Number of rounds that are done; −1 where the probe failed."""
        return -1 if self.error is not None else self._done

    def busy_after(self, moment: float) -> bool:
        """Whether this rank was in a round at some time after ``moment`` (of `time.perf_counter`)."""
        return self._busy or self._ended > moment

    def start(self) -> int:
        """Begin a round, in the background. All ranks do it at the same point, once they have completed the one before.

        Returns: its number.
        """
        with self._wake:
            self._asked += 1
            self._began = time.monotonic()
            self._wake.notify()
            return self._asked

    def result(self, number: int, timeout: float | None = None) -> Round:
        """A round of the last two, waiting for it if need be.

        Raises:
            InputError: no such round.
            TimeoutError: it isn't done yet.
        """
        with self._wake:
            if not self._wake.wait_for(lambda: self._done >= number or self.error is not None, timeout):
                raise TimeoutError(f"round {number} of the probe isn't done after {timeout} s")
            if number not in self._rounds:
                raise InputError("number", number, f"one of {', '.join(map(str, self._rounds)) or 'no'} rounds", str(self.error))
            return self._rounds[number]

    def close(self, *, wait: bool = True) -> None:
        """End the thread once the round under way has ended; a second call does nothing.

        Args:
            wait: for that.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        if wait:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._asked > self._done)
                if self._asked == self._done:
                    return
            self._busy = True
            try:
                found = self._round(self._done + 1)
            except Exception as error:  # noqa: BLE001 - it must not end the run; `completed` tells
                with self._wake:
                    self.error = error
                    self._wake.notify_all()
                return
            finally:
                self._ended, self._busy = time.perf_counter(), False
            with self._wake:
                self._rounds = {number: each for number, each in self._rounds.items() if number >= found.number - 1}
                self._rounds[found.number] = found
                self._took, self._done = found.seconds, found.number
                self._wake.notify_all()

    def _round(self, number: int) -> Round:
        table = torch.zeros(len(self.pairs) * 3 + self.world, dtype=torch.float64)
        times = table[: -self.world].view(-1, 3)
        dist.barrier(self._group)
        start = time.perf_counter()
        for slot in self._slots:
            for index in slot:
                if self.rank in self.pairs[index]:
                    self._measure(self.pairs[index], times[index])
            dist.barrier(self._group)
        table[len(table) - self.world + self.rank] = time.perf_counter() - start
        dist.all_reduce(table, group=self._group)
        took = table[-self.world :].max().item()
        paths = [self._path(pair, row) for pair, row in zip(self.pairs, times.tolist(), strict=True)]
        return Round(number, tuple(paths), took)

    def _path(self, pair: Pair, row: list[float]) -> PathTime:
        alpha, out, back = row
        seconds = max(out - alpha, 1e-9), max(back - alpha, 1e-9)
        return PathTime(pair, self.tree.level(pair), alpha, seconds, (self.nbytes / seconds[0], self.nbytes / seconds[1]))

    def _measure(self, pair: Pair, row: torch.Tensor) -> None:
        """α by the first of the pair, and its message's time; the other's message by the other."""
        first = self.rank == pair[0]
        other = pair[1] if first else pair[0]
        alpha = min(self._there_and_back(other, first, self._small) for _ in range(self.repeats + 1)) / 2
        out = min(self._there_and_back(other, first, self._large) for _ in range(self.repeats))
        back = min(self._there_and_back(other, not first, self._large) for _ in range(self.repeats))
        if first:
            row[0], row[1] = alpha, out - alpha
        else:
            row[2] = back - alpha

    def _there_and_back(self, other: int, sends: bool, message: torch.Tensor) -> float:
        """Seconds from before the message is sent until the answer, of a few bytes, is there; of the sender."""
        start = time.perf_counter()
        if sends:
            dist.send(message, other, group=self._group)
            dist.recv(self._small, other, group=self._group)
        else:
            dist.recv(message, other, group=self._group)
            dist.send(self._small, other, group=self._group)
        return time.perf_counter() - start
