"""Failed allocations: the step happens exactly once, with the bits of a step in which nothing failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from survival import ALL
from torch import Tensor, nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from laneway.core import InputError, LanewayError
from laneway.memory import micro_batch
from laneway.memory.clock import VirtualClock
from laneway.memory.config import MemoryConfig
from laneway.memory.exact_step import step_exactly
from laneway.memory.manager import MemoryManager
from laneway.memory.oom import Failure, out_of_memory, wanted_bytes
from laneway.memory.retry import RetryOps, repeatable
from laneway.memory.simulated import SimulatedTier
from laneway.memory.survive import CALM, CALM_IF_TIGHT, Survivor

CPU = torch.device("cpu")
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are tested on Linux alone")


def survival(*cases: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "error", str(Path(__file__).with_name("survival.py")), *cases]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    limits = ["limited,plain,nothing,1", *(f"limited,{how},rlimit,60" for how in ("plain", "managed", "overbooked"))]
    return survival(*ALL, "split", "parked", *(limits if sys.platform.startswith("linux") else []))


# -- every allocation


@pytest.mark.parametrize("way", ALL)
def test_a_failure_at_any_allocation_changes_no_bit(found, way):
    """Parameters, buffers, optimizer state and generators, after a step with dropout, batch normalisation and accumulation."""
    assert found[way].get("wrong") == [], found[way]
    assert found[way]["tried"] >= (40 if "fused" not in way else 10)


@pytest.mark.slow
def test_nor_does_a_failure_at_the_smallest_allocations():
    case = survival("smallest")["smallest"]
    assert case["wrong"] == []
    assert case["tried"] >= 200


def test_each_level_had_its_share(found):
    assert found["replayed"]["kinds"] == ["replay"]
    assert found["retried"]["kinds"] == ["op_retry", "replay"]
    assert found["managed"]["moved"] > 100_000
    assert found["managed-retried"]["kinds"] == ["op_retry", "replay"]


def test_a_micro_batch_too_large_is_split_and_the_split_is_remembered(found):
    case = found["split"]
    assert case["kinds"] == ["replay", "replay", "split", "split", "split"]  # the second one: whole once, then in four
    assert case["gradients"] < 1e-5
    assert case["loss"] < 1e-5


def test_what_does_not_fit_at_all_says_what_to_change_and_leaves_everything_as_it_was(found):
    case = found["split"]
    assert case["said"].startswith("out of memory in each of 3 tries of a micro-batch, last in micro (survival.py:")
    for words in ("more were needed", "no memory budget", "lower micro_batch_size", "give a memory budget"):
        assert words in case["said"]
    assert case["kept"]


def test_earlier_gradients_leave_the_device_for_the_second_try(found):
    case = found["parked"]
    assert case["tries"] == 5
    assert case["freed"] >= case["gradients"] > 1e6
    assert case["moved"] == [case["gradients"], case["gradients"]]
    assert case["equal"]
    assert case["left"] == 0


# -- real limits


@LINUX
def test_under_a_limit_of_address_space_the_plain_run_dies_and_the_managed_one_does_not(found):
    plain = found["limited,plain,rlimit,60"]
    assert plain["oom"]
    assert "DefaultCPUAllocator: can't allocate memory" in plain["error"]
    managed = found["limited,managed,rlimit,60"]
    assert managed["losses"] == found["limited,plain,nothing,1"]["losses"]
    assert managed["moved"] > 50 << 20


@LINUX
def test_a_budget_larger_than_the_memory_is_survived_too(found):
    case = found["limited,overbooked,rlimit,60"]
    assert case["losses"] == found["limited,plain,nothing,1"]["losses"]
    assert case["counts"]["replay"] >= 1


@pytest.fixture(scope="module")
def group() -> Iterator[Path]:
    """An empty memory control group of our own."""
    for parent in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        made = parent / f"laneway-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        if (made / "memory.max").exists() or (made / "memory.limit_in_bytes").exists():
            yield made
            made.rmdir()
            return
        made.rmdir()
    pytest.skip("no memory control group can be made here")


@pytest.mark.parametrize("how", ["plain", "managed"])
def test_under_a_control_groups_limit_the_plain_run_is_killed_and_the_managed_one_is_not(found, group, how):
    name = f"limited,{how},{group},60"
    case = survival(name)[name]
    if how == "plain":
        assert case == {"signal": signal.SIGKILL}
    else:
        assert case["losses"] == found["limited,plain,nothing,1"]["losses"]


# -- what counts as out of memory


def cause(error: Exception, by: Exception, *, hidden: bool = False) -> Exception:
    try:
        try:
            raise by
        except (MemoryError, RuntimeError):
            if hidden:
                raise error from None
            raise error  # noqa: B904 (the context is what is tested)
    except type(error) as raised:
        return raised


def test_the_classifier():
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 50)
    oom = [
        real.value,
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."),
        MemoryError(),
        RuntimeError("std::bad_alloc"),
        cause(KeyError("x"), MemoryError()),
        cause(LanewayError("x"), real.value),
    ]
    assert all(out_of_memory(error) for error in oom)
    others = [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("shape mismatch"),
        ValueError("std::bad_alloc"),
        KeyError("out of memory"),
        OSError(28, "No space left on device"),
        cause(KeyError("x"), MemoryError(), hidden=True),
        KeyboardInterrupt(),
    ]
    assert not any(out_of_memory(error) for error in others)
    assert wanted_bytes(real.value) == 1 << 52
    assert wanted_bytes(oom[1]) == int(2.5 * (1 << 30))
    assert wanted_bytes(MemoryError()) == 0


def test_a_failure_holds_nothing_of_the_frames_it_came_through():
    def inner() -> None:
        held = torch.ones(3)

        def closed() -> None:
            held.add(1)
            raise MemoryError

        try:
            closed()
        finally:
            gone.append(weakref(held))

    from weakref import ref as weakref

    gone: list[Any] = []
    try:
        inner()
    except MemoryError as error:
        failure = Failure.of(error)
    assert gone[0]() is None
    assert failure.where.startswith("closed (test_survive.py:")
    assert "in closed" in failure.error.__notes__[0]


# -- level 1


class Failing:
    """Ops that run out of memory the first ``times`` times: a mode below RetryOps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
        self.left, self.calls = times, 0
        packet = getattr(torch.ops.aten, name.split(".")[0])
        overload = getattr(packet, name.split(".")[1])
        original = type(overload).__call__

        def call(op: Any, /, *args: Any, **kwargs: Any) -> Any:
            if op is overload:
                self.calls += 1
                found = original(op, *args, **kwargs)  # it had begun: generators moved on
                if self.left:
                    self.left -= 1
                    raise torch.OutOfMemoryError("CPU out of memory (test): wanted 1000 bytes")
                return found
            return original(op, *args, **kwargs)

        monkeypatch.setattr(type(overload), "__call__", call)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("mm.default", lambda: torch.ones(2, 3) @ torch.ones(3, 2)),
        ("randperm.default", lambda: torch.randperm(9)),
        ("multinomial.default", lambda: torch.multinomial(torch.ones(9), 4)),
        ("native_dropout.default", lambda: torch.native_dropout(torch.ones(9), 0.5, True)[0]),
    ],
)
def test_an_op_that_failed_gives_what_it_would_have_given(monkeypatch, name, run):
    torch.manual_seed(2)
    want, state = run(), torch.get_rng_state()
    failing = Failing(monkeypatch, name, 2)
    asked, told = [], []
    torch.manual_seed(2)
    with RetryOps(lambda n: asked.append(n) or n, told=lambda *what: told.append(what)):
        got = run()
    assert torch.equal(got, want)
    assert torch.equal(torch.get_rng_state(), state)
    assert failing.calls == 3
    assert asked == [1000, 2000]
    assert told[0][:2] == (f"aten.{name}", 1000)


