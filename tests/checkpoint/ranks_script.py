"""Several ranks (gloo) on this machine: ``python ranks_script.py FOLDER`` forks them and runs the cases below.

Every rank leaves what a case returned in ``FOLDER/CASE_SIZE_RANK.json``; ``FOLDER/GROUP_RANK.status`` says how it ended.
One process loads torch for all of them, which would take most of the time otherwise.
"""

import datetime
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from laneway.checkpoint import CheckpointStore, PerRank, capture, capture_rng, dcp, export, restore
from laneway.core import LanewayError
from laneway.rundir import RunDirectory


class Net(nn.Module):
    """Two layers, of which no dim divides by the number of ranks, a tied pair and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 9)
        self.down = nn.Linear(9, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.gain * self.down(torch.tanh(self.up(x))))


def build(wrap: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = Net()
    if wrap == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif wrap == "ddp":
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The same batch on all ranks, so that every world size computes the same gradients to rounding."""
    for step in steps:
        tokens = torch.arange(step, step + 12) % 7
        nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """All of model and optimizer as plain tensors on every rank."""
    options = StateDictOptions(full_state_dict=True)
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options)["state"],
    }


def run_at(path: Path) -> RunDirectory:
    path.mkdir(parents=True, exist_ok=True)
    return RunDirectory(path)


def case_save(folder: Path, rank: int, size: int) -> dict:
    """Train, save under FSDP2 and under DDP, export."""
    for wrap in ("fsdp", "ddp"):
        model, optimizer = build(wrap)
        train(model, optimizer, range(3))
        torch.manual_seed(100 + rank)
        store = CheckpointStore(run_at(folder / wrap))
        store.save(3, capture(model, optimizer, {"cursor": 36}, {"rng": capture_rng(), "rank": rank}))
        full = whole(model, optimizer)
        export(model, {"dim": 5}, folder / f"{wrap}_export")
        if rank == 0:
            torch.save(full, folder / f"{wrap}.pt")
    files = sorted(path.name for path in store.folder(3).iterdir())
    return {"files": files, "draw": torch.rand(1).item(), "latest": store.latest_step()}


def case_load(folder: Path, rank: int, size: int) -> dict:
    """Load each checkpoint under each wrapping; every bit must be that of the saving run."""
    result: dict = {}
    for saved in ("fsdp", "ddp"):
        for wrap in ("fsdp", "ddp"):
            model, optimizer = build(wrap)
            train(model, optimizer, range(5, 6))
            store = CheckpointStore(run_at(folder / saved))
            found = restore(store, None, model, optimizer)
            expected, now = torch.load(folder / f"{saved}.pt", weights_only=True), whole(model, optimizer)
            flat = dict(zip(*map(_flat, (expected, now)), strict=True))
            assert all(left.equal(right) for left, right in flat.items()), (saved, wrap)
            assert (found.step, found.extras) == (3, {"cursor": 36})
            assert (found.per_rank or {}).get("rank") == (rank if rank < 2 else None)
            model(torch.arange(7)).sum().backward()
            optimizer.step()
            result[f"{saved}-{wrap}"] = store.notices
    return result


def _flat(state: dict) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def case_errors(folder: Path, rank: int, size: int) -> dict:
    """What goes wrong on one rank is raised on all, and the earlier checkpoint stays."""
    store = CheckpointStore(run_at(folder / "run"), keep=3)
    store.save(1, {"w": torch.ones(50000), "mine": PerRank(torch.full((50000 * (1 + rank),), 1.0 + rank))})
    said = {}

    def attempt(name: str, action) -> None:
        try:
            action()
            said[name] = "no error"
        except LanewayError as error:
            said[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
        names = sorted(path.name for path in store.run.checkpoints.iterdir())
        assert names == ["step_00000001"], (name, names)
        assert store.run.latest.read_text() == "step_00000001\n"
        assert store.latest_step() == 1, name

    attempt("bad value", lambda: store.save(2, {"x": {1, 2} if rank == 1 else 3}))
    attempt("bad step", lambda: store.save(-1 if rank == 1 else 2, {}))
    attempt("other step", lambda: store.save(2 + rank, {}))
    attempt("other step loaded", lambda: store.load(1 + rank, {}))
    attempt("misfit", lambda: store.load(1, {"w": torch.ones(50000 + rank)}))
    other = CheckpointStore(run_at(folder / f"run{rank}"))
    attempt("other disk", lambda: other.save(2, {}))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    attempt("no room on rank 1", lambda: store.save(2, {"mine": PerRank(torch.ones(50000))}))
    attempt("bad export", lambda: export({"w": torch.ones(1)}, {"x": 1 if rank else {2}}, folder / "model"))
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    attempt("no room on rank 0", lambda: store.save(2, {"w": torch.ones(3), "note": "x" * 5000}))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return said


def case_torn(folder: Path, rank: int, size: int) -> dict:
    """All ranks fall back to the same checkpoint and it is said once."""
    store = CheckpointStore(run_at(folder / "run"), keep=3)
    for step in (1, 2):
        store.save(step, {"w": torch.full((4,), float(step)), "mine": PerRank(rank * 10 + step)})
    if rank == 0:
        (store.folder(2) / "__1_0.distcp").write_bytes(b"torn")
    dist.barrier()
    state = {"w": torch.zeros(4), "mine": None}
    step = store.load_latest(state)
    return {"step": step, "w": state["w"].tolist(), "mine": state["mine"].value, "notices": store.notices}


def case_killed(folder: Path, rank: int, size: int) -> dict:
    """Rank 1 is killed while it writes."""
    store = CheckpointStore(run_at(folder / "run"))
    store.save(1, {"w": torch.ones(4)})
    if rank == 1:
        dcp._Writer.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        store.save(2, {"w": torch.zeros(4)})
    except LanewayError as error:
        return {"error": str(error), "names": sorted(path.name for path in store.run.checkpoints.iterdir())}
    return {"error": "none"}


GROUPS = {"two": (2, ["save", "load", "torn", "errors"]), "three": (3, ["load"]), "lost": (2, ["killed"])}
LIMIT_S = 40


def run_rank(group: str, folder: Path, rank: int) -> None:
    size, cases = GROUPS[group]
    limit = datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{group}", rank=rank, world_size=size, timeout=limit)
    for case in cases:
        home = folder if case in ("save", "load") else folder / case
        home.mkdir(exist_ok=True)
        result = globals()[f"case_{case}"](home, rank, size)
        (folder / f"{case}_{size}_{rank}.json").write_text(json.dumps(result))
    if group != "lost":
        dist.barrier()
        dist.destroy_process_group()


def fork_rank(group: str, folder: Path, rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run_rank(group, folder, rank)
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)
    return pid


def wait(pid: int, deadline: float) -> str:
    """How a child ended; one that is late is killed."""
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return str(os.waitstatus_to_exitcode(status))
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "late"


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for group, (size, _) in GROUPS.items():
        deadline = time.monotonic() + LIMIT_S
        for rank, pid in enumerate([fork_rank(group, folder, rank) for rank in range(size)]):
            (folder / f"{group}_{rank}.status").write_text(wait(pid, deadline))


if __name__ == "__main__":
    main()
