"""Going on exactly: what a checkpoint of a run holds, and the refusal to go on with another run's settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from laneway.checkpoint import CheckpointStore, PerRank, capture, capture_rng, restore, restore_rng
from laneway.core import Extension, InputError, LanewayError
from laneway.rundir import RunDirectory
from laneway.train.config import CADENCE, LAYOUT, TrainConfig
from laneway.train.ranks import Ranks
from laneway.train.settings import differences, merge
from laneway.train.workbench import Workbench


def saved_config(run: RunDirectory) -> TrainConfig:
    """The configuration in a run directory; raises InputError where it has fields that this version does not know."""
    config, problems = merge(TrainConfig(), run.read_config())
    for problem in problems:
        raise problem
    return config


def check_same_run(run: RunDirectory, config: TrainConfig, world_size: int = 1) -> list[str]:
    """Raise InputError where ``config`` differs from the run's in what decides its curve.

    Returns what changes its layout, fields and the number of processes: so it goes on equal to rounding, not bit for bit.
    """
    changed = differences(saved_config(run), config)
    decisive = {name: pair for name, pair in changed.items() if name not in CADENCE | LAYOUT}
    if decisive:
        listed = ", ".join(f"{name} {_show(old)} → {_show(new)}" for name, (old, new) in decisive.items())
        hint = f"here it is another one: {listed}; leave these fields as they are, or start a new run with another --out"
        raise InputError("resume", str(run.path), "the configuration the run was started with", hint)
    before = run.read_env().get("world_size", world_size)
    world = [] if before == world_size else [f"the number of processes ({before} → {world_size})"]
    return [name for name in changed if name in LAYOUT] + world


def save_state(store: CheckpointStore, step: int, bench: Workbench, extensions: Sequence[Extension]) -> None:
    """Save all that the next step depends on; every rank calls it."""
    extras = {
        "loader": bench.loader.state_dict(),
        "corpus": bench.corpus.fingerprint,
        "extensions": [extension.state_dict() for extension in extensions],
        "statistics": bench.stepper.shared.state_dict(),
    }
    reduction = bench.parallel.reduction
    per_rank = {"rng": capture_rng(), **({} if reduction is None else reduction.state_dict())}
    store.save(step, capture(bench.parallel.model, bench.optimizer, extras, per_rank=per_rank))


def load_state(store: CheckpointStore, step: int, bench: Workbench, extensions: Sequence[Extension]) -> None:
    """Undo of ``save_state``, also with another number of ranks than it was saved with.

    Raises:
        LanewayError: the text or the extensions are not those of the run, or the checkpoint does not fit the model.
    """
    restored = restore(store, step, bench.parallel.model, bench.optimizer)
    extras: dict[str, Any] = restored.extras
    if extras["corpus"] != bench.corpus.fingerprint:
        raise LanewayError(
            "resume: the text has changed since the run began, so its next batches would be others; start a new run"
        )
    states = extras["extensions"]
    if len(states) != len(extensions):
        raise LanewayError(
            f"resume: the run had {len(states)} extensions, now there are {len(extensions)}; give it the same ones"
        )
    bench.loader.load_state_dict(extras["loader"])
    bench.stepper.shared.load_state_dict(extras.get("statistics", {}))
    for extension, state in zip(extensions, states, strict=True):
        extension.load_state_dict(state)
    if bench.parallel.reduction is not None:
        others = _of_ranks_gone(store, step, bench.stepper.ranks)
        bench.parallel.reduction.load_state_dict(restored.per_rank, others)
    if restored.per_rank is not None:  # a rank that was not there when it was saved keeps its fresh generators
        restore_rng(restored.per_rank["rng"])


def _of_ranks_gone(store: CheckpointStore, step: int, ranks: Ranks) -> list[dict[str, Any]]:
    """What ranks kept for themselves that there no longer are, each given to one that there is."""
    saved = store.world_size(step)
    found = []
    for first in range(ranks.world_size, saved, ranks.world_size):
        state: dict[str, Any] = {"per_rank": PerRank(None)}
        store.load(step, state, rank=min(first + ranks.rank, saved))
        found.append(state["per_rank"].value)
    return [each for each in found if each is not None]


def _show(value: Any) -> str:
    return "none" if value is None else str(value)
