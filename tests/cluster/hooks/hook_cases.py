"""What eight ranks check of the hooks: gradients against one process that sees the whole batch, and bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch._dynamo  # before the ranks are forked: DDP needs it
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from laneway.cluster.drop import GradientDropper
from laneway.cluster.hooks import attach_ddp, attach_fsdp
from laneway.cluster.hooks.fsdp import host_mesh
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.cluster.reduce.scheme import FLAT, LevelScheme, ReductionScheme
from laneway.core import InputError, LanewayError

WORLD, ROWS, WIDTH = 8, 3, 11
RACKS = [(rank // 4, rank // 2 % 2) for rank in range(WORLD)]
THREE = ReductionScheme((LevelScheme(), LevelScheme(), LevelScheme()), 4096)
OPEN: list[HierarchicalReducer] = []


class Net(nn.Module):
    """Odd sizes, a part that a flag leaves unused, a parameter that is smaller than the world."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 37), nn.Linear(37, 5, bias=False)
        self.middle = nn.Sequential(nn.Linear(37, 37), nn.GELU(), nn.Linear(37, 37))
        self.extra = nn.Linear(37, 37)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, extra: bool = True) -> Tensor:
        x = self.middle(F.gelu(self.first(x)))
        return self.last(self.gain * (x + self.extra(x) if extra else x))


def _net(generator: torch.Generator) -> Net:
    torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
    return Net()


def _batch(generator: torch.Generator, count: int = 1) -> list[tuple[Tensor, Tensor]]:
    """All ranks' rows, `count` micro-batches."""
    make = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    return [(make(WORLD * ROWS, WIDTH), make(WORLD * ROWS, 5)) for _ in range(count)]


def _own(part: Tensor) -> Tensor:
    return part[dist.get_rank() * ROWS :][:ROWS]


def _loss(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor], own: bool) -> Tensor:
    x, y = map(_own, batch) if own else batch
    return F.mse_loss(model(x), y)


