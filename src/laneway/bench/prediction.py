"""``laneway bench prediction``: how well small messages foretell what every scheme takes at every size.

In one lab: a measurement with messages up to 4 MB (`laneway.cluster.probe.measure`), then all schemes at sizes of which the
larger ones were never seen. An error is |predicted − measured| over measured. Regret is what the scheme that the prediction
prefers takes over the fastest one's time, less one; schemes with another wire or share are other functions, so that each has its
own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from laneway.bench.netlab import Network, available
from laneway.bench.netlab import run as run_lab
from laneway.bench.prediction_ranks import Found
from laneway.bench.rows import Report, Row
from laneway.cluster.costs.measured import MeasuredNetwork, predict
from laneway.cluster.reduce.scheme import FLAT, LevelScheme, ReductionScheme
from laneway.core import InputError, positive_int

__all__ = ["PredictionOptions", "quick", "run"]

DROP = 0.9
PIECE = 2 << 20


def _three(host: LevelScheme, rack: LevelScheme, pieces: int = 0) -> ReductionScheme:
    return ReductionScheme((LevelScheme(), host, rack), pieces)


def _all(level: LevelScheme, pieces: int = 0) -> ReductionScheme:
    return ReductionScheme((level,) * 3, pieces)


DIRECT, BF16, INT8 = LevelScheme(), LevelScheme(wire="bf16"), LevelScheme(wire="int8")
SCHEMES: dict[str, tuple[str, ReductionScheme]] = {
    "flat": ("fp32", FLAT),
    "direct": ("fp32", _all(DIRECT)),
    "direct_pieces": ("fp32", _all(DIRECT, PIECE)),
    "ring": ("fp32", _all(LevelScheme("ring"))),
    "tree": ("fp32", _all(LevelScheme("tree"))),
    "native": ("fp32", _all(LevelScheme("native"))),
    "bf16_rack": ("bf16 rack", _three(DIRECT, BF16)),
    "bf16_rack_pieces": ("bf16 rack", _three(DIRECT, BF16, PIECE)),
    "bf16_hosts": ("bf16 hosts", _three(BF16, BF16)),
    "bf16_hosts_pieces": ("bf16 hosts", _three(BF16, BF16, PIECE)),
    "int8_pieces": ("int8", _three(INT8, INT8, PIECE)),
    "drop_pieces": ("drop", _three(BF16, LevelScheme(wire="bf16", drop=DROP), PIECE)),
}
"""Each scheme with the function that it computes: only schemes of one function are alternatives."""


@dataclass(frozen=True)
class PredictionOptions:
    """What is timed, on which network."""

    sizes_kb: tuple[int, ...] = (1024, 4096, 16384, 65536)
    rounds: int = 7
    probe_rounds: int = 7
    host_mbit: float = 600.0
    rack_mbit: float = 150.0
    order: str = "packed"
    quick: bool = False

    def check(self) -> None:
        """Raise InputError where an option is out of range, and Unavailable where this machine can't hold the network."""
        if not self.sizes_kb:
            raise InputError("sizes_kb", "", "one or more integers ≥ 1")
        for size in self.sizes_kb:
            positive_int("sizes_kb", size)
        positive_int("rounds", self.rounds)
        positive_int("probe_rounds", self.probe_rounds)
        available()


def quick(options: PredictionOptions) -> PredictionOptions:
    """At most a minute on two cores: two sizes, two rounds."""
    return replace(options, sizes_kb=(1024, 4096), rounds=2, probe_rounds=3, quick=True)


def run(options: PredictionOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Measure, predict, time, compare.

    Raises:
        Unavailable: this machine can't hold the network. RankFailed, LabError: a rank or the lab failed.
    """
    options.check()
    network = Network.grid(2, 2, 2, host_mbit=options.host_mbit, rack_mbit=options.rack_mbit, order=options.order)
    slowest = 8 * max(options.sizes_kb) * 8192 / (options.rack_mbit * 1e6)
    arguments = {
        "schemes": {name: scheme.to_dict() for name, (_, scheme) in SCHEMES.items()},
        "sizes": [size << 10 for size in options.sizes_kb],
        "rounds": options.rounds,
        "probe_rounds": options.probe_rounds,
        "dropping": [(DROP, "bf16")],
    }
    limit = 120 + 2 * len(SCHEMES) * (options.rounds + 1) * slowest
    found: Found = run_lab("laneway.bench.prediction_ranks:predict_and_time", network, arguments, timeout=limit)[0]
    rows = [_row(options, found, name, size << 10) for size in options.sizes_kb for name in SCHEMES]
    scores = [_score(rows, size << 10) for size in options.sizes_kb]
    for score in scores:
        progress(f"{score['message_bytes'] >> 10} kB: mean error {score['mean_error']:.1%}, regret {score['worst_regret']:.1%}")
    notes = ["quick: few rounds; leave --quick out for figures"] if options.quick else []
    summary: dict[str, Any] = {f"{score['message_bytes'] >> 10} kB": score for score in scores}
    return Report("prediction", {"prediction": rows, "prediction_scores": scores}, summary, notes)


def _row(options: PredictionOptions, found: Found, name: str, nbytes: int) -> Row:
    function, scheme = SCHEMES[name]
    taken = found.seconds[name, nbytes]
    measured, foretold = statistics.median(taken), predict(MeasuredNetwork.from_dict(found.network), scheme, nbytes)
    return {
        "message_bytes": nbytes,
        "variant": name,
        "function": function,
        "host_mbit": options.host_mbit,
        "rack_mbit": options.rack_mbit,
        "order": options.order,
        "quick": int(options.quick),
        "rounds": len(taken),
        "measured_ms": 1000 * measured,
        "measured_ms_low": 1000 * min(taken),
        "measured_ms_high": 1000 * max(taken),
        "predicted_ms": 1000 * foretold,
        "error": abs(foretold / measured - 1),
    }


def _score(rows: list[Row], nbytes: int) -> Row:
    """Errors and regrets of one size."""
    mine = [row for row in rows if row["message_bytes"] == nbytes]
    regrets = []
    for function in dict.fromkeys(row["function"] for row in mine):
        same = [row for row in mine if row["function"] == function]
        preferred = min(same, key=lambda row: row["predicted_ms"])
        regrets.append(preferred["measured_ms"] / min(row["measured_ms"] for row in same) - 1)
    errors = [row["error"] for row in mine]
    return {
        "message_bytes": nbytes,
        "quick": mine[0]["quick"],
        "schemes": len(mine),
        "mean_error": statistics.fmean(errors),
        "worst_error": max(errors),
        "fp32_regret": regrets[0],
        "worst_regret": max(regrets),
    }