def test_ops_are_tried_a_bounded_number_of_times(monkeypatch):
    failing = Failing(monkeypatch, "mm.default", 99)
    freed = []
    with RetryOps(lambda n: 0, free=lambda: freed.append(1)), pytest.raises(torch.OutOfMemoryError):
        torch.ones(2, 3) @ torch.ones(3, 2)
    assert failing.calls == 3
    assert len(freed) == 2


def test_ops_in_the_backward_pass_are_tried_again(monkeypatch):
    x = torch.randn(3, requires_grad=True)
    failing = Failing(monkeypatch, "tanh_backward.default", 1)
    with RetryOps(lambda n: n):
        x.tanh().sum().backward()
    assert failing.calls == 2
    assert torch.equal(x.grad, torch.autograd.grad(x.tanh().sum(), x)[0])


def test_ops_that_change_something_are_not_repeated():
    aten = torch.ops.aten
    assert repeatable(aten.mm.default)
    assert repeatable(aten.native_batch_norm_backward.default)
    assert not repeatable(aten.add_.Tensor)
    assert not repeatable(aten.mm.out)
    assert not repeatable(aten._fused_adamw_.default)
    assert not repeatable(aten.native_batch_norm.default)  # its schema hides what it writes
    assert not repeatable(aten._cudnn_rnn.default)
    assert not repeatable(torch.ops._c10d_functional.all_reduce.default)


def test_ops_are_watched_for_a_while_after_a_failure_and_not_before():
    model = nn.Linear(2, 2)
    survivor, depths, fail = Survivor(None, model, device=CPU), [], [False]

    def run() -> None:
        depths.append(_len_torch_dispatch_stack())
        if fail.pop():
            raise MemoryError

    for number in range(CALM + 4):
        fail[:] = [False, True] if number == 1 else [False]
        survivor.attempt(run)
    assert depths == [0, 0, *[1] * CALM, *[0] * 3]
    assert [event.kind for event in survivor.events] == ["replay"]


