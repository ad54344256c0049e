"""Run by torchrun on 2 or 4 ranks: every way of wrapping a model, one after the other, in one process group.

torchrun --nproc-per-node N wrapping.py FOLDER; leaves what it found in FOLDER/rank*.json. With "more" after FOLDER: the ways that
take longer.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from laneway.cluster.layout import Layout
from laneway.cluster.mesh import build_mesh
from laneway.cluster.topology import Topology
from laneway.core import LanewayError
from laneway.memory.config import MemoryConfig
from laneway.models.gpt import GPT, GPTConfig
from laneway.strategy.base import next_token_loss
from laneway.strategy.wrap import wrap_model

CONFIG = GPTConfig(vocab_size=48, context=8, layers=2, heads=4, dim=16, streams=4)
ROWS = 8

# Every case trains two steps, of two micro-batches or more a rank.
WAYS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ddp": {"dp_replicate": 2},
        "ddp-selective": {"dp_replicate": 2, "recompute": "selective", "overlap_grads": False},
        "ddp-memory": {"dp_replicate": 2},
        "fsdp": {"dp_shard": 2},
        "fsdp-zero1-recompute": {"dp_shard": 2, "zero": 1, "recompute": "full"},
        "tp": {"tp": 2},
        "tp-sequence": {"tp": 2, "sequence_parallel": True, "recompute": "full"},
        "pp": {"pp": 2},
        "fsdp-bf16": {"dp_shard": 2, "precision": "bf16", "grad_bytes": 2},
    },
    4: {
        "hsdp": {"dp_replicate": 2, "dp_shard": 2, "micro_batch": 1},
        "tp-fsdp": {"tp": 2, "dp_shard": 2, "sequence_parallel": True},
        "pp-fsdp": {"pp": 2, "dp_shard": 2},
        "pp-tp": {"pp": 2, "tp": 2},
    },
}
MORE: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ddp-bf16": {"dp_replicate": 2, "precision": "bf16", "grad_bytes": 2},
        "pp-bf16": {"pp": 2, "precision": "bf16"},
        "fsdp-zero2": {"dp_shard": 2, "zero": 2},
        "tp-selective": {"tp": 2, "recompute": "selective"},
        "tp-bf16": {"tp": 2, "precision": "bf16"},
        "llama-tp": {"tp": 2},
        "llama-tp-streams-recompute": {"tp": 2, "recompute": "full"},
        "llama-fsdp-streams": {"dp_shard": 2},
    },
    4: {
        "tp-replicas": {"tp": 2, "dp_replicate": 2, "sequence_parallel": True},
        "tp-fsdp-bf16": {"tp": 2, "dp_shard": 2, "precision": "bf16"},
        "pp-ddp": {"pp": 2, "dp_replicate": 2},
        "pp-tp-sequence": {"pp": 2, "tp": 2, "sequence_parallel": True, "recompute": "full"},
        "pp-fsdp-bf16": {"pp": 2, "dp_shard": 2, "precision": "bf16"},
    },
}


def model(seed: int = 0, layers: int = CONFIG.layers, residual: str = "mhc") -> GPT:
    """Maps moved off their start, so that every parameter has a gradient that matters."""
    torch.manual_seed(seed)
    made = GPT(replace(CONFIG, layers=layers, residual=residual))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "site" in name or "readout" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def llama(seed: int = 0) -> Any:
    """A transformers model whose head is the embedding, with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.dim,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **sizes))


