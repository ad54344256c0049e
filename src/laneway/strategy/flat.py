"""The baseline that plans are compared with: everything sharded over all devices, flat collectives, gradients reduced in fp32."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from laneway.cluster.costs import estimate_step
from laneway.cluster.estimate import Estimate
from laneway.cluster.layout import Layout
from laneway.core import LanewayError
from laneway.strategy.search import held_by, usable_bytes
from laneway.strategy.space import RECOMPUTE, Job
from laneway.strategy.strategy import Strategy


@dataclass(frozen=True)
class Comparison:
    """A plan beside the flat baseline; figures per step are of one token times the plan's tokens, since batches may differ.

    Attributes:
        global_batch: sequences of the baseline's step: the plan's, rounded up until every device has one.
        fits: whether the baseline fits into the devices at all.
        recompute: what the baseline recomputes.
        seconds, planned_seconds: predicted step time for the plan's tokens.
        exposed, planned_exposed: seconds of it that wait for the network.
        outer_bytes, planned_outer_bytes: sent by a device over the outermost level.
        kwh_per_token, planned_kwh_per_token: energy at the devices' full power, and of the bytes on each level.
        assumption: what the baseline is.
    """

    global_batch: int
    fits: bool
    recompute: str
    seconds: float
    planned_seconds: float
    exposed: float
    planned_exposed: float
    outer_bytes: float
    planned_outer_bytes: float
    kwh_per_token: float
    planned_kwh_per_token: float
    assumption: str = "FSDP over all devices, one sequence a device, native flat collectives, fp32 gradients"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def told(self) -> str:
        """The comparison in lines."""
        rows = [
            ("step, s", self.seconds, self.planned_seconds),
            ("exposed communication, s", self.exposed, self.planned_exposed),
            ("outermost level, GB sent a device", self.outer_bytes / 1e9, self.planned_outer_bytes / 1e9),
            ("kWh/token", self.kwh_per_token, self.planned_kwh_per_token),
        ]
        head = f"flat baseline: {self.assumption}; batch {self.global_batch}, recompute {self.recompute}"
        head += "" if self.fits else "; does not fit, as if it did"
        lines = [f"  {name:<34}{flat:>10.3g}{planned:>10.3g}{_change(flat, planned):>9}" for name, flat, planned in rows]
        return "\n".join([head, f"  {'':<34}{'flat':>10}{'planned':>10}", *lines])


def compared_with_flat(plan: Strategy) -> Comparison:
    """Predict the flat baseline on the plan's model and devices.

    Raises:
        LanewayError: experts: the flat baseline has no expert parallelism to compare with.
    """
    if plan.arch.experts:
        raise LanewayError("compare: flat is defined for dense models")
    world = plan.topology.world
    batch = -(-plan.global_batch // world) * world
    job = Job(plan.arch, plan.topology, batch, plan.seq_len, plan.layout.precision)
    layouts = [Layout(dp_shard=world, recompute=recompute, precision=plan.layout.precision) for recompute in RECOMPUTE]
    layout = next((each for each in layouts if held_by(job, each, plan.calibration).total <= usable_bytes(job)), layouts[-1])
    flat = estimate_step(
        job.arch,
        layout,
        job.topology,
        global_batch=batch,
        seq_len=job.seq_len,
        calibration=plan.calibration,
        algorithm="native",
    )
    share = plan.global_batch / batch
    ours, outer = plan.predicted, plan.topology.levels[-1].name
    return Comparison(
        global_batch=batch,
        fits=held_by(job, layout, plan.calibration).total <= usable_bytes(job),
        recompute=layout.recompute,
        seconds=flat.seconds.value * share,
        planned_seconds=ours.seconds.value,
        exposed=flat.exposed_communication * share,
        planned_exposed=ours.exposed_communication,
        outer_bytes=_sent(flat, outer) * share,
        planned_outer_bytes=_sent(ours, outer),
        kwh_per_token=flat.kwh_per_token,
        planned_kwh_per_token=ours.kwh_per_token,
    )


def _sent(estimate: Estimate, level: str) -> float:
    return estimate.bytes_per_level.get(level, 0.0)


def _change(flat: float, planned: float) -> str:
    return f"{planned / flat - 1:+.0%}" if flat else ""