# -- with the manager


@pytest.fixture
def managed() -> Iterator[tuple[MemoryManager, nn.Module]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))
    clock = VirtualClock()
    config = MemoryConfig(budget="1TiB", min_bytes=1)
    manager = MemoryManager(model, config, SimulatedTier(clock, 1 << 30, 1e9, 1e9), Meter(), CPU, clock=clock)
    with manager:
        yield manager, model


class Meter:
    """A device on which nothing is but what the test says."""

    used = 0

    def live(self) -> int:
        return self.used

    def peak(self) -> int:
        return self.used

    def reset_peak(self) -> None:
        pass

    def capacity(self) -> int:
        return 1 << 41


def test_a_failed_pass_teaches_nothing_and_its_shape_gets_less(managed):
    manager, model = managed
    survivor, tries = Survivor(manager, model, device=CPU), []

    def run(rows: int) -> None:
        loss = model(torch.ones(rows, 4)).square().sum()
        tries.append(rows)
        if len(tries) in (2, 3):
            raise MemoryError
        loss.backward()

    survivor.attempt(lambda: run(3))
    survivor.attempt(lambda: run(5))
    manager.end_pass()
    assert tries == [3, 5, 5, 5]
    assert [report.way for report in manager.passes] == ["recorded", "recorded"]
    three, five = (report.signature for report in manager.passes)
    assert manager.budget_of(three) == manager.budget
    assert manager.budget_of(five) == pytest.approx(0.81 * manager.budget)
    assert [event.kind for event in manager.profiles[five].events].count("use") == len(manager.profiles[five].entries)
    survivor.attempt(lambda: run(5))
    assert manager.plans[five].budget == pytest.approx(0.81 * manager.budget)
    manager.tighten(five)
    assert five not in manager.plans
    assert manager.activations.alive == 0
    assert manager.tier.used == 0


def test_ops_are_watched_while_the_device_is_over_the_budget_and_a_while_longer(managed):
    manager, model = managed
    survivor, depths = Survivor(manager, model, device=CPU), []

    def run() -> None:
        model(torch.ones(2, 4)).sum().backward()
        depths.append(_len_torch_dispatch_stack())

    survivor.attempt(run)
    manager.end_pass()
    manager.meter.used = 2 << 40
    survivor.attempt(run)
    manager.end_pass()
    manager.meter.used = 0
    manager.tighten(manager.passes[-1].signature)  # drop the plan that was made for so much
    for _ in range(CALM_IF_TIGHT + 3):
        survivor.attempt(run)
    assert depths == [0, 0, *[1] * (CALM_IF_TIGHT + 1), 0, 0]


# -- level 2, without an allocator


class Counting(nn.Module):
    """Changes a large buffer and a small one at each call."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("large", torch.zeros(large // 4))
        self.register_buffer("small", torch.zeros(2))

    def forward(self) -> Tensor:
        self.large.add_(1)
        self.small = self.small + 1
        return (self.weight * torch.rand(3)).sum()


def failing_once(model: nn.Module) -> Any:
    tries = []

    def run() -> float:
        loss = model()
        loss.backward()
        tries.append(1)
        if len(tries) == 1:
            raise MemoryError
        return loss.item()

    return run


def test_large_buffers_are_put_back_from_the_second_change_on():
    model = Counting(micro_batch.SMALL + 4)
    survivor = Survivor(None, model, device=CPU)
    with pytest.raises(LanewayError, match=r"can't be repeated: it changed the buffer 'large' of 1048580 bytes"):
        survivor.attempt(failing_once(model))
    assert model.weight.grad is None
    survivor.attempt(lambda: model().backward())
    large, small, gradient = model.large.clone(), model.small.clone(), model.weight.grad.clone()
    torch.manual_seed(0)
    survivor.attempt(failing_once(model))
    assert torch.equal(model.large, large + 1)
    assert torch.equal(model.small, small + 1)
    torch.manual_seed(0)
    assert torch.equal(model.weight.grad, gradient + torch.rand(3))


class Measured(nn.Module):
    """Holds a leaf that is no parameter; its gradient adds up over micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.meter = torch.zeros(3, requires_grad=True)

    def forward(self) -> Tensor:
        return ((self.weight + self.meter) * torch.rand(3)).sum()


def test_what_a_module_measures_with_is_not_counted_twice():
    model = Measured()
    survivor = Survivor(None, model, device=CPU)
    torch.manual_seed(0)
    survivor.attempt(lambda: model().backward())
    survivor.attempt(failing_once(model))
    torch.manual_seed(0)
    once = torch.rand(3) + torch.rand(3)
    assert torch.equal(model.meter.grad, once)
    assert torch.equal(model.weight.grad, once)


