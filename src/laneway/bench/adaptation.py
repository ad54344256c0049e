"""``laneway bench adaptation``: a link gets slow in the middle of a run, on a network of several hosts, and well again.

The network is a lab on this machine (`laneway.bench.netlab`). In every step all ranks reduce a vector over its levels. After some
steps the rate of one link falls, while a step is under way, and after some more it is what it was. The same course is run with
adaptation, with adaptation that may drop, and without.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from laneway.bench import netlab
from laneway.bench.rows import Report, Row
from laneway.core import InputError, choices, positive_int

__all__ = ["AdaptationOptions", "quick", "rows_of", "run"]

VARIANTS: dict[str, dict[str, bool]] = {"fixed": {"adapt": False}, "adapt": {}, "adapt_drop": {"drop": True}}
PHASES = ("before", "noticing", "adapted", "recovering", "after")
SECONDS_A_STEP, SPARE_S = 4.0, 60.0


@dataclass(frozen=True)
class AdaptationOptions:
    """What is run.

    Attributes:
        links: links that get slow, one after the other, by their names in the lab ("rack1", "r0h1").
        slower: how many times.
        variants: some of `VARIANTS`.
        steps: before, during, and after at most.
        size_kb: of the vector, kB of 1024 bytes.
        host_mbit, rack_mbit: rates in good times.
        jitter: also a course in which the link's rate is drawn anew in every step, from its rate ± this share; 0: none.
    """

    links: tuple[str, ...] = ("rack1", "r0h1")
    slower: float = 8.0
    variants: tuple[str, ...] = tuple(VARIANTS)
    steps: tuple[int, int, int] = (20, 30, 60)
    size_kb: int = 1024
    host_mbit: float = 600.0
    rack_mbit: float = 150.0
    jitter: float = 0.2
    quick: bool = False

    @property
    def network(self) -> netlab.Network:
        """Two racks of two hosts of two ranks."""
        return netlab.Network.grid(2, 2, 2, host_mbit=self.host_mbit, rack_mbit=self.rack_mbit)

    def check(self) -> None:
        """Raise InputError where a value is out of range."""
        for link in self.links:
            if "." in link:
                raise InputError("links", link, "names of links, both ways", link.split(".")[0])
            self.network.directions(link)
        choices("variants", self.variants, VARIANTS)
        if not self.links:
            raise InputError("links", "", "one or more names of links")
        for count in self.steps:
            positive_int("steps", count, 8)
        positive_int("size_kb", self.size_kb, 64)
        if not 1 < self.slower <= 100:
            raise InputError("slower", self.slower, "a factor above 1, at most 100")
        if not 0 <= self.jitter < 1:
            raise InputError("jitter", self.jitter, "a share from 0 to below 1")


def quick(options: AdaptationOptions) -> AdaptationOptions:
    """At most a minute on two cores."""
    return replace(options, links=options.links[:1], variants=("fixed", "adapt"), steps=(10, 10, 24), jitter=0.0, quick=True)


def run(options: AdaptationOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Run all courses.

    Raises:
        Unavailable: no network lab can be made on this machine.
    """
    options.check()
    rows: list[Row] = []
    for link in options.links:
        rate = options.rack_mbit if link.startswith("rack") else options.host_mbit
        for variant in options.variants:
            progress(f"{link}, {variant}: {sum(options.steps)} steps")
            rows += rows_of(link, variant, _course(options, link=link, mbit=rate / options.slower, **VARIANTS[variant]))
        if options.jitter:
            progress(f"{link}, jitter: {sum(options.steps)} steps")
            rows += rows_of(link, "jitter", _course(options, link=link, mbit=rate, jitter=options.jitter))
    netlab.shutdown()
    notes = ["quick: few steps; for looking, not for quoting"] if options.quick else []
    return Report("adaptation", {"adaptation": rows}, _summary(rows), notes)


def _course(options: AdaptationOptions, **course: Any) -> dict[str, Any]:
    from laneway.bench.adaptation_ranks import Course

    before, during, after = options.steps
    nbytes = options.size_kb << 10
    whole = Course(before=before, during=during, after=after, nbytes=nbytes, chunk_bytes=nbytes // 4, **course)
    limit = SPARE_S + SECONDS_A_STEP * sum(options.steps)
    found = netlab.run("laneway.bench.adaptation_ranks:rank_main", options.network, {"course": asdict(whole)}, timeout=limit)
    schemes = [[row["scheme"] for row in each["rows"]] for each in found]
    return found[0] | {"together": all(each == schemes[0] for each in schemes)}


def rows_of(link: str, variant: str, found: dict[str, Any]) -> list[Row]:
    """A row for each phase of a course.

    ``noticing`` is from the change until the scheme is another one, ``recovering`` from the end of it until it is the first
    again; without adaptation they have no step.

    Args:
        link: that got slow.
        variant: what was done about it.
        found: of rank 0, and whether all ranks had the same scheme in each step.
    """
    steps, base = found["rows"], found["rows"][0]["scheme"]
    phases = {name: [step for step in steps if _phase(step, steps, base) == name] for name in PHASES}
    good = statistics.median(step["seconds"] for step in phases["before"])
    rows: list[Row] = []
    for name, those in phases.items():
        if those:
            seconds = [step["seconds"] for step in those]
            rows.append(
                {
                    "link": link,
                    "variant": variant,
                    "phase": name,
                    "scheme": those[-1]["scheme"],
                    "steps": len(those),
                    "step_ms": 1000 * statistics.median(seconds),
                    "over_before": statistics.median(seconds) / good,
                    "communication_s": sum(seconds),
                    "uplink_bytes": min(step["nbytes"]["rack1.up"] for step in those),
                    "switches": found["switches"],
                    "together": int(found["together"]),
                    "named": next((event["link"] for event in reversed(found["events"]) if event["state"] != "up"), ""),
                }
            )
    return rows


def _phase(step: dict[str, Any], steps: Sequence[dict[str, Any]], base: str) -> str:
    """Of a step; while nothing is done about a slow link it is noticed, where something will be."""
    phase, same = step["phase"], step["scheme"] == base
    if phase == "during":
        later = any(other["scheme"] != base for other in steps if other["step"] > step["step"])
        return "noticing" if same and later else "adapted"
    return "recovering" if phase == "after" and not same else phase


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Per link and variant: seconds of communication until something was done, and step times over those of good times."""
    found: dict[str, Any] = {}
    for row in rows:
        at = found.setdefault(f"{row['link']}/{row['variant']}", {"switches": row["switches"], "together": row["together"]})
        if row["phase"] in ("noticing", "recovering"):
            at[f"{row['phase']}_s"] = row["communication_s"]
        else:
            at[f"{row['phase']}_over_before"] = row["over_before"]
    return found
