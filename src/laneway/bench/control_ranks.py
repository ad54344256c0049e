"""What the controls of a run add to a step over several ranks, with what they share and all that they compute.

Processes on this machine, joined by gloo, train the same model with controls off, off again and under each setting, step by step
in turns whose order is drawn anew, through the loop's own step: data-parallel gradients, the one collective for what ranks share,
clipping, AdamW. ``extra`` is the paired difference to off, as a fraction of it, over one cycle of a setting's checks, and
``extra_cpu`` the same in CPU time, the mean over the ranks. What ``again`` takes more or less than off is what such a measurement
can't tell. Ranks share this machine's cores, so a step waits for the slowest of them. What does not vary is counted: collectives,
and the bytes of the one in which ranks share numbers. What controls may cost is ``TARGET``.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch._dynamo  # DDP does: once, before the processes part
import torch.distributed as dist
import torch.multiprocessing as mp

from laneway.bench.control_cost import judged
from laneway.bench.rows import Report, Row
from laneway.core import Extension, LanewayError, SharesStatistics, choice, choices, positive_int
from laneway.models.gpt import GPT, GPTConfig
from laneway.train.config import TrainConfig
from laneway.train.control_config import ControlConfig
from laneway.train.controls import build_controls, with_control
from laneway.train.parallel import parallelise
from laneway.train.ranks import Ranks
from laneway.train.step import Stepper
from laneway.train.workbench import make_optimizer

SETTINGS: dict[str, dict[str, Any]] = {
    "off": {},
    "again": {},
    "guard": {"norm_guard": math.e},
    "purify": {"purify_every": 6},
    "purify-late": {"purify_every": 6, "purify_screen": "late"},
    "curvature": {"curvature": 0.3},
    "curvature-purify": {"curvature": 0.3, "purify_every": 6, "purify_screen": "late"},
    "scheduler": {"scheduler": True},
    "all": {"curvature": 0.3, "scheduler": True, "purify_every": 6, "purify_screen": "late"},
}
TARGET = 0.03
CYCLE = 24  # steps after which every setting has made whole rounds of its checks


@dataclass(frozen=True)
class ControlRanksOptions:
    """What is measured."""

    settings: tuple[str, ...] = tuple(SETTINGS)
    parallel: str = "ddp"
    """ddp | fsdp"""
    ranks: int = 4
    dim: int = 128
    layers: int = 4
    batch: int = 4
    """Sequences of a rank."""
    context: int = 128
    cycles: int = 8
    """Of 24 steps a setting; a first one is not counted."""
    timeout_s: float = 3600.0
    quick: bool = False

    def check(self) -> None:
        """Raise InputError for the first field that is out of range."""
        choices("settings", self.settings, SETTINGS)
        choice("parallel", self.parallel, ("ddp", "fsdp"))
        positive_int("ranks", self.ranks, 2)
        for name in ("dim", "layers", "batch", "context", "cycles"):
            positive_int(name, getattr(self, name))


def quick(options: ControlRanksOptions) -> ControlRanksOptions:
    """Half a minute on one core: two ranks, a small model."""
    return replace(options, ranks=min(options.ranks, 2), dim=64, layers=2, context=64, cycles=1, quick=True)


def run(options: ControlRanksOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Start the processes and time all settings.

    Raises:
        InputError: an option out of range.
        LanewayError: a process failed, or they took too long.
    """
    options.check()
    progress(f"{options.ranks} ranks: {', '.join(options.settings)}, {options.cycles + 1} × {CYCLE} steps each")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "options.json").write_text(json.dumps(asdict(options)), "utf-8")
        command = [sys.executable, "-m", "laneway.bench.control_ranks", folder]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=options.timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise LanewayError(f"the ranks took more than {options.timeout_s:.0f} s") from error
        if done.returncode:
            raise LanewayError(f"a rank failed: {done.stderr.strip().splitlines()[-1:]}")
        found = json.loads((Path(folder) / "found.json").read_text("utf-8"))
    rows = rows_of(options, found)
    summary = {row["setting"]: row["extra"] for row in rows if row["setting"] != "off"}
    notes = ["quick: a small model, over which a fixed cost weighs more than in a run"] if options.quick else []
    return Report("control-ranks", {"control_ranks": rows}, {"extra": summary}, notes)


