"""``laneway bench layer``: one site, forward and backward, against other libraries and against a floor.

The floor is three times the bytes of a forward pass that reads and writes each tensor once, 3·(3n + 2)·C numbers a token, at
the bandwidth of ``copy_`` of a buffer of the streams' size measured in the same rounds (a copy moves 2·n·C numbers a token).
Every number of threads runs in a process of its own, because OpenMP and compiled code fix theirs at the start; so does every
shape and dtype where variants are compiled, because torch.compile would make code for changing shapes of the second one.

Shapes: N tokens, n streams, C width.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from laneway.bench import agreement, peers
from laneway.bench.memory import peak_bytes
from laneway.bench.rows import Report, Row
from laneway.bench.stats import Interval, parts
from laneway.bench.timer import Samples, interleave, ratio
from laneway.core import InputError, LanewayError, choice, choices
from laneway.memory.allocator import keep_freed_memory

STREAMS = 4
SHAPES = ((2048, 512), (2048, 2048), (8192, 1024), (512, 4096))
ALLOCATORS = ("default", "tuned")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COMPILED = "_compiled"


@dataclass(frozen=True)
class LayerOptions:
    """What is measured. ``threads`` of 0 stands for all."""

    shapes: tuple[tuple[int, int], ...] = SHAPES
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    threads: tuple[int, ...] = (1, 0)
    compiled: bool = True
    allocator: str = "default"
    """tuned: memory that was freed stays with the process, for every variant (laneway.memory.allocator)."""
    seconds: float = 20.0
    """Time budget of the rounds of one shape and dtype."""
    quick: bool = False

    def check(self) -> None:
        """Raise InputError for the first field that is out of range."""
        choices("dtype", self.dtypes, DTYPES)
        choice("allocator", self.allocator, ALLOCATORS)
        for tokens, dim in self.shapes:
            if tokens < 1 or dim < 1:
                raise InputError("shape", f"{tokens}x{dim}", "TOKENSxDIM, both ≥ 1")
        if not self.threads:
            raise InputError("threads", "", "one or more integers ≥ 1, or 0 for all")
        for count in self.threads:
            if count < 0:
                raise InputError("threads", count, "an integer ≥ 1, or 0 for all")


def quick(options: LayerOptions) -> LayerOptions:
    """At most a minute on two cores: the first shape, eager variants, few rounds."""
    return replace(options, shapes=options.shapes[:1], compiled=False, seconds=3.0, quick=True)


def run(options: LayerOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Measure everything in ``options``.

    Raises:
        InputError: an option is out of range.
        LanewayError: the process of one number of threads failed.
    """
    options.check()
    counts = sorted({count or torch.get_num_threads() for count in options.threads})
    rows: list[Row] = []
    for count in counts:
        for shape in options.shapes:
            for dtypes in [(name,) for name in options.dtypes] if options.compiled else [options.dtypes]:
                progress(f"{shape[0]} tokens × {shape[1]}, {', '.join(dtypes)}, {count} thread{'s' * (count > 1)}")
                rows += _in_fresh_process(replace(options, shapes=(shape,), dtypes=dtypes, threads=(count,)), count)
    notes = [peer.missing for peer in peers.PEERS.values() if not peer.present]
    if options.quick:
        notes.append("quick: ≤ 60 s on 2 cores; first shape, eager variants, few rounds. Leave --quick out for the rest")
    return Report("layer", {"layer": rows, "layer_agreement": agreement.rows()}, summarise(rows), notes)


def _in_fresh_process(options: LayerOptions, threads: int) -> list[Row]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "laneway.bench.layer", json.dumps(asdict(options))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise LanewayError(f"layer: the measuring process failed ({last})")
    return json.loads(done.stdout.splitlines()[-1])


def measure(options: LayerOptions) -> list[Row]:
    """Rows of one shape and number of threads for each dtype, measured in this process."""
    torch.set_num_threads(options.threads[0])
    if options.allocator == "tuned" and not keep_freed_memory():
        raise LanewayError("layer: this system's allocator can't be tuned; measure with --allocator default")
    return [row for name in options.dtypes for row in _condition(options, name)]


