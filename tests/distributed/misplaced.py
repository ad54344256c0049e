"""Run by torchrun on 4 ranks that sit on two machines in turns, which the plan has side by side."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

rank = int(os.environ["RANK"])
os.environ["NCCL_HOSTID"] = "ab"[rank % 2]  # as NCCL, ranks tell by it which machine they run on

import torch.distributed as dist  # noqa: E402
from wrapping import model  # noqa: E402

from laneway.cluster.layout import Layout  # noqa: E402
from laneway.cluster.topology import Topology  # noqa: E402
from laneway.strategy.wrap import wrap_model  # noqa: E402

dist.init_process_group("gloo")
layout = Layout(dp_shard=2, dp_replicate=2, micro_batch=2, precision="fp32")
wrapped = wrap_model(model(), layout, topology=Topology.parse("2xCPU_2nodes"), device="cpu")
mesh = wrapped.mesh
assert mesh is not None
groups = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in ("dp_shard", "dp_replicate")}
Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(groups))
dist.destroy_process_group()
