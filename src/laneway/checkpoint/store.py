"""A run's checkpoints. One becomes a checkpoint in this order, and a kill between any two steps leaves the former one in place:

1. all ranks write their tensors into ``checkpoints/.tmp_step_XXXXXXXX``, rank 0 the plain data; every file is flushed;
2. once all ranks are done, rank 0 writes the manifest (size and SHA-256 of every file) and flushes the folder;
3. the folder gets its final name; 4. ``latest`` is replaced; 5. checkpoints beyond the newest ``keep`` are deleted.

What is read is verified first, byte for byte. ``latest`` is for people and for readers without torch: the store itself looks at
the manifests, so a kill between 3 and 4 costs nothing.

With several ranks every method here is collective: every rank calls it. All ranks must see the same file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from laneway.checkpoint import atomic, dcp, manifest
from laneway.checkpoint.manifest import Manifest, TornError
from laneway.checkpoint.match import Loader
from laneway.checkpoint.ranks import gather, on_all, on_first, rank_and_size
from laneway.checkpoint.tree import Encoder
from laneway.core import LanewayError, positive_int
from laneway.rundir import RunDirectory, append_event

PLAIN = "plain.json"
_PREFIX = "step_"


class CheckpointStore:
    """Saves and loads the state of a run; a torn or damaged checkpoint is never loaded.

    A state is a dict of tensors, DTensors and plain Python data (``tree.ACCEPTED``), nested as you like; what differs between
    ranks is wrapped in ``PerRank``. See ``state.capture`` for a model's and an optimizer's.

    Args:
        run: the run directory; checkpoints go to its ``checkpoints`` folder.
        keep: number of good checkpoints to keep, ≥ 1.

    Attributes:
        notices: what a person should know about (a checkpoint that was skipped, ...), each said once: here on rank 0, and as an
            event of kind ``notice`` in the run directory.
    """

    def __init__(self, run: RunDirectory, keep: int = 2) -> None:
        self.run = run
        self.keep = positive_int("keep", keep)
        self.notices: list[str] = []

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Save ``state`` as the checkpoint of optimizer step ``step`` and return its folder.

        Raises:
            InputError: the state holds what cannot be saved as plain data.
            LanewayError: on all ranks where one failed (full disk, no permission, a rank that is gone). The former checkpoints
                and ``latest`` are as they were and the unfinished folder is removed.
        """
        what = f"saving step {step}"
        self._same_step(what, step)
        target = self.folder(step)
        try:
            self._write(step, state, what, target)
        finally:
            if rank_and_size()[0] == 0:  # after a success there is nothing left under these names
                self._drop_unfinished(target)
        return target

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint that verifies, or None. Reads every byte of it.

        One that is torn or damaged is skipped, with one notice.
        """
        return on_first("looking for the latest checkpoint", self.run.checkpoints, self._newest_good)

    def world_size(self, step: int) -> int:
        """How many ranks saved the checkpoint of a step, as its manifest says."""
        folder = atomic.locate(self.folder(step))
        return on_first("reading a manifest", folder, lambda: manifest.check_sizes(folder, step).world_size)

    def load(self, step: int, state: dict[str, Any], rank: int | None = None) -> None:
        """Verify the checkpoint of ``step``, then load it into ``state``.

        Tensors in ``state`` are filled in place (a DTensor takes its part, whatever the number of ranks was when it was saved)
        and must be those that were saved, by name, shape and dtype. Parts of ``state`` without tensors are replaced by what was
        saved: ``{"extras": None}`` gets whatever extras there were, tensors on the CPU. Top-level entries may be left out of
        ``state`` to load only a part. One tensor under two names must have been saved with one value.

        Args:
            step: whose checkpoint.
            state: where to.
            rank: whose values to take of those that each rank has its own of; None: this rank's.

        Raises:
            LanewayError: no such checkpoint, it is torn or damaged, or it does not fit ``state``; ``state`` is unchanged.
        """
        what = f"loading step {step}"
        self._same_step(what, step)
        folder = atomic.locate(self.folder(step))
        on_first(what, folder, lambda: self._verify_for_load(step))
        loader = on_all(what, folder, lambda: _match(folder, state, rank))
        dcp.load_tensors(loader.tensors, folder, what)
        loader.finish()
        for teller, messages in enumerate(gather(what, [] if rank is not None else loader.notices)):
            for message in messages:
                self._notice(f"{_name(step)}, rank {teller}: {message}", step)

    def load_latest(self, state: dict[str, Any]) -> int:
        """Load the newest good checkpoint (as ``load``) and return its step.

        Raises:
            LanewayError: there is none; says what is wrong with each that there is.
        """
        step = self.latest_step()
        if step is None:
            broken = on_first("looking for checkpoints", self.run.checkpoints, lambda: self._survey()[1])
            found = "; ".join(f"{_name(step)}: {why}" for step, why in broken.items()) or "there is none"
            raise LanewayError(f"{self.run.checkpoints}: no checkpoint to load ({found})")
        self.load(step, state)
        return step

    def steps(self) -> list[int]:
        """Steps of all checkpoint folders, good or not, ascending."""
        names = [path.name.removeprefix(".old_") for path in self._entries() if not path.name.startswith(".tmp_")]
        return sorted({int(name.removeprefix(_PREFIX)) for name in names if _is_step(name)})

    def folder(self, step: int) -> Path:
        """Folder of one step's checkpoint."""
        return self.run.checkpoints / _name(step)

    def _same_step(self, what: str, step: int) -> None:
        """Raise on all ranks unless all named the same valid step."""
        on_all(what, self.run.checkpoints, lambda: positive_int("step", step, at_least=0))
        steps = gather(what, step)
        if len(set(steps)) > 1:
            raise LanewayError(f"{what}: the ranks named different steps: {', '.join(map(str, steps))}")

    def _write(self, step: int, state: dict[str, Any], what: str, target: Path) -> None:
        rank, size = rank_and_size()
        encoder = on_all(what, target, lambda: Encoder(state, rank))
        on_first(what, target, lambda: self._prepare(target))
        temporary = atomic.temporary(target)
        on_all(what, target, lambda: _must_see(temporary))
        own = dcp.save_tensors(encoder.tensors, temporary, what)
        described = on_all(what, target, lambda: {name: manifest.describe(temporary / name) for name in own})
        parts = gather(what, (described, encoder.own))
        files = {name: entry for entries, _ in parts for name, entry in entries.items()}
        plain = {"tree": encoder.tree, "per_rank": [values for _, values in parts]}
        on_first(what, target, lambda: self._complete(step, size, files, plain))
        on_first(what, target, self._retire)

    def _prepare(self, target: Path) -> None:
        """Clean up after killed runs and make the folder to write into."""
        self.run.checkpoints.mkdir(parents=True, exist_ok=True)
        for path in self._entries():
            if path.name.startswith(".tmp_"):
                shutil.rmtree(path)
        for step in self.steps():
            atomic.settle(self.folder(step))
        atomic.temporary(target).mkdir()

    def _drop_unfinished(self, target: Path) -> None:
        """Remove what a failed save wrote; what cannot be removed now, the next save removes."""
        shutil.rmtree(atomic.temporary(target), ignore_errors=True)
        with contextlib.suppress(OSError):
            _marker_draft(self.run).unlink(missing_ok=True)

    def _complete(self, step: int, world_size: int, files: dict[str, Any], plain: dict[str, Any]) -> None:
        """Rank 0, when all tensors are written: plain data, manifest, final name, ``latest``."""
        target = self.folder(step)
        temporary = atomic.temporary(target)
        atomic.write_synced(temporary / PLAIN, json.dumps(plain).encode())
        files = {**files, PLAIN: manifest.describe(temporary / PLAIN)}
        order = 1 + max((found.order for found in self._survey()[0]), default=0)
        content = Manifest(step, order, time.time(), world_size, files)
        atomic.write_synced(temporary / manifest.NAME, content.render())
        draft = _marker_draft(self.run)  # written before the rename: a full disk must show while all can still be undone
        atomic.write_synced(draft, f"{target.name}\n".encode())
        atomic.swap_in(target)
        os.replace(draft, self.run.latest)
        atomic.sync(self.run.path)

    def _retire(self) -> None:
        """Delete what is older than the newest ``keep`` good checkpoints."""
        good, broken = self._survey()
        retired = [found.step for found in good[self.keep :]]
        if len(good) >= self.keep:
            retired += broken
        for step in retired:
            shutil.rmtree(atomic.locate(self.folder(step)))

    def _survey(self) -> tuple[list[Manifest], dict[int, str]]:
        """All checkpoints by manifest and file sizes: the good ones, newest first, and what is wrong with the others."""
        good, broken = [], {}
        for step in self.steps():
            try:
                good.append(manifest.check_sizes(atomic.locate(self.folder(step)), step))
            except TornError as error:
                broken[step] = str(error)
        return sorted(good, key=lambda found: found.order, reverse=True), broken

    def _newest_good(self) -> int | None:
        good, broken = self._survey()
        newest = None
        for found in good:
            try:
                manifest.verify(atomic.locate(self.folder(found.step)), found.step)
            except TornError as error:
                broken[found.step] = str(error)
                continue
            newest = found.step
            break
        instead = "there is no good one" if newest is None else f"{_name(newest)} is used instead"
        for step, why in sorted(broken.items()):
            if newest is None or step > newest or step in {found.step for found in good}:
                self._notice(f"checkpoint {_name(step)} is skipped: {why}; {instead}", step)
        return newest

    def _verify_for_load(self, step: int) -> None:
        folder = atomic.locate(self.folder(step))
        if not folder.is_dir():
            there = ", ".join(str(other) for other in self.steps()) or "none"
            raise LanewayError(f"there is no {folder}; steps with a checkpoint: {there}")
        try:
            manifest.verify(folder, step)
        except TornError as error:
            raise LanewayError(f"{folder} is torn or damaged: {error}") from error

    def _entries(self) -> list[Path]:
        return list(self.run.checkpoints.iterdir()) if self.run.checkpoints.is_dir() else []

    def _notice(self, message: str, step: int) -> None:
        """Say ``message`` once: in ``notices`` and, by rank 0, as an event."""
        if message in self.notices:
            return
        self.notices.append(message)
        if rank_and_size()[0] > 0:
            return
        try:
            append_event(self.run, "notice", step, message=message)
        except OSError as error:  # a run that may only be read can still be loaded from
            self.notices.append(f"the notice could not be written to {self.run.events}: {error.strerror}")


def _match(folder: Path, state: dict[str, Any], rank: int | None) -> Loader:
    """Match ``state`` with what was saved. Raises LanewayError with the first few differences."""
    plain = json.loads((folder / PLAIN).read_bytes())
    rank = rank_and_size()[0] if rank is None else rank
    own = plain["per_rank"][rank] if rank < len(plain["per_rank"]) else {}
    loader = Loader(state, plain["tree"], own, dcp.shapes(dcp.read_metadata(folder)))
    if loader.problems:
        more = f"; and {len(loader.problems) - 3} more" if len(loader.problems) > 3 else ""
        raise LanewayError(f"{folder} does not fit: " + "; ".join(loader.problems[:3]) + more)
    return loader


def _must_see(folder: Path) -> None:
    if not folder.is_dir():
        raise LanewayError(f"{folder}, which rank 0 made, is not seen here; all ranks need the same file system")


def _marker_draft(run: RunDirectory) -> Path:
    return run.latest.with_name(f".tmp_{run.latest.name}")


def _name(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def _is_step(name: str) -> bool:
    digits = name.removeprefix(_PREFIX)
    return digits.isdecimal() and name == _name(int(digits))