def test_other_errors_pass_and_leave_earlier_gradients():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.grad
    want, tries = before.clone(), []

    def run() -> None:
        tries.append(1)
        model(torch.ones(1, 2)).sum().backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Survivor(None, model, device=CPU).attempt(run)
    assert len(tries) == 1
    assert model.weight.grad is before
    assert torch.equal(before, want)


def test_gradients_that_are_away_are_refused():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    model.weight.grad.untyped_storage().resize_(0)
    with pytest.raises(LanewayError, match="gradients are parked in a tier"):
        Survivor(None, model, device=CPU).attempt(lambda: None)


def test_bad_input():
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match="attempts: got 0"):
        Survivor(None, model, device=CPU, attempts=0)
    with pytest.raises(InputError, match=r"op_retry: got 'always_'.*did you mean 'always'"):
        Survivor(None, model, device=CPU, op_retry="always_")
    with pytest.raises(InputError, match="parts: got"):
        Survivor(None, model, device=CPU).attempt(lambda: 0, parts=lambda n: [])
    with pytest.raises(LanewayError, match="SyncBatchNorm communicates"):
        Survivor(None, nn.SyncBatchNorm(3), device=CPU, agree=lambda failed: failed)


def test_compiled_and_watched_is_as_compiled():
    """Under the mode a compiled function stays compiled: eager code has other last bits."""
    runs = []

    def backend(graph: Any, inputs: Any) -> Any:
        def compiled(*given: Any) -> Any:
            runs.append(1)
            return graph(*given)

        return compiled

    function = torch.compile(lambda x: F.gelu(x) * 2, backend=backend)
    with RetryOps(lambda n: 0):
        got = function(torch.ones(3))
    assert torch.equal(got, F.gelu(torch.ones(3)) * 2)
    assert runs == [1]


# -- optimizer steps


OPTIMIZERS = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_a_step_by_chunks_is_the_step(kind, options):
    def train(exactly: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1))
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": [*model[1].parameters(), *model[2].parameters()]}]
        optimizer = kind(groups, lr=0.01, **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for number in range(4):
            model(torch.randn(4, 5)).square().sum().backward()
            if number == 1:
                model[1].bias.grad = None
            if exactly:
                step_exactly(optimizer, lambda failure, began: None, chunk_bytes=40)
            else:
                optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
        return [*model.parameters(), *(value for held in optimizer.state.values() for value in held.values())]

    pairs = zip(train(True), train(False), strict=True)
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


class Greedy(torch.optim.Optimizer):
    """Not one of torch's: keeps a number in its group and clears gradients, then runs out of memory ``fails`` times."""

    def __init__(self, parameters: Any, fails: int) -> None:
        super().__init__(parameters, {"taken": 0})
        self.fails, self.seen = fails, []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.seen.append(sum(len(group["params"]) for group in self.param_groups))
        for group in self.param_groups:
            group["taken"] += 1
            for parameter in group["params"]:
                self.state[parameter]["sum"] = self.state[parameter].get("sum", torch.zeros(2)) + 1
                parameter.sub_(parameter.grad)
                parameter.grad.zero_()
                if self.fails:
                    self.fails -= 1
                    raise MemoryError


@pytest.mark.parametrize("fails", [1, 2])
def test_an_optimizer_nobody_knows_goes_whole_and_is_undone_whole(fails):
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full((2,), 0.25)
    optimizer, failures = Greedy(parameters, fails), []
    step_exactly(optimizer, lambda failure, began: failures.append(failure))
    assert optimizer.seen == [2] * (fails + 1)
    assert all(torch.equal(p, torch.full((2,), 0.75)) for p in parameters)
    assert [float(held["sum"][0]) for held in optimizer.state.values()] == [1.0, 1.0]
    assert optimizer.param_groups[0]["taken"] == 1
    assert len(failures) == fails


def test_a_step_that_never_fits_has_changed_nothing_and_says_so():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = Greedy([parameter], 99)
    with pytest.raises(LanewayError, match=r"out of memory in optimizer.step, step \(test_survive.py:.*nothing was changed"):
        step_exactly(optimizer, lambda failure, began: None)
    assert torch.equal(parameter, torch.ones(2))
    assert torch.equal(parameter.grad, torch.ones(2))
    assert not optimizer.state
    assert optimizer.param_groups[0]["taken"] == 0


def test_step_hooks_see_the_step_once_and_whole():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(len(o.param_groups[0]["params"])))
    model(torch.ones(1, 3)).sum().backward()
    step_exactly(optimizer, lambda failure, began: None, chunk_bytes=1)
    assert seen == [2]