def _condition(options: LayerOptions, name: str) -> list[Row]:
    """Rows of one shape, number of threads and dtype."""
    tokens, dim = options.shapes[0]
    torch.manual_seed(0)
    dtype = DTYPES[name]
    gy_tnc = torch.randn(1, tokens, STREAMS, dim, dtype=dtype)
    variants = {key: _step(apply, module, gy_tnc) for key, (module, apply) in _sites(dim, options.compiled).items()}
    plain_x, plain_g = torch.randn(1, tokens, dim, dtype=dtype, requires_grad=True), torch.randn(1, tokens, dim, dtype=dtype)
    variants["plain_residual"] = lambda: _forward_backward(peers.plain_residual, plain_x, plain_g)
    target = torch.empty_like(gy_tnc)
    samples = interleave(
        variants | {"copy": lambda: target.copy_(gy_tnc)}, seconds=options.seconds, min_rounds=3 if options.quick else 7, warmup=2
    )
    condition = {"tokens": tokens, "dim": dim, "streams": STREAMS, "dtype": name, "threads": options.threads[0]}
    condition |= {"allocator": options.allocator, "quick": int(options.quick)}
    stream_bytes = gy_tnc.numel() * gy_tnc.element_size()
    return [condition | _row(key, samples, variants.get(key), stream_bytes) for key in samples]


def _sites(dim: int, compiled: bool) -> dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]]:
    """Modules with random weights and how to apply them: ours, the peers, and all of them compiled."""
    ours = peers.ours_like_v4(dim, STREAMS)
    peers.fill(ours, seed=0)
    found: dict[str, Any] = {"laneway": (ours, peers.apply_ours)}
    for name, peer in peers.PEERS.items():
        if peer.present:
            module = peer.make(dim, STREAMS)
            if peer.same_function:
                module.load_state_dict(ours.state_dict())
            found[name] = (module, peer.apply)
    if compiled:
        found |= {name + COMPILED: (module, torch.compile(apply)) for name, (module, apply) in list(found.items())}
    return found


def _step(apply: Callable[[nn.Module, Tensor], Tensor], module: nn.Module, gy: Tensor) -> Callable[[], None]:
    x = torch.randn_like(gy).requires_grad_()
    parameters = list(module.parameters())

    def step() -> None:
        _forward_backward(lambda x: apply(module, x), x, gy)
        for parameter in parameters:
            parameter.grad = None

    return step


def _forward_backward(function: Callable[[Tensor], Tensor], x: Tensor, gy: Tensor) -> None:
    function(x).backward(gy)
    x.grad = None


def _row(name: str, samples: dict[str, Samples], step: Callable[[], None] | None, stream_bytes: int) -> Row:
    """One variant: times, times over the floor and over ours, peak memory."""
    base = name.removesuffix(COMPILED)
    peer = peers.PEERS.get(base)
    floor = scaled(samples["copy"], 3 * (3 * STREAMS + 2) / (2 * STREAMS))
    over_floor, over_ours = ratio(samples[name], floor), ratio(samples[name], samples["laneway"])
    peak = peak_bytes(step) if step else None
    return {
        "variant": name,
        "compiled": int(name.endswith(COMPILED)),
        "same_function": int(peer.same_function if peer else base == "laneway"),
        **samples[name].columns(),
        **over_floor.columns("over_floor"),
        **over_ours.columns("over_laneway"),
        "peak_bytes": peak,
        "peak_over_streams": peak / stream_bytes if peak is not None else None,
    }


def scaled(samples: Samples, factor: float) -> Samples:
    """Samples times a factor: how long it takes to copy that many times as much."""
    return Samples([factor * s for s in samples.wall_s], [factor * s for s in samples.cpu_s])


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The ratios of each condition: how many times faster ours is than each other variant, floor and memory.

    Ratios to ours are taken within the rounds, against our eager variant; the compiled one has a row of its own.
    """
    summary: dict[str, Any] = {}
    for row in rows:
        key = f"{row['tokens']}x{row['dim']} {row['dtype']} {row['threads']}t"
        entry = summary.setdefault(key, {})
        name = row["variant"]
        if name == "laneway":
            entry["over_floor"] = parts(row, "over_floor")
            entry["peak_over_streams"] = Interval.exact(row["peak_over_streams"]).as_json()
        elif name != "copy":
            entry[f"speedup_over_{name}"] = parts(row, "over_laneway")
    for entry in summary.values():
        _fastest(entry)
    return summary


def _fastest(entry: dict[str, Any]) -> None:
    """Add the compiled peer that comes nearest to ours once more, under a name that does not depend on which one it is."""
    names = [f"speedup_over_{peer}{COMPILED}" for peer in peers.PEERS]
    found = [name for name in names if name in entry]
    if found:
        nearest = min(found, key=lambda name: entry[name]["value"])
        entry["speedup_over_fastest_compiled_peer"] = entry[nearest] | {"variant": nearest.removeprefix("speedup_over_")}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    given["shapes"] = tuple(map(tuple, given["shapes"]))
    given |= {name: tuple(given[name]) for name in ("dtypes", "threads")}
    print(json.dumps(measure(LayerOptions(**given))))