def rows_of(options: ControlRanksOptions, found: dict[str, dict[str, list[float]]]) -> list[Row]:
    """A row for each setting, from the milliseconds (wall and CPU), collectives and shared bytes of all counted steps."""
    rows: list[Row] = []
    for name, steps in found.items():
        ms, cpu = (_cycles(steps[clock]) for clock in ("ms", "cpu_ms"))
        low, extra, high = _over(ms, _cycles(found["off"]["ms"]))
        cpu_low, cpu_extra, cpu_high = _over(cpu, _cycles(found["off"]["cpu_ms"]))
        rows.append(
            {
                "setting": name,
                **{key: getattr(options, key) for key in ("parallel", "ranks", "dim", "layers", "batch", "context", "cycles")},
                "step_ms": statistics.median(ms),
                "extra": extra,
                "extra_q1": low,
                "extra_q3": high,
                "cpu_ms": statistics.median(cpu),
                "extra_cpu": cpu_extra,
                "extra_cpu_q1": cpu_low,
                "extra_cpu_q3": cpu_high,
                "collectives": statistics.mean(steps["collectives"]),
                "shared_bytes": steps["shared_bytes"][0],
                **judged(None if name in ("off", "again") else TARGET, extra),
            }
        )
    return rows


def _over(ms: list[float], off: list[float]) -> tuple[float, float, float]:
    """Quartiles and median (q1, median, q3) of what cycles took more than those of off, as a part of them."""
    extra = sorted((a - b) / b for a, b in zip(ms, off, strict=True))
    return extra[len(extra) // 4], statistics.median(extra), extra[(3 * len(extra)) // 4]


def _cycles(ms: list[float]) -> list[float]:
    return [statistics.mean(ms[at : at + CYCLE]) for at in range(0, len(ms), CYCLE)]


class Run:
    """One setting: a model of its own, its controls, and the loop's step."""

    def __init__(self, options: ControlRanksOptions, ranks: Ranks, setting: dict[str, Any]) -> None:
        model = GPTConfig(context=options.context, layers=options.layers, dim=options.dim)
        size = options.batch * options.ranks
        config = TrainConfig(model=model, parallel=options.parallel, batch_size=size, control=ControlConfig(**setting))
        torch.manual_seed(0)
        self.parallel = parallelise(with_control(GPT(model), config.control), config, ranks)
        optimizer = make_optimizer(self.parallel, config.optimizer)
        self.stepper = Stepper(self.parallel, optimizer, ranks, options.batch, config.optimizer.clip_norm)
        self.controls: list[Extension] = build_controls(config.control, self.parallel, 1000, lambda kind, **fields: None)
        for control in self.controls:
            if isinstance(control, SharesStatistics):
                control.share(self.stepper.shared)
        self.stepper.shared.seal()

    def step(self, number: int, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Step ``number`` ≥ 1, as the loop makes it."""
        for control in self.controls:
            control.on_step_begin(number)
        outcome = self.stepper(batch, 1e-3, False, lambda: self._after_backward(number))
        row = {"loss": outcome.loss, "grad_norm": outcome.grad_norm}
        for control in self.controls:
            control.on_step_end(number, row)

    def _after_backward(self, number: int) -> None:
        for control in self.controls:
            control.on_backward_end(number)


def _collectives() -> int:
    """How many this process has begun, those of DDP's own code included."""
    return cast(Any, dist.group.WORLD)._get_sequence_number_for_group()


def _rank(rank: int, name: str) -> None:
    folder = Path(name)
    options = ControlRanksOptions(**json.loads((folder / "options.json").read_text("utf-8")))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    ranks = Ranks(rank, rank, options.ranks, torch.device("cpu"))
    settings = list(dict.fromkeys(("off", "again", *options.settings)))
    runs = {setting: Run(options, ranks, SETTINGS[setting]) for setting in settings}
    found: dict[str, dict[str, list[float]]] = {setting: {"ms": [], "cpu_ms": [], "collectives": []} for setting in settings}
    draw, turns = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(0)
    for number in range(1, (options.cycles + 1) * CYCLE + 1):
        tokens = torch.randint(0, 256, (options.batch, options.context + 1), generator=draw)
        for turn in torch.randperm(len(settings), generator=turns).tolist():
            setting = settings[turn]
            dist.barrier()
            begun, start, cpu = _collectives(), time.perf_counter(), time.process_time()
            runs[setting].step(number, (tokens[:, :-1], tokens[:, 1:]))
            if number > CYCLE:
                found[setting]["ms"].append(1000 * (time.perf_counter() - start))
                found[setting]["cpu_ms"].append(1000 * (time.process_time() - cpu))
                found[setting]["collectives"].append(_collectives() - begun)
    for setting, steps in found.items():
        of_all = torch.tensor(steps["cpu_ms"], dtype=torch.float64)
        dist.all_reduce(of_all)
        steps["cpu_ms"] = (of_all / options.ranks).tolist()
        steps["shared_bytes"] = [runs[setting].stepper.shared.nbytes]
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    given = json.loads((Path(sys.argv[1]) / "options.json").read_text("utf-8"))
    mp.start_processes(_rank, args=(sys.argv[1],), nprocs=given["ranks"], start_method="fork")
