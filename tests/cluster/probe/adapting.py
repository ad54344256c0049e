"""A network that is calculated: what ranks would see of their links, for adapters without processes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from laneway.cluster.probe.adapt import NetworkAdapter
from laneway.cluster.probe.ladder import Step, link_load
from laneway.cluster.probe.links import PathTime, Round
from laneway.cluster.probe.locate import Tree
from laneway.cluster.probe.paths import pairs
from laneway.cluster.reduce.places import find_places
from laneway.cluster.reduce.scheme import ReductionScheme, SchemeTable
from laneway.cluster.reduce.work import Timing

NBYTES = 1 << 22


class Numbers:
    """The statistics of one rank, of which `Cluster` moves the values."""

    def __init__(self):
        self.sizes, self.put_values, self.found = {}, {}, {}

    def add(self, name, size=1, op="sum"):
        self.sizes[name] = (size, op)

    def put(self, name, values):
        assert len(values) == self.sizes[name][0]
        self.put_values[name] = list(values)

    def get(self, name):
        return self.found.get(name)


class Probe:
    """Rounds that are ready at once, of the cluster's links."""

    def __init__(self, cluster, rank):
        self.cluster, self.rank, self.completed, self.due, self.rounds = cluster, rank, 0, True, {}

    def start(self):
        self.completed += 1
        self.rounds[self.completed] = self.cluster.round(self.completed)
        return self.completed

    def busy_after(self, moment):
        return False

    def result(self, number):
        return self.rounds[number]

    def close(self, *, wait=True):
        pass


class Cluster:
    """Ranks with an adapter each; ``slow``: by link, how many times its bytes take."""

    def __init__(self, positions, scheme, *, probing=True, dropping=False, **options):
        self.places = find_places(positions)
        self.tree = Tree(self.places)
        self.slow, self.noise, self.events = {}, lambda: 1.0, []
        self._shared = {}
        self.adapters, self.numbers, self.reducers = [], [], []
        for rank in range(len(positions)):
            names = tuple(f"L{level + 1}" for level in range(len(self.places.groups)))
            groups = SimpleNamespace(names=names, places=self.places, sizes=self.places.sizes)
            dropper = SimpleNamespace(released=0) if dropping else None
            if dropper is not None:
                dropper.release = lambda dropper=dropper: setattr(dropper, "released", dropper.released + 1)
            reducer = SimpleNamespace(groups=groups, scheme=scheme, observers=[], dropper=dropper)
            reducer.set_scheme = lambda scheme, reducer=reducer: setattr(reducer, "scheme", scheme)
            probe = Probe(self, rank) if probing else None
            tell = (lambda kind, **fields: self.events.append((self.step, kind, fields))) if rank == 0 else None
            adapter = NetworkAdapter(reducer, probe=probe, debug=True, tell=tell, **options)
            numbers = Numbers()
            adapter.share(numbers)
            self.adapters.append(adapter)
            self.numbers.append(numbers)
            self.reducers.append(reducer)
        self.step = 0

    @property
    def scheme(self) -> ReductionScheme | SchemeTable:
        """The one in use: the same on all ranks."""
        schemes = {reducer.scheme for reducer in self.reducers}
        assert len(schemes) == 1
        return schemes.pop()

    def factor(self, ranks) -> float:
        return max([self.slow.get(link, 1.0) for link in self.tree.links(ranks)]) * self.noise()

    def round(self, number: int) -> Round:
        """The same on every rank, as the probe's own are."""
        if number not in self._shared:
            paths = []
            for pair in pairs(self.tree):
                seconds = tuple(0.01 * self.factor(pair) for _ in range(2))
                paths.append(PathTime(pair, self.tree.level(pair), 0.0, seconds, (1 / seconds[0], 1 / seconds[1])))
            self._shared[number] = Round(number, tuple(paths), 0.1)
        return self._shared[number]

    def run(self, steps: int) -> list[str]:
        """Steps; returns the scheme of each."""
        found = []
        for _ in range(steps):
            self.step += 1
            for adapter in self.adapters:
                adapter.on_step_begin(self.step)
            found.append(str(self.scheme))
            self._reduce()
            for adapter in self.adapters:
                adapter.on_backward_end(self.step)
            self._share()
        return found

    def seconds(self, link) -> float:
        """Of a reduction's bytes on a link."""
        return self.slow[link] * link_load(Step(self.scheme).main, self.places.sizes, link.level)

    def _reduce(self) -> None:
        main = Step(self.scheme).main
        if main.flat:
            whole = self.factor(self.places.order)
            for reducer in self.reducers:
                self._see(reducer, Timing(-1, "flat", NBYTES, 1e-8 * NBYTES * whole, 0.0))
            return
        for level, groups in enumerate(self.places.groups):
            for group in groups:
                took = 1e-8 * NBYTES * self.factor(group) if len(group) > 1 else math.nan
                for place, rank in enumerate(group if len(group) > 1 else ()):
                    nbytes = 0 if main.levels[level].drop else NBYTES
                    self._see(self.reducers[rank], Timing(level, "up", nbytes, took * (1 + place), 0.0))

    @staticmethod
    def _see(reducer, timing) -> None:
        for observer in reducer.observers:
            observer(timing)

    def _share(self) -> None:
        for name, (_, op) in self.numbers[0].sizes.items():
            rows = torch.tensor([numbers.put_values[name] for numbers in self.numbers])
            for numbers in self.numbers:
                numbers.found[name] = rows if op == "gather" else rows.amax(0)
