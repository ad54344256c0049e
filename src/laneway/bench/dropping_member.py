"""One member of the runs in dropping.py: trains all variants and seeds in turn; the first member writes what was found."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laneway.bench.rows import Row
from laneway.cluster.drop.dropper import GradientDropper
from laneway.cluster.drop.exchange import Members
from laneway.cluster.drop.pieces import Pieces
from laneway.cluster.drop.sizes import drop_for_saving, parts
from laneway.core import LanewayError
from laneway.data.loader import BatchLoader, evaluation_batches
from laneway.data.text import Corpus, TextDataConfig, prepare
from laneway.models.gpt import GPT, GPTConfig
from laneway.train.step import token_loss

__all__ = ["count_bytes", "member_main", "train"]

LIMIT = timedelta(seconds=120)
CLIP = 1.0
WARM = 0.1  # share of the steps in which the learning rate rises


def member_main(rank: int, folder: str, world: int) -> None:
    """Entry of a process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=LIMIT)
    given = json.loads((Path(folder) / "given.json").read_text("utf-8"))
    if rank == 0:
        prepare(TextDataConfig())
    dist.barrier()
    corpus = prepare(TextDataConfig())
    runs = [
        train(name, options, seed, given["options"], corpus)
        for seed in range(given["options"]["seeds"])
        for name, options in given["variants"].items()
    ]
    found = {"runs": runs, "bytes": count_bytes(runs[0]["parameters"])}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


def train(name: str, dropper_options: dict[str, Any], seed: int, options: dict[str, Any], corpus: Corpus) -> Row:
    """One run; the row that it gives, equal on all members but for bytes.

    Raises:
        LanewayError: members ended with different weights.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    config = GPTConfig(layers=options["layers"], heads=4, dim=options["dim"], context=options["context"], residual="residual")
    model = GPT(config)
    named = dict(model.named_parameters())
    key = Pieces.of({name: p.numel() for name, p in named.items()})
    optimizer = torch.optim.AdamW(named.values(), lr=options["lr"], betas=(0.9, 0.95), weight_decay=0.1)
    loader = BatchLoader(corpus.train, config.context, options["batch_size"], seed, rank, world)
    dropper = GradientDropper(**dropper_options)
    for step in range(1, options["steps"] + 1):
        inputs, targets = next(loader)
        optimizer.zero_grad()
        token_loss(model(inputs), targets).backward()
        flat = torch.cat([_gradient(p).flatten() for p in named.values()])
        dropper.all_reduce(flat, _everyone(), key).div_(world)
        for p, part in zip(named.values(), flat.split([p.numel() for p in named.values()]), strict=True):
            p.grad = part.view_as(p)
        torch.nn.utils.clip_grad_norm_(named.values(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = options["lr"] * min(1.0, step / (WARM * options["steps"]), 1.1 - step / options["steps"])
        optimizer.step()
    _check_replicas(list(named.values()))
    return _row(name, dropper, seed, options, key.numel, _validation(model, corpus, options))


def _everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _gradient(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def _check_replicas(parameters: list[Tensor]) -> None:
    bits = torch.stack([p.detach().view(torch.int32).long().sum() for p in parameters])
    low, high = bits.clone(), bits.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if not torch.equal(low, high):
        raise LanewayError("members of a run ended with different weights")


@torch.no_grad()
def _validation(model: GPT, corpus: Corpus, options: dict[str, Any]) -> float:
    batches = evaluation_batches(corpus.validation, options["context"], 16, options["validation_batches"])
    losses = [token_loss(model(inputs), targets) for inputs, targets in batches]
    return float(torch.stack(losses).mean())


def _row(name: str, dropper: GradientDropper, seed: int, options: dict[str, Any], parameters: int, loss: float) -> Row:
    shape = {field: options[field] for field in ("members", "steps", "lr", "layers", "dim", "context", "batch_size")}
    return {
        "variant": name,
        "seed": seed,
        "drop": dropper.drop,
        "wire": dropper.wire,
        "warmup": dropper.warmup,
        **shape,
        "quick": int(options["quick"]),
        "parameters": parameters,
        "val_loss": loss,
        "sent_bytes": dropper.sent_bytes,
        "dense_bytes": dropper.dense_bytes,
        "saved_share": 1 - dropper.sent_bytes / dropper.dense_bytes,
    }


def count_bytes(parameters: int) -> list[Row]:
    """Bytes that this member sends in one step of each scheme, counted as they are sent."""
    world, key = dist.get_world_size(), Pieces.of({"all": parameters})
    zero3 = _zero3(parameters)
    rows = [_bytes_row("flat ZeRO-3, fp32 reduce", 0.0, "", zero3, zero3, parameters)]
    schemes = [("dense", 0.0, "fp32"), ("dense", 0.0, "bf16"), ("dense", 0.0, "int8")]
    schemes += [("-40%", drop_for_saving(0.405, wire), wire) for wire in ("fp32", "bf16", "int8")]
    schemes += [("blocks 10%", 0.9, "bf16")]
    for label, drop, wire in schemes:
        dropper = GradientDropper(drop, wire=wire)
        dropper.all_reduce(torch.randn(parameters), _everyone(), key)
        rows.append(_bytes_row(f"{label} {wire}", drop, wire, dropper.sent_bytes, zero3, parameters))
    return [row | {"members": world} for row in rows]


def _bytes_row(scheme: str, drop: float, wire: str, sent: int, zero3: int, parameters: int) -> Row:
    return {
        "scheme": scheme,
        "drop": drop,
        "wire": wire,
        "parameters": parameters,
        "sent_bytes": sent,
        "saved_over_zero3": 1 - sent / zero3,
    }


def _zero3(parameters: int) -> int:
    """Two all-gathers of bf16 shards and one exchange of fp32 gradients that their owners sum: bytes sent."""
    members = Members(_everyone(), torch.device("cpu"))
    bounds = parts(parameters, len(members))
    weights, gradients = torch.randn(parameters).bfloat16(), torch.randn(parameters)
    low, high = bounds[members.place]
    sent = 0
    for _ in range(2):
        out = [weights[low:high].view(torch.uint8)] * len(members)
        sent += members.exchange(out, [torch.empty(2 * (b - a), dtype=torch.uint8) for a, b in bounds])
    pieces = [gradients[a:b].view(torch.uint8) for a, b in bounds]
    return sent + members.exchange(pieces, [torch.empty(4 * (high - low), dtype=torch.uint8) for _ in bounds])
