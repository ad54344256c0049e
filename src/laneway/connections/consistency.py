"""Consistency checkpoints for adapters: is the base still the base, are the maps still on their manifold, what do adapters do?

    check = ConsistencyCheck(model, tokens)              # before adapters are added: the reference is recorded
    add_lora(model, ["attention.qkv", "ffn.out"])        # or PEFT
    check.begin()                                        # the function is unchanged, only the adapters train
    …                                                    # on_backward_end, on_step_end: an Extension of the training loop

A check costs two forward passes over a small sample, every few steps. What is measured, and why each limit is what it is:
docs/lora.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laneway.connections import measures
from laneway.connections.adapters import Adapter, all_off, find_adapters
from laneway.connections.measures import Limits, Observation
from laneway.connections.meter import AdapterMeter
from laneway.connections.picture import Camera, Picture
from laneway.core import InputError, LanewayError, choice, positive_int

POLICIES = ("stop", "warn", "record")


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be.

    Args:
        step: optimizer step after which it was seen; 0 is the beginning.
        layer: the adapter layer, site or parameter at fault: the first in the order of execution.
        measure: which measure found it.
        value: what was measured.
        accepted: what would have been accepted, in words.
    """

    step: int
    layer: str
    measure: str
    value: float | str
    accepted: str

    def __str__(self) -> str:
        value = f"{self.value:.3g}" if isinstance(self.value, float) else self.value
        return f"step {self.step}: {self.layer}: {self.measure}: {value}; accepted: {self.accepted}"


