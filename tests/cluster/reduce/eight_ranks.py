"""Eight gloo ranks, forked after one import of torch, reduce fresh random tensors in every case of `cases`; what each rank finds
wrong goes into the folder that is given.
"""

from __future__ import annotations

import importlib
import json
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 8


def rank_main(rank: int, folder: str, module: str, seed: int, port: int) -> None:
    torch.set_num_threads(1)
    cases = importlib.import_module(module).CASES
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=30))
    found = {}
    for number, (name, case) in enumerate(cases.items()):
        began = time.perf_counter()
        problems: list[str] = []
        try:
            case(problems, torch.Generator().manual_seed(seed + number))
        except Exception:  # noqa: BLE001 - the test that reads it fails
            problems.append(traceback.format_exc()[-2000:])
        found[name] = problems
        if rank == 0:
            print(f"{name}: {time.perf_counter() - began:.2f} s", flush=True)
        (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    importlib.import_module(sys.argv[2])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = sys.argv[1], sys.argv[2], int(sys.argv[3]), port
    ranks = mp.start_processes(rank_main, args=arguments, nprocs=RANKS, start_method="fork", join=False)
    # Only now: a process that is forked while the store's thread runs may find a lock held that nobody will give back.
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    while not ranks.join():
        pass
