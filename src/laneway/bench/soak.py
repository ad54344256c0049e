"""``laneway bench soak``: variable-length training under a memory limit, with faults, managed against unmanaged.

Every run is a chain of real processes under one supervisor (``soak_server``), the same for all variants, and each process has a
hard limit of memory: the counting allocator raises ``torch.OutOfMemoryError`` over it. The limit is ``LIMIT`` × the peak of the
same training with usual batches and no manager. Faults are drawn from the seed (``soak_schedule``), equally many of each
kind, which also comes alone. A run is compared with its reference: the same batches, spikes and NaN included, no limit and no
other faults.

What is protected in each variant is in its rows. ``unmanaged``: no memory manager; stops at a number that is not finite, at a
full disk, and where the newest checkpoint can't be loaded. ``protected``: the training loop's own recovery, no memory manager.
``managed``: both.

A step is lost where it was done and had to be done again. A batch that ended a process gets its usual length, without NaN, in the
next one: else a run that can't take it would never end. That is kind to the runs that stop.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from laneway.bench.rows import Report, Row
from laneway.bench.soak_schedule import KINDS, PROTECTIONS, VARIANTS, Fault, Job, Workload, draw, most_faults
from laneway.bench.soak_server import Server
from laneway.bench.stats import Interval
from laneway.core import InputError, choices, positive_int

LIMIT, BUDGET = 1.15, 0.95  # of the usual peak; of the limit
TOGETHER = "all"
RATIOS = ("interruptions", "longest_steps", "longest_seconds", "lost_steps")
PAIRS = (("managed", "unmanaged"), ("protected", "unmanaged"), ("managed", "protected"))


@dataclass(frozen=True)
class SoakOptions:
    """What to run.

    Attributes:
        faults: kinds that come, alone and, where there are several, together.
        variants: of ``VARIANTS``; unmanaged must be among them.
        seeds: schedules: seeds 0 … N−1, of the weights and batches too.
        each: faults of each kind in a run.
        alone: also each kind alone, where there are several.
        workload: what is trained.
    """

    faults: tuple[str, ...] = tuple(KINDS)
    variants: tuple[str, ...] = VARIANTS
    seeds: int = 3
    each: int = 1
    alone: bool = True
    workload: Workload = field(default_factory=Workload)

    @property
    def scenarios(self) -> tuple[str, ...]:
        """Each kind alone, and all together."""
        if len(self.faults) == 1:
            return self.faults
        return (*(self.faults if self.alone else ()), TOGETHER)

    def check(self) -> None:
        """Raise InputError for the first field that is wrong."""
        choices("faults", self.faults, KINDS)
        choices("variants", self.variants, VARIANTS)
        if "unmanaged" not in self.variants:
            raise InputError("variants", ",".join(self.variants), "a list with unmanaged, which the others are compared with")
        positive_int("seeds", self.seeds)
        if positive_int("steps", self.workload.steps) < 20:
            raise InputError("steps", self.workload.steps, "an integer ≥ 20")
        positive_int("checkpoint_every", self.workload.checkpoint_every)
        if positive_int("each", self.each) > most_faults(self.workload):
            accepted = f"at most {most_faults(self.workload)} in {self.workload.steps} steps, so that no two share one"
            raise InputError("each", self.each, accepted)


def quick(options: SoakOptions) -> SoakOptions:
    """At most a minute on two cores: one schedule with one fault of each kind, all together, in fewer steps."""
    work = replace(options.workload, steps=min(options.workload.steps, 24), checkpoint_every=5)
    return replace(options, seeds=1, each=1, alone=False, workload=work)


def run(options: SoakOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Run all; the rows go to the table ``soak``."""
    began = time.perf_counter()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="laneway-soak-") as folder:
        server = Server(Path(folder))
        try:
            for seed in range(options.seeds):
                rows += _one_seed(options, seed, server, progress)
        finally:
            server.close()
    notes = [f"{time.perf_counter() - began:.0f} s; {_schedule_note(options)}"]
    if not server.real_disk:
        notes.append("no file system can be mounted here: a limit on the size of files stood for the full disk")
    return report(rows, notes)


def report(rows: list[Row], notes: list[str]) -> Report:
    """Rows of any number of schedules, with what they come to."""
    compared = compare(rows)
    return Report("soak", {"soak": rows, "soak_summary": compared}, summarise(rows, compared), notes)


def _schedule_note(options: SoakOptions) -> str:
    work = options.workload
    return f"{work.steps} steps, a checkpoint every {work.checkpoint_every}, {options.each} faults of each kind"


def _one_seed(options: SoakOptions, seed: int, server: Server, progress: Callable[[str], None]) -> list[Row]:
    """All kinds of faults and all variants with one schedule."""
    job = Job("reference", seed, options.workload, (), str(server.folder))
    usual = _Reference(server.run(job))
    limit = int(LIMIT * max(usual.peaks.values()))
    progress(f"seed {seed}: usual peak {max(usual.peaks.values()) / 2**20:.1f} MiB, limit {limit / 2**20:.1f} MiB")
    rows: list[Row] = []
    for scenario in options.scenarios:
        kinds = options.faults if scenario == TOGETHER else (scenario,)
        faults = tuple(fault for fault in draw(seed, options.workload, options.each) if fault.kind in kinds)
        of_batch = tuple(fault for fault in faults if fault.kind in ("spike", "nan"))
        reference = _Reference(server.run(replace(job, faults=of_batch))) if of_batch else usual
        for variant in options.variants:
            limited = replace(job, variant=variant, faults=faults, limit=limit, budget=int(BUDGET * limit))
            row = _row(scenario, limited, server.run(limited), reference)
            row["disk"] = "tmpfs" if server.real_disk else "file size limit"
            rows.append(row)
            progress(_line(row))
    return rows