class ConsistencyError(LanewayError):
    """A check stopped the run. ``findings`` has all that this check found, the error's text the first."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        super().__init__(f"{findings[0]}{more}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.findings,)


class ConsistencyWarning(UserWarning):
    """A finding under the policy ``warn``."""


class ConsistencyCheck:
    """Watches a fine-tune with low-rank adapters; create it **before** they are added.

    Args:
        model: the base model. It stays this object when laneway's or PEFT's adapters are put into it.
        sample: what the model is called with in a check: a tensor of tokens, a tuple or a dict of arguments. Of a tensor of
            more than ``tokens`` tokens [b, t] only the first sequences are taken.
        policy: ``stop`` raises ConsistencyError, ``warn`` warns once a layer and measure, ``record`` only adds to ``findings``.
        every: steps between checks; the first step is always checked.
        tokens: how many tokens of the sample are looked at.
        limits: what is accepted.
        training: False for a model that is only used: frozen adapters are right then.

    ``findings`` has the first finding of every layer and measure; ``figures`` the largest contribution, shift of logits, drift
    and difference of the last check. It is an Extension of the training loop, with a state that goes on across processes.

    Raises:
        InputError: a value out of range, or the model has adapters already.
        ConsistencyError: a map is narrower than fp32, under every policy: such a model does not run.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        policy: str = "stop",
        *,
        every: int = 10,
        tokens: int = 256,
        limits: Limits | None = None,
        training: bool = True,
    ) -> None:
        self.policy, self.every, self.tokens = choice("policy", policy, POLICIES), positive_int("every", every), tokens
        positive_int("tokens", tokens)
        if present := find_adapters(model):
            raise InputError("model", f"adapters at {present[0].name}", "the base model, before adapters are added")
        self.model, self.limits, self.training = model, limits or Limits(), training
        self.camera = Camera(model, _fit(sample, tokens), tokens)
        self.ties = _ties(model)
        if narrow := list(measures.dtypes(model)):  # a site refuses to run, so there is no reference, whatever the policy
            raise ConsistencyError([Finding(0, item.layer, item.measure, item.value, item.accepted) for item in narrow])
        self.reference: Picture = self.camera.take()
        self.findings: list[Finding] = []
        self.figures: dict[str, float] = {}
        self.adapters: list[Adapter] = []
        self._scalings: dict[str, list[float]] = {}
        self._moved: dict[str, Tensor] = {}
        self._had_gradient: set[str] = set()
        self._record: dict[str, Any] | None = None
        self._step = 0

    # -- checkpoints

    def begin(self, fresh: bool | None = None) -> list[Finding]:
        """After adapters were added (or loaded): structure, and that the function is what it was.

        Args:
            fresh: whether the adapters are new, so that nothing may have changed; None: they are, unless a record was loaded.

        Raises:
            InputError: the model has no adapters.
            ConsistencyError: something was found, under the policy ``stop``.
        """
        self.adapters = find_adapters(self.model)
        if not self.adapters:
            raise InputError("model", type(self.model).__name__, "a model with adapters", "add them before begin()")
        saved = self._record or {}
        self._scalings = {a.name: saved.get("scalings", {}).get(a.name, [s for *_, s in a.factors()]) for a in self.adapters}
        self._moved = {}
        found: list[Observation] = []
        if self._record is not None:
            found += self._since(self._record)
        found += self._look(fresh=self._record is None if fresh is None else fresh)
        self._moved = {adapter.name: _mark(adapter) for adapter in self.adapters}
        return self._report(0, found)

    def check(self, step: int = 0) -> list[Finding]:
        """All measures now; returns what is new. Raises as ``begin``."""
        if not self.adapters:
            return self.begin()
        found = [*self._still(), *self._look(fresh=False)]
        self._moved = {adapter.name: _mark(adapter) for adapter in self.adapters}
        self._had_gradient = set()
        return self._report(step, found)

    # -- the training loop's extension

    def on_step_begin(self, step: int) -> None:
        """The first step begins with ``begin``, where that has not been called."""
        if not self.adapters:
            self.begin()

    def on_backward_end(self, step: int) -> None:
        """Every adapter's gradient is finite; seen before the optimizer spreads it."""
        sizes = {a.name: [p.grad.norm() for p in a.parameters() if p.grad is not None] for a in self.adapters}
        sizes = {name: torch.stack(norms).sum() for name, norms in sizes.items() if norms}
        values = torch.stack(list(sizes.values())).tolist() if sizes else []
        self._had_gradient |= {name for name, size in zip(sizes, values, strict=True) if size > 0}
        bad = [name for name, size in zip(sizes, values, strict=True) if not size < float("inf")]
        self._report(step, [Observation(name, "gradient", "not finite", "finite gradients") for name in bad])

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """Every ``every`` steps, and after the first: all measures. Adds ``lora_…`` to the metrics."""
        if step == 1 or step % self.every == 0:
            self.check(step)
            metrics |= {f"lora_{name}": value for name, value in self.figures.items()}
        self._step = step

    def state_dict(self) -> dict[str, Any]:
        """The reference and, where there are adapters, a record of them and of the function now. Costs a forward pass."""
        state: dict[str, Any] = {"step": self._step, "sample": _signature(self.camera.sample), "record": None}
        state["reference"] = self.reference.state()
        if self.adapters:
            state["record"] = {
                "scalings": {name: list(values) for name, values in self._scalings.items()},
                "marks": {adapter.name: _mark(adapter) for adapter in self.adapters},
                "now": self.camera.take().state(),
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare with another process's reference; with its adapters too, now or in ``begin`` once they are there.

        Raises:
            InputError: this check has another sample.
            ConsistencyError: the base computes another function than when the state was made, under the policy ``stop``.
        """
        if state["sample"] != _signature(self.camera.sample):
            raise InputError("sample", "another one", "the sample with which the record was made", "outputs are compared on it")
        then, self._step = Picture.from_state(state["reference"]), state["step"]
        found = list(measures.dtypes(self.model))
        if not found:
            with all_off(find_adapters(self.model)):
                self.reference = self.camera.take()  # again: a checkpoint may have been loaded since the last one
            found += measures.same_outputs(self.reference, then, self.limits.carried, 0, "base")
        self.reference.sites = then.sites  # the statistics of the first process stay the measure of drift
        self._record = state["record"]
        self._report(self._step, found)
        if self.adapters:
            self.begin()

    # -- parts

    def _look(self, fresh: bool) -> Iterable[Observation]:
        """Every measure that needs no history, exact ones first."""
        found = [
            *measures.structure(self.model, self.adapters, self.ties, self.training, self.limits),
            *measures.dtypes(self.model),
        ]
        if any(item.measure == "dtype" for item in found):
            return found  # a site refuses to run
        if merged := [a.name for a in self.adapters if a.merged and not a.own]:  # a forward with adapters off would unmerge it
            return found + [
                Observation(name, "merged", "PEFT keeps no original of it", "PEFT's adapters unmerged") for name in merged
            ]
        limits, rounding = self.limits, self.limits.rounding
        with all_off(self.adapters):
            base = self.camera.take()
        found += measures.same_outputs(base, self.reference, None, rounding, "base")
        meters = {a.module: AdapterMeter(a, self.camera, self._scalings[a.name]) for a in self.adapters}
        on = self.camera.take(dict(meters))
        if fresh:
            found += self._unchanged(on, list(meters.values()))
        found += [
            *measures.maps(self.camera, base, self.reference, limits),
            *measures.maps(self.camera, on, self.reference, limits),
        ]
        found += _laws(list(meters.values()), limits)
        shifts = list(measures.drift(on, self.reference))
        accepted = f"a shift ≤ {limits.drift:g} deviations"
        found += [Observation(layer, measure, value, accepted) for layer, measure, value in shifts if not value <= limits.drift]
        self.figures = {
            "contribution": max(meter.contribution for meter in meters.values()),
            "logits": max(meter.logits for meter in meters.values()),
            "drift": max((value for *_, value in shifts), default=0.0),
            "base_difference": base.outputs[""].difference(self.reference.outputs[""]),
        }
        return found

    def _unchanged(self, on: Picture, meters: list[AdapterMeter]) -> Iterable[Observation]:
        """New adapters change nothing: named is the first that adds something, else the first output that differs."""
        adding = [(meter.adapter.name, size) for meter in meters if (size := max(meter.contribution, meter.logits)) > 0]
        if adding:
            yield Observation(adding[0][0], "start", adding[0][1], "new adapters that add nothing (B = 0)")
        else:
            yield from measures.same_outputs(
                Picture({"": on.outputs[""]}), Picture({"": self.reference.outputs[""]}), None, self.limits.rounding, "start"
            )

    def _still(self) -> Iterable[Observation]:
        """Adapters that had gradients since the last check and are where they were."""
        for adapter in self.adapters:
            name = adapter.name
            if name in self._had_gradient and name in self._moved and torch.equal(_mark(adapter), self._moved[name]):
                yield Observation(name, "still", "has gradients and does not move", "factors that the optimizer updates")

    def _since(self, record: dict[str, Any]) -> Iterable[Observation]:
        """Adapters and function against those at the time of the record."""
        found = []
        for adapter in self.adapters:
            saved, here = record["marks"].get(adapter.name), _mark(adapter)
            if saved is None:
                found.append(Observation(adapter.name, "record", "not in the record", "the adapters of the record"))
            elif here.shape != saved.shape or not torch.allclose(here, saved, rtol=1e-6, atol=1e-12, equal_nan=True):
                found.append(Observation(adapter.name, "record", "other factors or scaling", "those at the time of the record"))
        missing = sorted(set(record["marks"]) - {adapter.name for adapter in self.adapters})
        found += [Observation(name, "record", "has no adapter", "the adapters of the record") for name in missing]
        if not found and not list(measures.dtypes(self.model)):
            then = Picture.from_state(record["now"])
            found += measures.same_outputs(self.camera.take(), then, self.limits.carried, 0, "record")
        return found

    def _report(self, step: int, found: Iterable[Observation]) -> list[Finding]:
        known = {(finding.layer, finding.measure) for finding in self.findings}
        new = []
        for item in found:
            if (item.layer, item.measure) not in known:
                known.add((item.layer, item.measure))
                new.append(Finding(step, item.layer, item.measure, item.value, item.accepted))
        self.findings += new
        if new and self.policy == "stop":
            raise ConsistencyError(new)
        for finding in new if self.policy == "warn" else []:
            warnings.warn(str(finding), ConsistencyWarning, stacklevel=3)
        return new


def _laws(meters: list[AdapterMeter], limits: Limits) -> Iterable[Observation]:
    for meter in meters:
        name = meter.adapter.name
        if not meter.law <= limits.law:
            yield Observation(
                name, "law", meter.law, f"an output within {limits.law:g} of W x + s B A x, in training and eval mode"
            )
        if not meter.contribution <= limits.contribution:
            accepted = f"at most {limits.contribution:g} times the base's output"
            yield Observation(name, "contribution", meter.contribution, accepted)
        if not meter.logits <= limits.logits:
            yield Observation(name, "logits", meter.logits, f"a shift of the maps' logits ≤ {limits.logits:g}")


def _mark(adapter: Adapter) -> Tensor:
    """A few sums by which the factors are known again: [adapters, 5] in float64."""
    rows = [torch.stack([f.detach().double().sum(), f.detach().double().norm()]) for a, b, _ in adapter.factors() for f in (a, b)]
    scalings = [torch.tensor([s], dtype=torch.float64) for *_, s in adapter.factors()]
    return torch.cat([row.cpu() for row in rows] + scalings)


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Parameters that several modules share."""
    by_id: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                by_id.setdefault(id(parameter), []).append((module, key))
    return [group for group in by_id.values() if len(group) > 1]


def _fit(sample: Any, tokens: int) -> Any:
    """A tensor of sequences [b, t, …]: those that fit, at least one. Anything else as it is."""
    if isinstance(sample, Tensor) and sample.ndim >= 2:
        return sample[: max(1, tokens // max(sample.shape[1], 1))]
    return sample


def _signature(sample: Any) -> list[float]:
    """Numbers by which a sample is known again: two sums over each of its tensors."""
    if isinstance(sample, dict):
        return [number for key in sorted(sample) for number in _signature(sample[key])]
    if isinstance(sample, list | tuple):
        return [number for item in sample for number in _signature(item)]
    if not isinstance(sample, Tensor):
        return []
    flat = sample.detach().double().flatten().cpu()
    return [flat.sum().item(), (flat * torch.arange(1, len(flat) + 1, dtype=torch.float64)).sum().item()]
