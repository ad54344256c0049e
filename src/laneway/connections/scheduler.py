"""``ConnectionScheduler``: what measures how streams are used and how alike they are, and tells the sites' schedulers.

    scheduler = ConnectionScheduler(model)       # before the optimizer is made, or after ``add_scheduler(model)``

``laneway train`` makes it for its own model, as ``control.scheduler`` says.

Every ``every`` steps each site notes a sample of its streams' tokens, its mean priorities, and Σ |gradient × map| over all
tokens. Ranks add these sums in the collective that the loop runs anyway, and when the next step begins all set the same demand,
similarity and damping, which stay until the next measurement. The average of demand begins at zero and grows into a run. That
of similarity begins with its first measurement: from zero it would lie under any threshold for long, whatever is measured. On
CUDA the host waits once a measurement, for the principal directions.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from laneway.connections.arbitration import damping_gate, subspace_similarity
from laneway.connections.control import detach, require_sites
from laneway.connections.late_sums import LateSums
from laneway.connections.priorities import log_shares
from laneway.connections.schedule import Schedule, SiteScheduler, add_scheduler, schedulers
from laneway.core import InputError

NAME = "scheduler"  # of the shared statistics
TOLD = ("priority", "read_priority", "similarity", "damping")


class ConnectionScheduler(LateSums):
    """Sets the statistics of a model's ``SiteScheduler``s, step by step. An extension of the training loop.

    Args:
        model: on the device where it is trained. One without schedulers is given them, which must be before its optimizer.
        schedule: how they decide; None: as they were made, else ``Schedule()``.
        verify: compare a hash of each step's demand and damping over the ranks, one step late, where a loop shares statistics.

    Raises:
        InputError: a field out of range, a model without maps, or a schedule for a model that has schedulers already.
    """

    def __init__(self, model: nn.Module, schedule: Schedule | None = None, verify: bool = False) -> None:
        require_sites(model)
        found = schedulers(model)
        if found and schedule is not None:
            raise InputError("schedule", schedule, "None for a model that has schedulers")
        self.model, self.sites = model, found or add_scheduler(model, schedule)
        self.schedule = self.sites[0].schedule
        for site in self.sites:
            site.listen()
        streams = [len(site.damping) for site in self.sites]
        self._groups = [[i for i, n in enumerate(streams) if n == size] for size in sorted(set(streams))]
        numbers = sum(2 * n * n + 2 * n + 2 * (n + 1) for n in streams)
        super().__init__(NAME, torch.zeros(numbers, device=self.sites[0].damping.device), verify)
        device = self.sites[0].damping.device
        self._host = torch.zeros(len(TOLD) * sum(streams), pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._arrives = False
        self._row: dict[str, Any] | None = None

    @property
    def parameters(self) -> int:
        """Trained numbers that the schedulers add to the model."""
        return sum(p.numel() for site in self.sites for p in site.parameters())

    def apply_statistics(self, statistics: dict[str, Tensor]) -> None:
        """Take in sums over all ranks: demand, similarity and damping of every site follow."""
        sizes = [self._size(group) for group in self._groups]
        parts = zip(self._groups, statistics[NAME].to(self._sums).split(sizes), strict=True)
        told = [part.flatten() for group, sums in parts for part in self._apply([self.sites[i] for i in group], sums)]
        self._host.copy_(torch.cat(told), non_blocking=True)  # one copy, which nothing waits for; it is read as the step ends
        if self._copied is not None:
            self._copied.record()
        self._arrives = True

    def remove(self) -> None:
        """Take the schedulers off the model; an optimizer keeps their parameters."""
        detach(self.model, self.sites)

    # -- an extension's calls

    def on_step_begin(self, step: int) -> None:
        """Decisions from the last measurement; watch, where one is due."""
        self.follow()
        if self._agreement.statistics is not None:
            self.decided(torch.cat([part.flatten() for site in self.sites for part in (site.demand, site.damping)]))
        if (step - 1) % self.schedule.every == 0:
            for site in self.sites:
                site.watch(True)

    def on_backward_end(self, step: int) -> None:
        """Compute what was watched."""
        if not self.sites[0].watching:
            return
        for site in self.sites:
            site.watch(False)
        self.measured(torch.cat([self._measure([self.sites[i] for i in group]) for group in self._groups]))

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """``priority`` (of writes), ``read_priority``, ``similarity`` (mean to the others) and ``damping``, [sites][streams]."""
        if self._arrives:
            self._row, self._arrives = self._read(), False
        if self._row is not None:
            metrics |= self._row

    def state_dict(self) -> dict[str, Any]:
        """What was measured and not yet applied; all else is in the model."""
        row = self._read() if self._arrives else self._row
        return {"sums": self._sums.clone(), "pending": self._pending, "row": row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of ``state_dict``."""
        self._sums, self._pending, self._row = state["sums"].to(self._sums), bool(state["pending"]), state["row"]
        self._arrives = False

    def _read(self) -> dict[str, Any]:
        """What was copied, [sites][streams] of each name."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers = iter(self._host.tolist())
        found: dict[str, Any] = {name: [None] * len(self.sites) for name in TOLD}
        for group in self._groups:
            for name in TOLD:
                for i in group:
                    found[name][i] = list(islice(numbers, len(self.sites[i].damping)))
        return found

    # -- sites with as many streams, together

    def _size(self, group: list[int]) -> int:
        n = len(self.sites[group[0]].damping)
        return len(group) * (2 * n * n + 2 * n + 2 * (n + 1))

    def _measure(self, sites: list[SiteScheduler]) -> Tensor:
        """Similarities, pairs that were compared, use, sums of priorities and their counts, one behind the other."""
        n, device = len(sites[0].damping), sites[0].damping.device
        similarity = both = torch.zeros(len(sites), n, n, device=device)
        if self.schedule.damping:
            similarity, both = self._similarity(sites)
        use = torch.stack([torch.zeros(2, n, device=device) if s.meter.grad is None else s.meter.grad for s in sites])
        parts = similarity, both, use.nan_to_num(0, 0, 0), torch.stack([s.seen for s in sites])
        return torch.cat([part.float().flatten() for part in parts])

    def _similarity(self, sites: list[SiteScheduler]) -> tuple[Tensor, Tensor]:
        """Sites of one width together: their samples have the same dimensions."""
        found: list[Any] = [None] * len(sites)
        for dims in {s.points.shape[-1] for s in sites}:
            here = [i for i, s in enumerate(sites) if s.points.shape[-1] == dims]
            parts = subspace_similarity(torch.stack([sites[i].points for i in here]), self.schedule.directions)
            for i, pair in zip(here, zip(*parts, strict=True), strict=True):
                found[i] = pair
        similarity, both = zip(*found, strict=True)
        return torch.stack(similarity), torch.stack(both)

    @torch.no_grad()
    def _apply(self, sites: list[SiteScheduler], sums: Tensor) -> tuple[Tensor, ...]:
        """Set the buffers of these sites; returns the numbers to tell, each [sites, n]."""
        schedule, m, n = self.schedule, len(sites), len(sites[0].damping)
        total, pairs, use, seen = sums.split([m * n * n, m * n * n, m * 2 * n, m * 2 * (n + 1)])
        total, pairs, use = total.view(m, n, n), pairs.view(m, n, n), use.view(m, 2, n)
        newest = total / pairs.clamp(min=1)
        before = torch.stack([site.similarity for site in sites])
        decay = torch.where(before > 0, schedule.decay, 0)  # likeness begins with what was first measured
        similarity = _average(sites, "similarity", newest, pairs > 0, decay)
        demand = _average(sites, "demand", *log_shares(use), schedule.decay)
        damping = damping_gate(similarity, demand[:, 1], schedule.threshold, schedule.damping)
        torch._foreach_copy_([site.damping for site in sites], list(damping))
        seen = seen.view(m, 2, n + 1)
        read, write = (seen[..., :n] / (n * seen[..., n:].clamp(min=1))).unbind(1)
        apart = 1 - torch.eye(n, device=newest.device)
        return write, read, (newest * apart).sum(-1) / max(n - 1, 1), damping


def _average(sites: list[SiteScheduler], name: str, newest: Tensor, there: Tensor, decay: float | Tensor) -> Tensor:
    """Move each site's buffer ``name`` towards what was measured, where there is something; returns all [sites, …]."""
    before = torch.stack([getattr(site, name) for site in sites])
    after = torch.where(there, decay * before + (1 - decay) * newest, before)
    torch._foreach_copy_([getattr(site, name) for site in sites], list(after))
    return after