class _Reference:
    """What a run comes to that meets neither limit nor faults other than its batches."""

    def __init__(self, processes: Sequence[dict[str, Any]]) -> None:
        (process,) = processes
        self.weights: str = process["weights"]
        self.loss: float = process["loss"]
        self.peaks: dict[int, int] = {line["done"]: line["peak"] for line in process["done"]}


def _row(scenario: str, job: Job, processes: Sequence[dict[str, Any]], reference: _Reference) -> Row:
    """What came of a run."""
    end = processes[-1]
    finished = end["cause"] == "finished"
    assert job.limit is not None
    causes = Counter(process["cause"] for process in (processes[:-1] if finished else processes))
    done = [line for process in processes for line in process["done"]]
    kept = {line["done"]: line["seconds"] for line in done}
    events = end["events"]
    return {
        "faults": scenario,
        "variant": job.variant,
        "seed": job.seed,
        **PROTECTIONS[job.variant].columns(),
        "steps": job.workload.steps,
        "checkpoint_every": job.workload.checkpoint_every,
        "fault_count": len(job.faults),
        "limit_bytes": job.limit,
        "demand_over_limit": _demand(job.faults, reference) / job.limit,
        "completed": int(finished),
        "interruptions": len(processes) - 1 if finished else len(processes),
        **{f"by_{kind}": causes[kind] for kind in KINDS},
        "by_other": sum(count for cause, count in causes.items() if cause not in KINDS),
        "longest_steps": max(len(process["done"]) for process in processes),
        "longest_seconds": max(sum(line["seconds"] for line in process["done"]) for process in processes),
        "lost_steps": len(done) - len(kept),
        "lost_seconds": sum(line["seconds"] for line in done) - sum(kept.values()),
        "work_seconds": sum(line["seconds"] for line in done),
        "final_loss": end["loss"] if finished else None,
        "reference_loss": reference.loss,
        "exact": int(finished and end["weights"] == reference.weights),
        "survived_spikes": events.get("survived", 0),
        "skipped_steps": events.get("nonfinite", 0),
        "failed_checkpoints": events.get("checkpoint_failed", 0),
    }


def _demand(faults: Iterable[Fault], reference: _Reference) -> float:
    """Most bytes that a step of the run needs where nothing limits it, in one with spikes that of the largest."""
    spikes = [reference.peaks[fault.step] for fault in faults if fault.kind == "spike"]
    return float(max(spikes or reference.peaks.values()))


def _line(row: Row) -> str:
    lost = f"{row['lost_steps']} steps lost, longest {row['longest_steps']}"
    ended = "" if row["completed"] else ", did not finish"
    return f"  {row['faults']:<8} {row['variant']:<10} {row['interruptions']} interruptions, {lost}, exact {row['exact']}{ended}"


def compare(rows: Sequence[Row]) -> list[Row]:
    """Ratios of two variants for each kind of fault: median over the seeds, the least and the most of them.

    None where what is divided by was 0 in every run.
    """
    found: list[Row] = []
    for scenario in dict.fromkeys(row["faults"] for row in rows):
        here = {(row["variant"], row["seed"]): row for row in rows if row["faults"] == scenario}
        seeds = sorted({seed for _, seed in here})
        for above, below in PAIRS:
            if {above, below} - {variant for variant, _ in here}:
                continue
            for figure in RATIOS:
                pairs = [(here[above, seed][figure], here[below, seed][figure]) for seed in seeds]
                ratios = _spread([a / b for a, b in pairs if b])
                found.append(
                    {"faults": scenario, "figure": figure, "variant": above, "over": below, **ratios, "seeds": len(seeds)}
                )
    return found


def summarise(rows: Sequence[Row], compared: Sequence[Row]) -> dict[str, Any]:
    """For each kind of fault the ratios, and for each variant its interruptions and what share of the runs came out exactly."""
    found: dict[str, Any] = {row["faults"]: {} for row in rows}
    for row in compared:
        name = f"{row['figure']}: {row['variant']} over {row['over']}"
        found[row["faults"]][name] = {part: row[part] for part in ("value", "low", "high")}
    for scenario, variant in dict.fromkeys((row["faults"], row["variant"]) for row in rows):
        own = [row for row in rows if (row["faults"], row["variant"]) == (scenario, variant)]
        found[scenario][f"interruptions: {variant}"] = _spread([row["interruptions"] for row in own])
        for name in ("exact", "completed"):
            found[scenario][f"{name}: {variant}"] = statistics.fmean(row[name] for row in own)
    return found


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"value": None, "low": None, "high": None}
    return Interval(statistics.median(values), min(values), max(values)).as_json()
