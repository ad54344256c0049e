"""The memory manager: keeps a training step within a budget of device memory, with the same gradients bit for bit.

A pass (forward and backward) of a kind that was not seen before is held within the budget by sending out what was saved first,
and is written down. From then on passes of that kind follow a plan made from the record: what to keep, to move and to compute
again. A pass that turns out otherwise than its plan falls back to the first way, and is planned anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from laneway.core import LanewayError
from laneway.memory.activations import Activations
from laneway.memory.clock import Clock, WallClock
from laneway.memory.config import MemoryConfig
from laneway.memory.extents import Known, storages
from laneway.memory.gradients import ParkedGradients
from laneway.memory.meter import Meter
from laneway.memory.online import victims
from laneway.memory.parameters import StreamedParameters
from laneway.memory.plan import Plan, make_plan
from laneway.memory.predict import Forecaster, Signature
from laneway.memory.profile import PassProfile
from laneway.memory.record import Recorder
from laneway.memory.residency import Account, Choice, Entry, Schedule
from laneway.memory.simulate import Link, moved_bytes
from laneway.memory.stack import StackedTier
from laneway.memory.tier import Tier
from laneway.memory.watch import Watch, find_blocks

if TYPE_CHECKING:
    from laneway.memory.optimizer_state import StreamedOptimizerState

UNKNOWN_HEADROOM = 0.25  # of what is left of the budget: kept free for what a pass never seen makes beside what it saves
DRIFT = 0.01  # of the budget: passes that begin with more of a difference than that have plans of their own
TIGHTEN = 0.1  # of the budget, less for passes of a signature each time that one ran out of memory
LEAST_WINDOW, LARGEST_WINDOW, WINDOWS_IN_BUDGET = 1 << 20, 64 << 20, 32
PLANS = 64  # kept; the one used longest ago goes first


@dataclass(frozen=True)
class PassReport:
    """What a pass came to. Bytes and seconds.

    Attributes:
        signature: of the model's arguments.
        way: ``recorded``, ``planned`` or ``strayed`` (began with a plan that did not fit it).
        peak: most bytes on the device; ``predicted``: what the plan said, or the forecast from other shapes; None: no forecast.
        static: bytes on the device when it began.
        seconds: time from its first event to its end.
        account: the books.
        coding_error: mean and most of the relative errors of a sample of what moved coded; None: nothing did.
    """

    signature: Signature
    way: str
    peak: int
    predicted: float | None
    static: int
    seconds: float
    account: Account
    coding_error: tuple[float, float] | None = None


class MemoryManager:
    """See ``manage_memory``, which makes one.

    Args:
        model: whose forward pass begins a pass.
        config: budget, policy and solver.
        tier: where entries go.
        meter: the device's bytes.
        device: of the managed tensors.
        clock: what stalls are measured on.
        recompute: whether plans may compute again: modules' outputs, and whole blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        config: MemoryConfig,
        tier: Tier,
        meter: Meter,
        device: torch.device,
        *,
        clock: Clock | None = None,
        recompute: bool = True,
    ) -> None:
        self.model, self.config, self.tier, self.meter, self.device = model, config, tier, meter, device
        self.clock, self.recompute = clock or WallClock(), recompute
        self.budget = config.budget_bytes(meter.capacity()) or meter.capacity()
        self.forecaster = Forecaster()
        self.passes: deque[PassReport] = deque(maxlen=4096)
        self._plans: dict[tuple[Signature, int], Plan] = {}  # by shape and by how much more there is than when it was recorded
        self.profiles: dict[Signature, PassProfile] = {}
        self.budgets: dict[Signature, float] = {}  # of shapes that ran out of memory: less than the budget
        self.counted = 0  # passes so far
        self.replanned = 0
        self.optimizer_state: StreamedOptimizerState | None = None
        self.gradients: ParkedGradients | None = None
        self.parameters: StreamedParameters | None = None
        self._owned: Known[bool] = Known()
        self.activations = Activations(
            tier,
            self.clock,
            device,
            min_bytes=config.min_bytes,
            protected=lambda tensor: self._owned.get(tensor) is not None,
            coded=config.saved_tensors == "int8",
        )
        self._watch = Watch(model, self.activations, find_blocks(model))
        self._recorder: Recorder | None = None
        self._plan: Plan | None = None
        self._signature: Signature | None = None
        self._static = 0
        self._began = 0.0
        self._strayed = False
        self._predicted: float | None = None
        self._gathered: list[Any] = []
        self._hooks: Any = None
        self._root: Any = None

    # -- on and off

    def __enter__(self) -> MemoryManager:
        if self._root is not None:
            raise LanewayError("the memory manager is on already")
        self._root = self.model.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        self._gathered = [m.register_forward_pre_hook(self._own_parameters) for m in self._sharded_modules()]
        self._hooks = self.activations.hooks()
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        for hook in (self._root, *self._gathered):
            hook.remove()
        self.end_pass()
        self._hooks = self._root = None

    def close(self) -> None:
        """Bring everything back and give the tier back."""
        for part in (self.parameters, self.gradients, self.optimizer_state):
            if part is not None:
                part.close()
        self.tier.close()

    def bring_all(self) -> None:
        """Bring back gradients and parameters that are in the tier. Parameters stay until their modules have worked again."""
        if self.gradients is not None:
            self.gradients.gather()
        if self.parameters is not None:
            self.parameters.bring_all()

    @contextmanager
    def all_here(self) -> Generator[None]:
        """Within, gradients and parameters are all here: for clipping and the optimizer's step. Afterwards parameters leave."""
        self.bring_all()
        try:
            yield
        finally:
            if self.parameters is not None:
                self.parameters.send_all()

    def park_gradients(self) -> None:
        """From now on gradients wait in the tier between micro-batches, until ``bring_all`` or ``all_here``."""
        self.gradients = ParkedGradients(self.model.parameters(), self.tier, window_bytes=self._window())

    def stream_parameters(self, *, stay_without_grad: bool = False) -> None:
        """From now on parameters that are not at work are in the tier. See ``StreamedParameters``."""
        self.parameters = StreamedParameters(
            self.model, self.tier, window_bytes=self._window(), stay_without_grad=stay_without_grad
        )
        self._watch.parameters_leave = True

    @contextmanager
    def paused(self) -> Generator[None]:
        """Within, tensors are saved as if there were no manager."""
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
            yield

    def _window(self) -> int:
        """Bytes of gradients or parameters that are on their way ahead of their turn: a small part of the budget."""
        return min(LARGEST_WINDOW, max(LEAST_WINDOW, self.budget // WINDOWS_IN_BUDGET))

    def _sharded_modules(self) -> list[nn.Module]:
        """Modules with parameters that FSDP2 gathers for their forward pass: only then it is known where they lie."""
        if not any(isinstance(parameter, DTensor) for parameter in self.model.parameters()):
            return []
        return [module for module in self.model.modules() if any(p is not None for p in module._parameters.values())]

    def _own_parameters(self, module: nn.Module, args: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and not isinstance(parameter, DTensor):
                self._owned.put(parameter, True)

    # -- passes

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A pass begins, unless a graph of the one before is still alive: then it goes on."""
        if not torch.is_grad_enabled() or self.activations.alive:
            return
        self.end_pass()
        self._begin_pass(Signature.of([args, kwargs]))

    def _begin_pass(self, signature: Signature) -> None:
        self._owned = storages([*self.model.parameters(), *self.model.buffers()])  # anew: they may have been replaced
        self._signature, self._static, self._strayed = signature, self.meter.live(), False
        self._began = self.clock.now()
        self._plan = self._current_plan(signature)
        if self._plan is None:
            guess = self.forecaster.model.predict(signature)
            self._predicted = None if guess is None else min(guess.bytes + self._static, self.budget)
            self.activations.begin(self._reactive(signature))
            self.tier.expect(0)
            coding = self.activations.try_coding if self.activations.errors is not None else None
            self._recorder = Recorder(self.activations.books, self.meter, self.clock, self._settle(), coding)
            self._watch.record(self._recorder)
            self.activations.observer = self._recorder
            return
        self._predicted = self._plan.predicted.peak + (self._static - self._plan.profile.static)
        self.activations.begin(self._plan.schedule(self._static))
        self.tier.expect(moved_bytes(self._plan.profile, self._plan.choices))
        again = {
            entry.name
            for entry, choice in zip(self._plan.profile.entries, self._plan.choices, strict=True)
            if choice is Choice.RECOMPUTE
        }
        self._watch.follow(again, self._plan.blocks)
        self.activations.observer = self._follow
        self.meter.reset_peak()

    def end_pass(self) -> None:
        """Close the pass that is under way, if any: what it came to is noted, and planned from if it was recorded."""
        self._watch.clear()
        self.activations.observer = None
        if self._signature is None:
            return
        signature, self._signature = self._signature, None
        account = self.activations.account
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            profile = recorder.finish()
            peak, way = recorder.peak, "strayed" if self._strayed else "recorded"
            if profile.events and not self.activations.alive:
                self.profiles[signature] = profile
                self.forecaster.observe(signature, max(1, profile.peak - profile.static))
        else:
            peak, way = self.meter.peak(), "strayed" if self._strayed else "planned"
            if self._strayed:
                self._forget(signature)
                self.replanned += 1
        seconds = self.clock.now() - self._began
        self.counted += 1
        errors = None if self.activations.errors is None else self.activations.errors.mean_and_most()
        self.passes.append(PassReport(signature, way, peak, self._predicted, self._static, seconds, account, errors))

    def since(self, counted: int) -> list[PassReport]:
        """Reports of the passes after the first ``counted``, as far back as they are kept."""
        new = self.counted - counted
        return list(self.passes)[-new:] if new else []

    def abandon_pass(self) -> Signature | None:
        """Close a pass that failed: nothing is learnt from it. Returns the shape it was of; None where none was under way."""
        self._watch.clear()
        self.activations.observer = None
        signature, self._signature, self._recorder = self._signature, None, None
        return signature

    def link(self) -> Link:
        """The way to the tier, as measured."""
        if not isinstance(self.tier, StackedTier):
            return Link(*self.tier.bandwidth())
        below: Link | None = None
        for tier in reversed(self.tier.tiers):
            below = Link(*tier.bandwidth(), capacity=max(1, tier.capacity - tier.used), below=below)
        assert below is not None
        return below

    # -- plans

    def _current_plan(self, signature: Signature) -> Plan | None:
        """The plan for a pass of this shape that begins with this much on the device; None: no such pass was seen yet."""
        profile = self.profiles.get(signature)
        if profile is None:
            return None
        drift = self._static - profile.static
        key = signature, round(drift / (DRIFT * self.budget))
        plan = self._plans.pop(key, None)
        if plan is None:
            plan = make_plan(
                profile.shifted(drift),
                self.budget_of(signature),
                self.link(),
                solver=self.config.solver,
                recompute=self.recompute,
            )
        self._plans[key] = plan  # as the one used last
        while len(self._plans) > PLANS:
            del self._plans[next(iter(self._plans))]
        return plan

    @property
    def plans(self) -> dict[Signature, Plan]:
        """For each shape the plan that was used last."""
        return {signature: plan for (signature, _), plan in self._plans.items()}

    def budget_of(self, signature: Signature) -> float:
        """Bytes on the device that passes of this shape are planned for."""
        return self.budgets.get(signature, self.budget)

    def tighten(self, signature: Signature, by: float = TIGHTEN) -> float:
        """A pass of this shape ran out of memory: plan them for a budget less by the fraction ``by`` from now on.

        Returns:
            That budget, in bytes.
        """
        self.budgets[signature] = self.budgets.pop(signature, self.budget) * (1.0 - by)
        self._drop_plans(signature)
        while len(self.budgets) > PLANS:
            del self.budgets[next(iter(self.budgets))]
        return self.budgets[signature]

    def _forget(self, signature: Signature) -> None:
        """Passes of this shape are to be recorded and planned anew."""
        self.profiles.pop(signature, None)
        self._drop_plans(signature)

    def _drop_plans(self, signature: Signature) -> None:
        self._plans = {key: plan for key, plan in self._plans.items() if key[0] != signature}

    def _reactive(self, signature: Signature) -> Schedule:
        """No plan: send out what was saved first as soon as what the pass makes beside might not fit any more."""
        headroom, budget = self._headroom(signature), self.budget_of(signature)

        def allowance() -> float:
            return budget - (self.meter.live() - self.activations.books.resident) - headroom

        began = self._began
        chosen = victims(self.config.policy, self.activations.books, lambda: self.clock.now() - began, self.tier.bandwidth())
        return Schedule(allowance=allowance, victims=chosen)

    def _headroom(self, signature: Signature) -> float:
        """Bytes to keep free for what a pass makes beside what it saves: as in the passes seen, by tokens."""
        per_token = [
            (profile.floor - profile.static) / max(1, seen.tokens) for seen, profile in self.profiles.items() if profile.events
        ]
        if per_token:
            return max(per_token) * signature.tokens
        return UNKNOWN_HEADROOM * max(0, self.budget - self._static)

    def _follow(self, kind: str, entry: Entry) -> None:
        """While a plan is followed: is this the pass that it was made for?"""
        if kind != "save" or self._strayed or self._plan is None or self._signature is None:
            return
        expected = self._plan.profile.entries
        unlike = entry.index >= len(expected) or expected[entry.index].nbytes != entry.nbytes
        if unlike or (self._plan.choices[entry.index] is Choice.RECOMPUTE and not entry.again):
            self._strayed = True
            choices = self.activations.books.schedule.choices[: entry.index]
            self.activations.books.schedule = replace(self._reactive(self._signature), choices=choices)

    def _settle(self) -> Callable[[], None]:
        if self.device.type == "cpu":
            return lambda: None
        return lambda: torch.accelerator.synchronize(self.device)


def device_of(model: nn.Module) -> torch.device:
    """The device that a model's parameters are on.

    Raises:
        LanewayError: there are none, or they are on several.
    """
    found = {parameter.device for parameter in model.parameters()}
    if len(found) != 1:
        raise LanewayError(f"the memory manager needs a model on one device; its parameters are on {len(found)}")
    return found.pop()
