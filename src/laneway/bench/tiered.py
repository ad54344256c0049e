"""``laneway bench memory``: a training step under a budget of memory, against plain training and other ways to need less.

All variants train one model in turns, in one process and under one allocator, which counts every byte of every tensor. The peak
is the most bytes alive in a step, parameters, gradients and optimizer state included. Before the rounds each variant computes the
gradients of one batch, and they are compared with those of plain training bit for bit.

β says what is possible: bytes that the forward pass saves per second over what the tier takes per second. The table
``memory_virtual`` has a tier of a chosen bandwidth whose time is modelled: it passes on a clock of main-thread CPU seconds plus
the waiting, so that β can be set on any machine.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneway.bench.rows import Report, Row
from laneway.bench.stats import parts, quartiles
from laneway.bench.threads import using_threads
from laneway.bench.tiered_meter import Without
from laneway.bench.tiered_models import MODELS, Size
from laneway.bench.tiered_peers import PEERS
from laneway.bench.timer import Samples, interleave, ratio
from laneway.core import InputError, LanewayError, choice, positive_int
from laneway.memory.clock import ComputeClock
from laneway.memory.config import MemoryConfig
from laneway.memory.counting import CountingAllocator
from laneway.memory.manage import make_tier
from laneway.memory.manager import MemoryManager
from laneway.memory.residency import Choice
from laneway.memory.simulated import SimulatedTier
from laneway.memory.survive import Survivor
from laneway.memory.tier import Tier

LIMIT = 1.15
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class MemoryOptions:
    """What to measure.

    Attributes:
        models: ``gpt``, ``llama``.
        dtype: ``fp32``, ``bf16`` (autocast).
        budgets: as parts of plain training's peak.
        peers: names of ``PEERS`` beside plain training.
        virtual: bandwidths of simulated tiers, in MB/s.
        folder: of the disk tier's file.
        seconds: time budget of the rounds of a model and dtype.
        spikes: steps of so many times the length under a hard limit of ``LIMIT`` × plain training's peak; up to 4.
        size: of the network.
    """

    models: tuple[str, ...] = ("gpt", "llama")
    dtype: tuple[str, ...] = ("fp32", "bf16")
    budgets: tuple[float, ...] = (0.63, 0.5)
    peers: tuple[str, ...] = ("checkpoint", "selective", "save_on_cpu", "torch_save")
    virtual: tuple[float, ...] = (200.0,)
    folder: str = ""
    seconds: float = 120.0
    spikes: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)
    size: Size = field(default_factory=Size)

    def check(self) -> None:
        """Raise InputError for the first field that is wrong."""
        for name in self.models:
            choice("models", name, MODELS)
        for name in self.dtype:
            choice("dtype", name, DTYPES)
        for name in self.peers:
            choice("peers", name, [peer for peer in PEERS if peer != "none"])
        for share in self.budgets:
            if not 0 < share < 1:
                raise InputError("budgets", share, "parts of plain training's peak, above 0 and below 1")
        for bandwidth in self.virtual:
            if not bandwidth > 0:
                raise InputError("virtual", bandwidth, "MB/s > 0")
        for factor in self.spikes:
            if not 0 < factor <= 4:
                raise InputError("spikes", factor, "lengths as multiples, above 0 and at most 4")
        positive_int("seconds", int(self.seconds))


def quick(options: MemoryOptions) -> MemoryOptions:
    """At most a minute on two cores: a smaller network, one model, one budget."""
    size = Size(layers=6, dim=192, heads=6, vocabulary=1024, length=128, batch=8)
    first = {"models": options.models[:1], "dtype": options.dtype[:1], "budgets": options.budgets[:1]}
    return replace(options, **first, peers=("checkpoint",), spikes=(2.0,), seconds=6.0, size=size)


def run(options: MemoryOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Measure; the rows go to the tables ``memory`` and ``memory_virtual``."""
    allocator = CountingAllocator.installed() or CountingAllocator.install(caching=True)
    rows: list[Row] = []
    virtual: list[Row] = []
    spikes: list[Row] = []
    summary: dict[str, Any] = {}
    with using_threads(1):
        for name in options.models:
            for dtype in options.dtype:
                with _Bench(options, name, dtype, allocator) as bench:
                    progress(f"{name} {dtype}: plain peak {bench.plain_peak / 2**20:.0f} MiB")
                    found = bench.rows(progress)
                    rows += found
                    virtual += bench.virtual_rows(progress)
                    spikes += bench.spike_rows(progress)
                    summary[f"{name} {dtype}"] = _summary(found)
    return Report("memory", {"memory": rows, "memory_virtual": virtual, "memory_spike": spikes}, summary)


