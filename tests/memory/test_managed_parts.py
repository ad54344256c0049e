"""Parked gradients and streamed parameters under the manager: the same bits, a lower peak, and refused where they can't work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from laneway.core import InputError, LanewayError
from laneway.memory.counting import CountingAllocator
from laneway.memory.manage import manage_memory
from laneway.memory.manager import MemoryManager
from laneway.memory.summary import summary

WIDTH = 128


class Block(nn.Module):
    """With a parameter of its own beside those of its modules, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()
        self.down, self.drop = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.act(self.up(self.norm(x))))) @ self.scale.tril()


class Net(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(30, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.out = nn.Linear(WIDTH, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@pytest.fixture(scope="module")
def allocator() -> CountingAllocator:
    found = CountingAllocator.installed()
    return found if found is not None else CountingAllocator.install(caching=True)


def trained(seed: int, steps: int, manager_of=None, layers: int = 4) -> tuple[Net, list[float], MemoryManager | None]:
    """Accumulation over three micro-batches, clipping, AdamW."""
    torch.manual_seed(seed)
    model = Net(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = manager_of(model) if manager_of is not None else None
    norms = []
    if manager is not None:
        manager.__enter__()
    for step in range(steps):
        torch.manual_seed(seed + step)
        for _ in range(3):
            tokens = torch.randint(0, 30, (4, 40))
            (F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) / 3).backward()
        if manager is not None:
            with manager.all_here():
                norms.append(float(clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
        else:
            norms.append(float(clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if manager is not None:
        manager.__exit__(None, None, None)
    return model, norms, manager


PARTS = [
    {"gradients": "parked"},
    {"parameters": "streamed"},
    {"gradients": "parked", "parameters": "streamed", "tier": "host", "host_buffer_ratio": 0.01},
]


@pytest.mark.parametrize("fields", PARTS)
def test_training_is_bit_for_bit_the_same(tmp_path: Path, allocator: CountingAllocator, fields: dict) -> None:
    seed = int(torch.randint(1 << 30, ()))
    want, norms, _ = trained(seed, 2)

    def manager_of(model: nn.Module) -> MemoryManager:
        return manage_memory(model, budget=allocator.live + (2 << 20), folder=str(tmp_path), min_bytes=4096, **fields)

    model, found, manager = trained(seed, 2, manager_of)
    assert manager is not None
    assert found == norms
    told = summary(manager)
    for name, kind in (("gradients", "parked"), ("parameters", "streamed")):
        moves = fields.get(name) == kind
        assert (told[name] is not None) == moves
        whole = sum(p.nbytes for p in want.parameters())
        assert not moves or (0 < told[name]["peak"] <= whole and manager.tier.traffic.bytes_written > whole)
    assert sum(report.account.bytes_out + report.account.recomputed for report in manager.passes) > 0
    manager.close()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), want.parameters(), strict=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fields", [fields for fields in PARTS if "tier" not in fields])  # host memory is the device's here
def test_the_peak_of_the_passes_falls(tmp_path: Path, allocator: CountingAllocator, fields: dict) -> None:
    """In one of three runs: on a loaded machine what is on its way out stays in memory for longer."""
    whole = sum(p.nbytes for p in Net(8).parameters())
    less = 0.4 * whole * len(set(fields) & {"gradients", "parameters"})
    kept = peak_of_passes(tmp_path, allocator, {})
    assert any(peak_of_passes(tmp_path, allocator, fields) < kept - less for _ in range(3))


def peak_of_passes(folder: Path, allocator: CountingAllocator, fields: dict) -> int:
    """Most bytes of the passes after the first four, over what was there before."""
    before = allocator.live

    def manager_of(model: nn.Module) -> MemoryManager:
        return manage_memory(model, budget=allocator.live + (24 << 20), folder=str(folder), **fields)

    _, _, manager = trained(0, 2, manager_of, layers=8)
    assert manager is not None
    assert all(plan.reason == "everything fits" for plan in manager.plans.values())
    manager.close()
    return max(report.peak for report in list(manager.passes)[4:]) - before


def test_what_is_away_can_not_be_read_and_paused_work_is_possible(tmp_path: Path, allocator: CountingAllocator) -> None:
    model = Net(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fields = {"gradients": "parked", "parameters": "streamed"}
    with manage_memory(model, budget="1GiB", folder=str(tmp_path), **fields) as manager:
        model(torch.randint(0, 30, (2, 5))).square().mean().backward()
        for use in (optimizer.step, lambda: clip_grad_norm_(model.parameters(), 1.0), lambda: model.out.weight.sum()):
            with pytest.raises(LanewayError, match="in a tier"):
                use()
        assert all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())
        with torch.no_grad():
            model(torch.randint(0, 30, (2, 5)))
    manager.close()
    assert bool(torch.isfinite(model.out.weight.grad).all())


@pytest.mark.parametrize(("field", "value"), [("gradients", "parked"), ("parameters", "streamed")])
def test_models_of_which_nothing_can_move_are_refused(tmp_path: Path, field: str, value: str) -> None:
    compiled = Net(1)
    compiled.blocks[0].compile(backend="eager")
    with pytest.raises(InputError, match=rf"memory\.{field}: got '{value}'; accepted: resident with this model: compiled"):
        manage_memory(compiled, budget="1GiB", folder=str(tmp_path), **{field: value})
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(InputError, match=rf"memory\.{field}: .* DDP keeps"):
            manage_memory(DistributedDataParallel(Net(1)), budget="1GiB", folder=str(tmp_path), **{field: value})
        sharded = Net(1)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        torch.distributed.fsdp.fully_shard(sharded, mesh=mesh)
        with pytest.raises(InputError, match=rf"memory\.{field}: .* FSDP2"):
            manage_memory(sharded, budget="1GiB", folder=str(tmp_path), **{field: value})
    finally:
        dist.destroy_process_group()
