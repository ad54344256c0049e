"""The run's reducer: built for its processes, attached to DDP or FSDP2, saved with its residuals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from laneway.cluster.costs.measured import MeasuredNetwork
from laneway.cluster.costs.sized import candidates, scheme_table
from laneway.cluster.drop import GradientDropper
from laneway.cluster.hooks import attach_ddp, attach_fsdp
from laneway.cluster.hooks.fsdp import host_mesh
from laneway.cluster.identity import gather_identities
from laneway.cluster.order import verify_order
from laneway.cluster.probe.adapt import NetworkAdapter
from laneway.cluster.probe.ladder import DROP
from laneway.cluster.probe.links import LinkProbe
from laneway.cluster.probe.measure import measure
from laneway.cluster.reduce.defaults import host_scheme
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.cluster.reduce.scheme import ReductionScheme, SchemeTable
from laneway.cluster.topology import Topology
from laneway.core import Extension, InputError
from laneway.train.ranks import Ranks
from laneway.train.reduction_config import ReductionConfig

__all__ = ["RunReduction", "scheme_of"]

MEASUREMENTS = 3
"""Rounds of the measurement at the start of a run."""


def scheme_of(config: ReductionConfig, levels: int) -> ReductionScheme:
    """What the configuration says, for so many levels: exact inside a host, the wire between hosts, the outermost level drops."""
    return host_scheme(levels, wire=config.wire, drop=config.drop, chunk_bytes=config.chunk_bytes)


class RunReduction:
    """Reducer and dropper of a run.

    Args:
        config: with ``over = levels``.
        ranks: several of them.

    Raises:
        InputError: a topology that the processes don't fit, or adaptation on an accelerator.
    """

    def __init__(self, config: ReductionConfig, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        if config.adapt and ranks.device.type != "cpu":
            why = "phases on an accelerator are not timed by this process's clock"
            raise InputError("reduction.adapt", True, f"false on {ranks.device.type}", why)
        self.adapter: NetworkAdapter | None = None
        self.measured: MeasuredNetwork | None = None
        self.groups = _groups(config)
        self.reducer = HierarchicalReducer(self.groups)
        self.dropper = GradientDropper(config.drop, wire=config.wire) if config.drop else None

    @property
    def copies(self) -> int:
        """How many ranks hold the same shard of an FSDP2 model."""
        return self.ranks.world_size // len(self.groups.ranks[0]) if self.config.shard == "hosts" else 1

    def mesh(self) -> DeviceMesh | None:
        """Over which ranks FSDP2 shards, where not over all."""
        return host_mesh(self.groups, self.ranks.device.type) if self.config.shard == "hosts" else None

    def attach(self, call: nn.Module) -> None:
        """Let the reducer carry the gradients of a DDP or FSDP2 model.

        DDP orders its buckets by its first backward pass and keeps them then. That pass is made here, on zeros and to no effect:
        a run that goes on later has the same buckets from its first step on, and so the same sums, bit for bit.
        """
        if isinstance(call, DistributedDataParallel):
            if self.config.adapt and self.dropper is None:
                self.dropper = GradientDropper(wire=self.config.wire)  # for a link that is slow beyond what wires make up for
            attach_ddp(call, self.reducer)
            for _ in range(2):  # the second forward pass takes the new order on
                tokens_bt = torch.zeros(1, 1, dtype=torch.long, device=self.ranks.device)
                with torch.compiler.set_stance("force_eager"):
                    call(tokens_bt).float().sum().mul(0).backward()
                call.zero_grad(set_to_none=True)
        else:
            attach_fsdp(call, self.reducer)
        self.reducer.dropper = self.dropper
        self.reducer.set_scheme(self._scheme())

    def _scheme(self) -> ReductionScheme | SchemeTable:
        config = self.config
        if config.over == "levels":
            return scheme_of(config, len(self.groups.names))
        dropping = [(config.drop, config.wire)] if config.drop else []
        if config.adapt and self.dropper is not None and (DROP, "bf16") not in dropping:
            dropping.append((DROP, "bf16"))
        self.measured = network = measure(self.groups, rounds=MEASUREMENTS, dropping=dropping, device=self.ranks.device)
        return scheme_table(network, candidates(self.groups.sizes, (config.wire,), config.drop))

    def extensions(self, tell: Callable[..., object]) -> list[Extension]:
        """What takes part in each step, once the reducer is attached: the watch over the network, where it is wanted.

        Args:
            tell: writes an event of the run: ``tell(kind, **fields)``.
        """
        if not self.config.adapt:
            return []
        self.adapter = NetworkAdapter(self.reducer, probe=LinkProbe(self.groups), measured=self.measured, tell=tell)
        return [self.adapter]

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals."""
        return {} if self.dropper is None else {"residuals": self.dropper.state_dict()}

    def load_state_dict(self, own: dict[str, Any] | None, others: Sequence[dict[str, Any]] = ()) -> None:
        """Go on with the residuals of this rank, and with those of ranks that there no longer are."""
        if self.dropper is None:
            return
        if own and "residuals" in own:
            self.dropper.load_state_dict(own["residuals"])
        for other in others:
            if other and "residuals" in other:
                self.dropper.adopt(other["residuals"])

    def row(self) -> dict[str, Any]:
        """For the metrics: bytes that this rank has sent over each level."""
        names = [f"sent_bytes_{name}" for name in self.groups.names]
        sent = dict(zip(names, self.reducer.sent_bytes, strict=True))
        if self.dropper is not None:
            sent[names[-1]] += self.dropper.sent_bytes
        return sent

    def close(self, *, wait: bool = True) -> None:
        """End the threads of the reducer and of the probe, before the processes part."""
        if self.adapter is not None:
            self.adapter.close(wait=wait)
        self.reducer.close(wait=wait)


def _groups(config: ReductionConfig) -> LevelGroups:
    if not config.topology:
        return LevelGroups.detect()
    topology = Topology.parse(config.topology)
    return LevelGroups.from_topology(topology, order=verify_order(gather_identities(), topology).order)