def tokens(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(7)
    both = torch.randint(0, CONFIG.vocab_size, (2, rows, CONFIG.context))
    return both[0], both[1]


def train(wrapped: Any) -> dict[str, Any]:
    """Two steps on this rank's share; losses, norms before clipping, and the weights after."""
    inputs, targets = (part.chunk(wrapped.data_ranks)[wrapped.data_rank] for part in tokens())
    optimizer = torch.optim.AdamW(wrapped.param_groups(0.1), lr=1e-2, foreach=True)
    losses, norms = [], []
    for _ in range(2):
        losses.append(wrapped.step(inputs, targets).item())
        norms.append(wrapped.clip_grad_norm_(0.3).item())
        clipped = wrapped.clip_grad_norm_(float("inf")).item()
        optimizer.step()
        optimizer.zero_grad()
    whole = wrapped.full_state_dict()
    weights = {name: value.double().norm().item() for name, value in whole.items()}
    return {"losses": losses, "norms": norms, "clipped": clipped, "weights": weights}


def way(changes: dict[str, Any], name: str) -> dict[str, Any]:
    memory = MemoryConfig("1KiB", min_bytes=256) if name.endswith("memory") else None
    layout = Layout(**{"precision": "fp32", "micro_batch": 2, **changes})
    made = llama if name.startswith("llama") else model
    streams = 3 if "streams" in name else None
    wrapped = wrap_model(
        made(seed=dist.get_rank()), layout, device="cpu", memory=memory, streams=streams
    )  # rank 0's weights count
    found = train(wrapped)
    if memory is not None:
        found["moved"] = sum(report.account.bytes_out for report in wrapped.memory.passes)
        wrapped.close()
    return found


def bits(layout: Layout, schedule: str, residual: str, parts: int) -> list[str]:
    """Gradients and losses of stages that are not those of the whole model, bit for bit, by name."""
    inputs, targets = tokens(parts * layout.micro_batch)
    layers = max(3, layout.pp * layout.chunks)
    whole, separate = model(layers=layers, residual=residual), model(layers=layers, residual=residual)
    separate.head.weight = torch.nn.Parameter(separate.embedding.weight.detach().clone())
    staged = wrap_model(copy.deepcopy(whole), layout, device="cpu", schedule=schedule)
    loss = staged.step(inputs, targets)
    total = torch.zeros(())
    for each in (whole, separate):
        each.chained, total = True, torch.zeros(())
        for x, y in zip(inputs.split(layout.micro_batch), targets.split(layout.micro_batch), strict=True):
            part = next_token_loss(each(x), y) / parts
            part.backward()
            total += part.detach()
    want = {name: parameter.grad for name, parameter in whole.named_parameters()}
    if parts > 1:  # both sums over micro-batches, then one over the two ends of the pipeline
        want["embedding.weight"] = separate.embedding.weight.grad + separate.head.weight.grad
    want["head.weight"] = want["embedding.weight"]
    wrong = [name for name, parameter in staged.named_parameters() if not torch.equal(parameter.grad, want[name])]
    if not any(True for _ in staged.named_parameters()):
        wrong.append("no parameters")
    return wrong + ([] if torch.equal(loss, total) else [f"loss {loss} {total}"])


def said(work: Any) -> str:
    try:
        work()
    except LanewayError as error:
        return str(error)
    return ""


def meshes() -> dict[str, Any]:
    """Groups made by hand on some ranks, another order of ranks, calls that repeat, and what is refused."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        dist.new_group([0])  # on this rank alone: its count of groups is now ahead
    layout = Layout(dp_shard=world)
    mesh = build_mesh(layout)
    order = list(reversed(range(world)))
    turned = build_mesh(layout, order=order)
    gathered = [torch.zeros(1) for _ in range(world)]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=turned.get_group("dp_shard"))
    os.environ["NCCL_HOSTID"] = str(rank % 2)  # as if ranks went round two machines
    machines = Topology.parse(f"{world // 2}xCPU_2nodes")
    placed = wrap_model(model(), replace(layout, dp_shard=2, tp=world // 2, precision="fp32"), topology=machines, device="cpu")
    elsewhere = said(lambda: wrap_model(model(), layout, topology=Topology.parse(f"{world}xCPU"), device="cpu"))
    del os.environ["NCCL_HOSTID"]
    flattened = [turned["dp_replicate", "dp_shard"]._flatten("replicas_and_shards").size() for _ in range(2)]
    return {
        "again": build_mesh(layout) is mesh and build_mesh(layout, order=order) is turned and turned is not mesh,
        "ring": [int(each) for each in gathered],
        "place": turned.get_local_rank("dp_shard"),
        "flattened": flattened,
        "machine": dist.get_process_group_ranks(placed.mesh.get_group("tp")),
        "elsewhere": elsewhere,
        "world": said(lambda: build_mesh(Layout(dp_shard=world, tp=3))),
        "order": said(lambda: build_mesh(layout, order=[0] * world)),
        "different": said(lambda: build_mesh(Layout(pp=world) if rank else Layout(tp=world))),
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    if sys.argv[2:] == ["more"]:
        leave({"ways": {name: way(each, name) for name, each in MORE[world].items()}})
        return
    found: dict[str, Any] = {"meshes": meshes(), "ways": {name: way(each, name) for name, each in WAYS[world].items()}}
    plan = Layout(pp=world, precision="fp32", micro_batch=2)
    cases = [(plan, "1f1b", "mhc", 4), (plan, "gpipe", "residual", world)]
    if world == 2:
        cases += [(replace(plan, chunks=2), "1f1b", "mhc", 4), (replace(plan, recompute="full"), "gpipe", "hc", 2)]
    found["bits"] = [bits(*case) for case in cases]
    leave(found)


def leave(found: dict[str, Any]) -> None:
    (Path(sys.argv[1]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
