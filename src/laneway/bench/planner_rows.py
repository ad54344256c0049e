"""Measured iteration times in the published columns: read, predicted, scored per model size."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from laneway.bench.planner_machines import MEGATRON_ERA, vtrain
from laneway.bench.rows import Row
from laneway.cluster.architecture import Architecture
from laneway.cluster.costs import Calibration, estimate_step, memory_of, parameters_of
from laneway.cluster.estimate import Estimate
from laneway.cluster.layout import Layout, Recompute
from laneway.cluster.topology import Topology
from laneway.core import InputError

VOCABULARY = 51200
"""Megatron's padded GPT-2 vocabulary: 3.6 and 39.1 billion are these shapes' parameters with it."""
SIZE, TIME = "Parameters (billion)", "iteration time (ms)"
COLUMNS = {
    "# GPUs": "devices",
    "global batch": "global_batch",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "seq_len",
    "tensor parallelism": "tp",
    "data parallelism": "dp",
    "pipeline parallelism": "pp",
}
LARGEST = 1e12  # of any cell
ASSUMED = (
    "1F1B, fp16 gradients all-reduced after the last backward pass, full states on each data-parallel rank, "
    "unfused attention, scatter/gather between stages"
)


@dataclass(frozen=True)
class Measured:
    """One row of a file."""

    line: int
    size: str
    devices: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    seq_len: int
    tp: int
    dp: int
    pp: int
    seconds: float

    @property
    def architecture(self) -> Architecture:
        """GPT with four times the width in its feed-forward layers."""
        return Architecture(self.layers, self.hidden, self.heads, self.heads, 4 * self.hidden, VOCABULARY)

    def layout(self, recompute: Recompute) -> Layout:
        """As Megatron-DeepSpeed lays it out."""
        return Layout(
            tp=self.tp,
            dp_replicate=self.dp,
            pp=self.pp,
            micro_batch=self.micro_batch,
            recompute=recompute,
            zero=1,
            grad_bytes=2,
            overlap_grads=False,
        )

    @property
    def job(self) -> tuple[str, int, int, int]:
        """What must be equal for two rows to be choices of one job."""
        return self.size, self.devices, self.global_batch, self.seq_len


def read(path: Path) -> list[Measured]:
    """Rows of a file with the published columns, in any order; `Parameters (billion)` may be missing.

    Raises:
        InputError: the file can't be read, a column is missing or there twice, or a cell is not what it should be; names line
            and column.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = f"it can't be read ({getattr(error, 'strerror', None) or error})"
        raise InputError("rows", str(path), "a text file in UTF-8 with comma-separated values", why) from error
    try:
        found = _rows(path, csv.DictReader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise InputError("rows", str(path), "comma-separated values", str(error)) from error
    if not found:
        raise InputError("rows", str(path), "at least one row below the header", "line 2 is missing")
    return found


def _rows(path: Path, reader: csv.DictReader[str]) -> list[Measured]:
    header = [name.strip() for name in reader.fieldnames or []]
    missing = [name for name in (*COLUMNS, TIME) if name not in header]
    if missing:
        wanted = ", ".join((*COLUMNS, TIME))
        raise InputError("rows", str(path), f"columns {wanted}, between commas", f"line 1 lacks {', '.join(missing)}")
    twice = [name for name in (*COLUMNS, TIME, SIZE) if header.count(name) > 1]
    if twice:
        raise InputError("rows", str(path), "each column once", f"line 1 has {', '.join(twice)} more than once")
    reader.fieldnames = header
    return [_row(path, reader.line_num, cells) for cells in reader if any(cells.values())]


def _row(path: Path, line: int, cells: Mapping[str | None, str | None]) -> Measured:
    if None in cells:
        raise InputError("rows", cells[None], "as many cells as the header has", f"{path.name}, line {line}")
    values = {field: _whole(path, line, column, cells[column]) for column, field in COLUMNS.items()}
    seconds = _positive(path, line, TIME, cells[TIME]) / 1e3
    row = Measured(line, "", **values, seconds=seconds)
    where = f"{path.name}, line {line}"
    if row.tp * row.dp * row.pp != row.devices:
        raise InputError("# GPUs", row.devices, f"tensor × data × pipeline parallelism = {row.tp * row.dp * row.pp}", where)
    if row.hidden % row.heads or row.pp > row.layers:
        column, given = ("attention heads", row.heads) if row.hidden % row.heads else ("pipeline parallelism", row.pp)
        raise InputError(column, given, "a divisor of the hidden size; no more stages than layers", where)
    if cells.get(SIZE) is not None:
        return replace(row, size=f"{_positive(path, line, SIZE, cells[SIZE]):g}B")
    return replace(row, size=f"{parameters_of(row.architecture) / 1e9:.2f}B")


def _positive(path: Path, line: int, column: str, cell: str | None) -> float:
    try:
        value = float(cell or "")
    except ValueError:
        value = math.nan
    if not 0 < value <= LARGEST:
        raise InputError(column, cell, f"a number above 0, up to {LARGEST:g}", f"{path.name}, line {line}")
    return value


def _whole(path: Path, line: int, column: str, cell: str | None) -> int:
    value = _positive(path, line, column, cell)
    if value != int(value):
        raise InputError(column, cell, "a whole number above 0", f"{path.name}, line {line}")
    return int(value)


@lru_cache(maxsize=64)
def _machine(devices: int) -> Topology:
    return vtrain(devices)


def recomputation(rows: Sequence[Measured]) -> dict[str, Recompute]:
    """Recomputation of each model size: none where all its rows fit the device without, full where one does not.

    The files don't say; a study sets it once for a model, so that its rows can be compared.
    """
    found: dict[str, Recompute] = {}
    for row in rows:
        need = memory_of(row.architecture, row.layout("none"), seq_len=row.seq_len, micro_batches=_count(row), flash=False).total
        if need > _machine(row.devices).device.memory_bytes:
            found[row.size] = "full"
        found.setdefault(row.size, "none")
    return found


def _count(row: Measured) -> int:
    """Micro-batches; the last one is filled up where the batch does not divide."""
    return math.ceil(row.global_batch / (row.dp * row.micro_batch))


def predict(row: Measured, recompute: Recompute, calibration: Calibration = MEGATRON_ERA) -> Estimate:
    """The cost model's estimate of a row. Collectives are NCCL's own."""
    return estimate_step(
        row.architecture,
        row.layout(recompute),
        _machine(row.devices),
        global_batch=_count(row) * row.dp * row.micro_batch,
        seq_len=row.seq_len,
        calibration=calibration,
        algorithm="native",
    )


def mape(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Mean of |predicted − measured| / measured."""
    ours, theirs = np.asarray(predicted), np.asarray(measured)
    return float(np.mean(np.abs(ours - theirs) / theirs))


def spearman(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Spearman's rank correlation, ties by their mean rank; NaN for fewer than three rows or equal times."""
    if len(measured) < 3 or len(set(measured)) == 1 or len(set(predicted)) == 1:
        return math.nan
    return float(np.corrcoef(_ranks(measured), _ranks(predicted))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + 1 + ends) / 2)[inverse]


def regrets(rows: Sequence[Measured], predicted: Sequence[float]) -> list[float]:
    """For each job (model, devices, batch): time of the row predicted fastest over the fastest one's, minus 1."""
    jobs: dict[tuple[str, int, int, int], list[tuple[float, float]]] = {}
    for row, seconds in zip(rows, predicted, strict=True):
        jobs.setdefault(row.job, []).append((seconds, row.seconds))
    return [min(pairs)[1] / min(time for _, time in pairs) - 1 for pairs in jobs.values()]


def score(rows: Sequence[Measured], predicted: Sequence[float]) -> dict[str, dict[str, float]]:
    """`mape`, `spearman` and `regret` of each model size, as shares: 0.12 is 12 per cent. Regret is the mean over its jobs."""
    found: dict[str, dict[str, float]] = {}
    for size in dict.fromkeys(row.size for row in rows):
        mine = [index for index, row in enumerate(rows) if row.size == size]
        measured, ours = [rows[index].seconds for index in mine], [predicted[index] for index in mine]
        lost = regrets([rows[index] for index in mine], ours)
        found[size] = {
            "rows": len(mine),
            "mape": mape(measured, ours),
            "spearman": spearman(measured, ours),
            "regret": float(np.mean(lost)),
            "regret_worst": max(lost),
        }
    return found


def evaluate(
    rows: Sequence[Measured],
    source: str,
    calibration: Calibration = MEGATRON_ERA,
    note: Callable[[str], None] = lambda line: None,
) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """A row for each measured one, and the scores; `note` is told what had to be assumed of single rows."""
    settings = recomputation(rows)
    out, predicted = [], []
    for row in rows:
        found = predict(row, settings[row.size], calibration)
        predicted.append(found.seconds.value)
        out.append(_result(row, source, settings[row.size], found))
        if row.global_batch % (row.dp * row.micro_batch):
            note(f"{source}, line {row.line}: the batch is no multiple of data parallelism × micro-batch; rounded up")
    return out, score(rows, predicted)


def _result(row: Measured, source: str, recompute: str, found: Estimate) -> Row:
    shape = {field: getattr(row, field) for field in COLUMNS.values()}
    return {
        "file": source,
        "size": row.size,
        **shape,
        "measured_ms": 1e3 * row.seconds,
        "predicted_ms": 1e3 * found.seconds.value,
        "predicted_low_ms": 1e3 * found.seconds.low,
        "predicted_high_ms": 1e3 * found.seconds.high,
        "error": found.seconds.value / row.seconds - 1,
        "mfu": found.mfu,
        "memory_gb": found.memory.total / 1e9,
        **{f"{part}_ms": 1e3 * seconds for part, seconds in found.breakdown.items()},
        "assumption": f"{ASSUMED}; recomputation: {recompute}",
    }
