"""A worker that torchrun starts on a host of the lab."""

from __future__ import annotations

import os
import socket
import sys

import torch
import torch.distributed as dist

from laneway.bench.netlab import Context

mode = sys.argv[1]
context = Context.attach()
if mode == "fail" and context.rank == context.world - 1:
    sys.exit("this worker gives up")
dist.init_process_group("gloo")
x = torch.tensor([float(context.rank)])
dist.all_reduce(x)
if mode == "kill_host":
    if context.rank == 0:
        context.kill_host(*context.positions[-1])
    while True:
        dist.all_reduce(x)
context.report((socket.gethostname(), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], x.item()))
dist.destroy_process_group()