def _reference(net: Net, batches: list[tuple[Tensor, Tensor]], extra: bool = True) -> dict[str, Tensor]:
    """Gradients of one process on the whole batch, in float64."""
    whole = Net().double()
    whole.load_state_dict(net.state_dict())
    for x, y in batches:
        F.mse_loss(whole(x.double(), extra), y.double()).backward()
    return {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def _differ(problems: list[str], what: str, found: dict[str, Tensor], wanted: dict[str, Tensor], bound: float = 2e-6) -> None:
    if found.keys() != wanted.keys():
        problems.append(f"{what}: gradients of {sorted(found)} instead of {sorted(wanted)}")
    size = max(float(g.abs().max()) for g in wanted.values())
    for name in found.keys() & wanted.keys():
        worst = float((found[name].double() - wanted[name]).abs().max()) / size
        if not worst <= bound:
            problems.append(f"{what}: {name} is off by {worst:.1e} of the largest gradient")


def _reducer(positions: list[tuple[int, ...]] = RACKS, scheme: ReductionScheme = THREE) -> HierarchicalReducer:
    OPEN.append(HierarchicalReducer(LevelGroups.from_positions(positions), scheme))
    return OPEN[-1]


def _close() -> None:
    while OPEN:
        reducer = OPEN.pop()
        reducer.close()
        dist.barrier()
        reducer.groups.close()


def _ddp(net: Net, reducer: HierarchicalReducer, **options) -> DistributedDataParallel:
    copy = Net()
    copy.load_state_dict(net.state_dict())
    model = DistributedDataParallel(copy, gradient_as_bucket_view=True, bucket_cap_mb=0.006, **options)
    attach_ddp(model, reducer)
    return model


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def ddp(problems: list[str], generator: torch.Generator) -> None:
    """Every shape of the network gives the same gradients and norms; so does a change of scheme between steps."""
    net = _net(generator)
    shapes = {
        "1x8": [()] * 8,
        "2x4": [(r // 4,) for r in range(8)],
        "4x2": [(r // 2,) for r in range(8)],
        "8x1": [(r,) for r in range(8)],
        "2x2x2": RACKS,
        "3+5": [(int(r > 2),) for r in range(8)],
    }
    for name, positions in shapes.items():
        levels = len(positions[0]) + 1
        reducer = _reducer(positions, ReductionScheme((LevelScheme(),) * levels, 4096))
        model = _ddp(net, reducer)
        for number, scheme in enumerate((None, None, FLAT, ReductionScheme((LevelScheme("ring"),) * levels))):
            if scheme is not None:
                reducer.set_scheme(scheme)
            batches = _batch(generator)
            model.zero_grad()
            _loss(model, batches[0], own=True).backward()
            _differ(problems, f"{name} step {number}", _gradients(model.module), _reference(net, batches))
        _close()


def accumulation(problems: list[str], generator: torch.Generator) -> None:
    """With no_sync nothing is sent until the last micro-batch, and then once."""
    net, reducer = _net(generator), _reducer()
    model = _ddp(net, reducer)
    sent = []
    for count in (1, 1, 4):
        batches, before = _batch(generator, count), sum(reducer.sent_bytes)
        model.zero_grad()
        for number, batch in enumerate(batches):
            with model.no_sync() if number < count - 1 else nullcontext():
                _loss(model, batch, own=True).backward()
        sent.append(sum(reducer.sent_bytes) - before)
        _differ(problems, f"{count} micro-batches", _gradients(model.module), _reference(net, batches))
    if sent[1] != sent[2] or not sent[1]:
        problems.append(f"bytes of one and of four micro-batches: {sent[1:]}")
    _close()


def unused(problems: list[str], generator: torch.Generator) -> None:
    """A part of the model that no rank uses in a step has no gradient, and one that some ranks use has their share."""
    net, reducer = _net(generator), _reducer()
    model = _ddp(net, reducer, find_unused_parameters=True)
    for extra in (True, False, True):
        batches = _batch(generator)
        model.zero_grad(set_to_none=True)
        x, y = map(_own, batches[0])
        F.mse_loss(model(x, extra), y).backward()
        wanted = _reference(net, batches, extra)
        found = {name: g for name, g in _gradients(model.module).items() if extra or not name.startswith("extra")}
        _differ(problems, f"extra {extra}", found, wanted)
    _close()


def exceptions(problems: list[str], generator: torch.Generator) -> None:
    """A backward pass that fails on all ranks, half-way, leaves the reducer and new models on it in order."""
    net, reducer = _net(generator), _reducer()
    model = _ddp(net, reducer)

    def fail(_gradient: Tensor) -> None:
        raise ValueError("a branch failed")

    handle = model.module.middle[0].weight.register_hook(fail)
    try:
        _loss(model, _batch(generator)[0], own=True).backward()
        problems.append("the exception got lost")
    except ValueError:
        pass
    handle.remove()
    dist.barrier()
    again = _ddp(net, reducer)
    batches = _batch(generator)
    _loss(again, batches[0], own=True).backward()
    _differ(problems, "after an exception", _gradients(again.module), _reference(net, batches))
    _close()


def dropping(problems: list[str], generator: torch.Generator) -> None:
    """All that was averaged and all that stayed at home is all there was, through DDP's new buckets too."""
    net = _net(generator)
    scheme = ReductionScheme((LevelScheme(), LevelScheme(), LevelScheme(wire="bf16", drop=0.5)), 4096)
    reducer = _reducer(scheme=scheme)
    dropper = reducer.dropper = GradientDropper(residual="fp64")
    model = _ddp(net, reducer)
    total: dict[str, Tensor] = {}
    got: dict[str, Tensor] = {}
    for _ in range(4):
        batches = _batch(generator)
        model.zero_grad()
        _loss(model, batches[0], own=True).backward()
        for into, found in ((total, _reference(net, batches)), (got, _gradients(model.module))):
            for name, gradient in found.items():
                into[name] = into.get(name, 0) + gradient.double()
    _conserved(problems, dropper, got, total)
    _close()


def _conserved(problems: list[str], dropper: GradientDropper, got: dict[str, Tensor], total: dict[str, Tensor]) -> None:
    """Averages that came out, and what all ranks still have, are the averages that went in."""
    left = {name: torch.zeros(gradient.numel(), dtype=torch.float64) for name, gradient in sorted(total.items())}
    for piece, run in dropper.residuals():
        left[piece.name][piece.start : piece.stop] += run / WORLD
    for name, gradient in left.items():
        dist.all_reduce(gradient)
        got[name] = got[name] + gradient.view_as(got[name])
    _differ(problems, "sent and residual", got, total)
    if not any(bool(gradient.any()) for gradient in left.values()):
        problems.append("nothing stayed at home")


def _sharded(net: Net, reducer: HierarchicalReducer, host: bool) -> nn.Module:
    copy = Net()
    copy.load_state_dict(net.state_dict())
    mesh = host_mesh(reducer.groups) if host else None
    for part in (copy.first, copy.middle, copy.extra, copy.last):
        fully_shard(part, mesh=mesh)
    fully_shard(copy, mesh=mesh)
    attach_fsdp(copy, reducer)
    return copy


def fsdp(problems: list[str], generator: torch.Generator) -> None:
    """Both ways to shard, both ways to accumulate, and the norm that clipping sees."""
    net = _net(generator)
    for host in (False, True):
        for scheme in (THREE, FLAT):
            reducer = _reducer(scheme=scheme)
            model = _sharded(net, reducer, host)
            for count, way in ((1, ""), (3, "gradient_sync"), (3, "all_reduce")):
                if way == "all_reduce" and not host:
                    continue
                model.zero_grad()
                batches = _batch(generator, count)
                for number, batch in enumerate(batches):
                    if way:
                        getattr(model, f"set_requires_{way}")(number == count - 1)
                    _loss(model, batch, own=True).backward()
                what = f"{'hosts' if host else 'all ranks'}, {scheme}, {count} micro-batches {way}"
                wanted = _reference(net, batches)
                _differ(problems, what, _gradients(model), wanted)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                exact = torch.stack([g.norm() for g in wanted.values()]).norm()
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                if not abs(float(norm) / float(exact) - 1) < 1e-5:
                    problems.append(f"{what}: norm {float(norm)} instead of {float(exact)}")
            _close()


def sharded_dropping(problems: list[str], generator: torch.Generator) -> None:
    """The same with shards in each host."""
    net = _net(generator)
    reducer = _reducer(scheme=ReductionScheme((LevelScheme(), LevelScheme(), LevelScheme(drop=0.6))))
    dropper = reducer.dropper = GradientDropper()
    model = _sharded(net, reducer, host=True)
    total: dict[str, Tensor] = {}
    got: dict[str, Tensor] = {}
    for _ in range(3):
        batches = _batch(generator)
        model.zero_grad()
        _loss(model, batches[0], own=True).backward()
        for into, found in ((total, _reference(net, batches)), (got, _gradients(model))):
            for name, gradient in found.items():
                into[name] = into.get(name, 0) + gradient.double()
    _conserved(problems, dropper, got, total)
    _close()


def refusals(problems: list[str], generator: torch.Generator) -> None:
    """What doesn't fit is said before anything is attached."""
    net, reducer = _net(generator), _reducer()
    ragged = _reducer([(int(r > 2),) for r in range(8)], FLAT)
    half = dist.device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
    sharded, flat = Net(), Net()
    fully_shard(sharded, mesh=half)
    fully_shard(flat, mesh=half["b"])
    for what, call in (
        ("a plain model for ddp", lambda: attach_ddp(net, reducer)),
        ("a plain model for fsdp", lambda: attach_fsdp(net, reducer)),
        ("two dimensions", lambda: attach_fsdp(sharded, reducer)),
        ("half of the ranks", lambda: attach_fsdp(flat, reducer)),
        ("ragged hosts", lambda: host_mesh(ragged.groups)),
        ("a part of ragged groups", lambda: ragged.all_reduce(torch.ones(3), first=1)),
        ("no such level", lambda: reducer.all_reduce(torch.ones(3), first=3)),
    ):
        try:
            call()
            problems.append(f"{what} was accepted")
        except InputError:
            pass
    _close()


def lost(problems: list[str], generator: torch.Generator) -> None:
    """Micro-batches that give gradients to different parameters can't be kept in the host."""
    net, reducer = _net(generator), _reducer()
    copy = Net()
    copy.load_state_dict(net.state_dict())
    fully_shard(copy, mesh=host_mesh(reducer.groups))
    attach_fsdp(copy, reducer)
    try:
        for number, extra in enumerate((True, False)):
            copy.set_requires_all_reduce(number == 1)
            x, y = map(_own, _batch(generator)[0])
            F.mse_loss(copy(x, extra), y).backward()
        problems.append("different parameters were added up")
    except LanewayError:
        pass
    _close()


CASES = {
    case.__name__: case for case in (ddp, accumulation, unused, exceptions, dropping, fsdp, sharded_dropping, refusals, lost)
}