@dataclass
class _Variant:
    """A way to train: a context around the step, and its manager where it has one."""

    name: str
    share: float
    around: Callable[[], AbstractContextManager[Any]]
    manager: MemoryManager | None = None


class _Bench:
    """One model under one dtype."""

    def __init__(self, options: MemoryOptions, name: str, dtype: str, allocator: CountingAllocator) -> None:
        self.options, self.name, self.dtype, self.allocator = options, name, dtype, allocator
        torch.manual_seed(0)
        size = options.size
        self.model: nn.Module = MODELS[name](size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.tokens = torch.randint(0, size.vocabulary, (size.batch, size.length + 1))
        self.tiers: list[Tier] = []
        self.wanted: list[Tensor] = []
        self.meter = Without(lambda: sum(tensor.nbytes for tensor in self.wanted))
        for _ in range(2):
            self.step()
        self.plain_peak = self._peak(self.step)
        self.wanted = self._gradients()

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *error: object) -> None:
        for tier in self.tiers:
            tier.close()
        self.wanted = []

    # -- the work

    def backward(self) -> None:
        """Forward and backward pass of one batch."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == "bf16"):
            logits: Tensor = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), self.tokens[:, 1:].flatten()).backward()

    def step(self) -> None:
        """A training step."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _gradients(self) -> list[Tensor]:
        self.backward()
        found = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def _peak(self, work: Callable[[], object]) -> int:
        """Most bytes alive during ``work``, without those that the benchmark itself holds."""
        self.meter.reset_peak()
        work()
        return self.meter.peak()

    # -- real time

    def rows(self, progress: Callable[[str], None]) -> list[Row]:
        """All variants, timed in turns."""
        variants = [_Variant(name, 1.0, lambda name=name: PEERS[name](self.model)) for name in ("none", *self.options.peers)]  # type: ignore[misc]
        variants += [self._managed(share) for share in self.options.budgets]
        exact = {variant.name: self._exact(variant) for variant in variants}
        self.wanted, peaks = [], {}
        for variant in variants:
            self._stepped(variant)
            peaks[variant.name] = self._peak(lambda v=variant: self._stepped(v))  # type: ignore[misc]
            progress(f"  {variant.name}: peak {peaks[variant.name] / self.plain_peak:.3f} of plain, exact {exact[variant.name]}")
        process: dict[str, list[float]] = {variant.name: [] for variant in variants}
        works = {variant.name: lambda v=variant: self._timed(v, process[v.name]) for variant in variants}  # type: ignore[misc]
        first = {v.name: v.manager.counted for v in variants if v.manager is not None}
        samples = interleave(
            works, seconds=self.options.seconds, warmup=1, min_rounds=5, clocks=(time.perf_counter, time.thread_time)
        )
        rounds = len(samples["none"].wall_s)
        process = {name: seconds[-rounds:] for name, seconds in process.items()}
        whole = {name: Samples(samples[name].wall_s, process[name]) for name in samples}
        return [
            self._row(variant, samples, whole, peaks[variant.name], exact[variant.name], first.get(variant.name, 0))
            for variant in variants
        ]

    def _exact(self, variant: _Variant) -> bool:
        """Whether the gradients are those of plain training; a manager's on the pass it records and on those it plans."""
        same = []
        for _ in range(1 if variant.manager is None else 3):
            with variant.around():
                gradients = self._gradients()
            same += [torch.equal(a, b) for a, b in zip(gradients, self.wanted, strict=True)]
        return all(same)

    def _managed(self, share: float) -> _Variant:
        config = MemoryConfig(budget=str(int(share * self.plain_peak)), folder=self.options.folder, collective_reservation=0.0)
        tier = make_tier(config, CPU)
        self.tiers.append(tier)
        manager = MemoryManager(self.model, config, tier, self.meter, CPU)
        return _Variant(f"managed {share:g}", share, lambda: manager, manager)

    def _stepped(self, variant: _Variant) -> None:
        with variant.around():
            self.step()

    def _timed(self, variant: _Variant, process: list[float]) -> None:
        start = time.process_time()
        self._stepped(variant)
        process.append(time.process_time() - start)

    def _row(
        self, variant: _Variant, samples: dict[str, Samples], whole: dict[str, Samples], peak: int, exact: bool, first: int
    ) -> Row:
        size = self.options.size
        own, base = samples[variant.name], samples["none"]
        row: Row = {"model": self.name, "layers": size.layers, "dim": size.dim, "tokens": size.batch * size.length}
        row |= {"dtype": self.dtype, "variant": variant.name, "budget_share": variant.share, "exact": int(exact)}
        row |= {"peak_bytes": peak, "peak_ratio": peak / self.plain_peak, "rounds": len(own.wall_s)}
        row |= {"wall_ms": 1000 * quartiles(own.wall_s)[1], **ratio(own, base).columns("wall_over_none")}
        row |= ratio(own, base, "cpu").columns("main_cpu_over_none")
        row |= ratio(whole[variant.name], whole["none"], "cpu").columns("process_cpu_over_none")
        return row | self._books(variant, base, first)

    def _books(self, variant: _Variant, base: Samples, first: int) -> Row:
        names = ("beta", "stall_share", "recompute_share", "bytes_out", "bytes_in", "misses", "peak_error", "time_error_points")
        if variant.manager is None:
            return dict.fromkeys((*names, "moved", "recomputed", "checkpointed", "reason"))
        plan = list(variant.manager.plans.values())[-1]
        new = variant.manager.since(first)
        last = new[-1]
        step = quartiles(base.wall_s)[1]
        overhead = quartiles([report.account.stall + report.account.recompute for report in new])[1] / step
        values = (
            plan.beta,
            quartiles([report.account.stall for report in new])[1] / step,
            quartiles([report.account.recompute for report in new])[1] / step,
            last.account.bytes_out, last.account.bytes_in, last.account.misses,
            last.peak / last.predicted - 1.0 if last.predicted else None,
            100 * (overhead - plan.overhead * plan.unmanaged.seconds / step),
        )  # fmt: skip
        row: Row = dict(zip(names, values, strict=True))
        choices = [choice.value for choice in plan.choices]
        row |= {"moved": choices.count("move"), "recomputed": choices.count("recompute"), "checkpointed": len(plan.blocks)}
        return row | {"reason": plan.reason}

    # -- modelled time

    def virtual_rows(self, progress: Callable[[str], None]) -> list[Row]:
        """Plans for tiers of chosen bandwidth, each followed on a clock of CPU seconds and modelled waiting."""
        found = []
        for bandwidth in self.options.virtual:
            for share in self.options.budgets:
                for recompute in (False, True):
                    found.append(self._virtual(bandwidth, share, recompute))
                    row = found[-1]
                    progress(f"  {bandwidth:g} MB/s, {row['variant']}, budget {share}: overhead {row['overhead']:.3f}")
        return found

    def _virtual(self, bandwidth: float, share: float, recompute: bool) -> Row:
        clock = ComputeClock()
        tier = SimulatedTier(clock, 1 << 40, bandwidth * 1e6, bandwidth * 1e6, latency=1e-4, copying=clock.aside)
        config = MemoryConfig(budget=str(int(share * self.plain_peak)), collective_reservation=0.0)
        manager = MemoryManager(self.model, config, tier, self.meter, CPU, clock=clock, recompute=recompute)
        variant = _Variant("virtual", share, lambda: manager, manager)
        self.wanted = self._gradients()
        exact = self._exact(variant)
        self.wanted = []
        self._stepped(variant)
        before = manager.counted
        for _ in range(3):
            with manager:
                self.step()
        plan = list(manager.plans.values())[-1]
        reports = manager.since(before)
        base = plan.unmanaged.seconds
        again = sum(plan.profile.blocks[number].seconds for number in plan.blocks)  # checkpointed blocks are not in the books
        spent = [report.account.stall + report.account.recompute + again for report in reports]
        return {
            "model": self.name, "dtype": self.dtype, "bandwidth_mb_s": bandwidth, "beta": plan.beta, "budget_share": share,
            "variant": "mixed" if recompute else "move only", "exact": int(exact),
            "peak_ratio": max(report.peak for report in reports) / self.plain_peak, "feasible": int(plan.feasible),
            "predicted_overhead": plan.overhead, "overhead": quartiles(spent)[1] / base,
            "moved": plan.count(Choice.MOVE)[0], "recomputed": plan.count(Choice.RECOMPUTE)[0], "checkpointed": len(plan.blocks),
        }  # fmt: skip

    # -- under a hard limit

    def spike_rows(self, progress: Callable[[str], None]) -> list[Row]:
        """Steps that need more than there is, after a few ordinary ones: the allocator refuses what goes over the limit."""
        limit, found = int(LIMIT * self.plain_peak), []
        usual = self.tokens
        for factor in self.options.spikes:
            longer = torch.randint(0, self.options.size.vocabulary, (len(usual), int(factor * self.options.size.length) + 1))
            row = self._spiked(usual, longer, limit)
            found.append({"model": self.name, "dtype": self.dtype, "limit_share": LIMIT, "length_factor": factor, **row})
            progress(f"  length × {factor:g}: demand {row['demand_over_limit']:.2f} of the limit, plain {row['plain_survived']}, "
                     f"managed {row['managed_survived']}, exact {row['exact']}, replays {row['replays']}")  # fmt: skip
        self.tokens = usual
        return found

    def _spiked(self, usual: Tensor, longer: Tensor, limit: int) -> Row:
        self.tokens, self.wanted = longer, []
        peak = self._peak(lambda: self._gradients())
        row: Row = {"demand_over_limit": peak / limit}
        wanted = self._gradients()
        self.wanted = wanted  # kept on the device by the benchmark: not counted
        with self._limited(limit):
            row["plain_survived"] = int(self._came_through(self.backward))
        config = MemoryConfig(budget=str(limit), folder=self.options.folder, collective_reservation=0.0)
        tier = make_tier(config, CPU, budget=limit)
        manager = MemoryManager(self.model, config, tier, self.meter, CPU)
        survivor = Survivor(manager, self.model, device=CPU)
        with self._limited(limit), manager:
            self.tokens = usual
            for _ in range(3):
                survivor.attempt(self._loss)
                self.optimizer.zero_grad(set_to_none=True)
            self.tokens = longer
            row["managed_survived"] = int(self._came_through(lambda: survivor.attempt(self._loss)))
            manager.end_pass()
        found = [p.grad for p in self.model.parameters() if p.grad is not None]
        row["exact"] = int(len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)))
        row |= {"replays": survivor.counts["replay"], "op_retries": survivor.counts["op_retry"]}
        row["stall_seconds"] = manager.passes[-1].account.stall if manager.passes else None
        self.optimizer.zero_grad(set_to_none=True)
        tier.close()
        self.wanted = []
        return row

    def _loss(self) -> Tensor:
        self.backward()
        return torch.zeros(())

    @contextmanager
    def _limited(self, limit: int) -> Generator[None]:
        self.allocator.limit(limit + sum(tensor.nbytes for tensor in self.wanted))
        try:
            yield
        finally:
            self.allocator.limit(None)

    def _came_through(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except (torch.OutOfMemoryError, LanewayError):
            came = False
        else:
            came = True
        if not came:
            gc.collect()
            self.optimizer.zero_grad(set_to_none=True)
        return came


def _summary(rows: list[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in rows:
        if row["variant"] != "none":
            found[f"{row['variant']}: peak over none"] = row["peak_ratio"]
            found[f"{row['variant']}: wall over none"] = parts(row, "wall_over_none")
            found[f"{row['variant']}: main CPU over none"] = parts(row, "main_cpu_over_none")
    return found
