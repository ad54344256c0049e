"""One process, no process group: what is refused, and what trains."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laneway.cluster.layout import Layout
from laneway.cluster.topology import Device, Level, Topology
from laneway.core import InputError, LanewayError
from laneway.memory.config import MemoryConfig
from laneway.memory.manage import manage_memory
from laneway.models.gpt import GPT, GPTConfig
from laneway.strategy.base import next_token_loss
from laneway.strategy.wrap import wrap_model

CONFIG = GPTConfig(vocab_size=23, context=8, layers=2, heads=2, dim=8)
PLAIN = Layout(precision="fp32", micro_batch=2)
wrap = partial(wrap_model, device="cpu")


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """Sums come out the same."""


def gpt(**fields: object) -> GPT:
    return GPT(replace(CONFIG, **fields))


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randint(0, 23, (2, rows, 8))
    return inputs, targets


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("residual", ["mhc", "residual"])
def test_step_has_the_gradients_of_a_plain_loop(recompute, residual):
    plain, (inputs, targets) = gpt(residual=residual), batch()
    wrapped = wrap(copy.deepcopy(plain), replace(PLAIN, recompute=recompute))
    plain.chained = recompute != "full"
    for x, y in zip(inputs.split(2), targets.split(2), strict=True):
        (next_token_loss(plain(x), y) / 2).backward()
    loss = wrapped.step(inputs, targets)
    assert loss == (next_token_loss(plain(inputs[:2]), targets[:2]) / 2 + next_token_loss(plain(inputs[2:]), targets[2:]) / 2)
    for name, want in gradients(plain).items():
        assert torch.equal(gradients(wrapped)[name], want), name
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert (wrapped.data_rank, wrapped.data_ranks) == (0, 1)


def test_what_is_recomputed_is_not_kept():
    """Bytes that autograd saves, by choice of recompute."""
    held = {}
    for recompute in ("none", "selective", "full"):
        wrapped, sizes = wrap(gpt(), replace(PLAIN, recompute=recompute)), {}

        def pack(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            alive = wrapped(batch()[0])
        held[recompute] = sum(sizes.values())
        del alive
    assert held["full"] < held["selective"] < held["none"]


def test_it_trains_as_any_module_and_clips():
    wrapped, (inputs, targets) = wrap(gpt(), PLAIN), batch()
    optimizer = torch.optim.AdamW(wrapped.param_groups(0.1), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = next_token_loss(wrapped(inputs), targets)
        loss.backward()
        before = torch.nn.utils.get_total_norm([p.grad for p in wrapped.parameters()])
        assert wrapped.clip_grad_norm_(0.1) == pytest.approx(before.item(), rel=1e-6)
        after = torch.nn.utils.get_total_norm([p.grad for p in wrapped.parameters()])
        assert after.item() == pytest.approx(min(0.1, before.item()), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]


def test_bf16_computes_in_bf16_and_keeps_fp32():
    wrapped, seen = wrap(gpt(), replace(PLAIN, precision="bf16")), []
    wrapped.module.blocks[0].ffn.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    wrapped.step(*batch())
    assert set(seen) == {torch.bfloat16}
    assert {parameter.dtype for parameter in wrapped.parameters()} == {torch.float32}


def test_streams_are_put_into_a_plain_model():
    plain, (inputs, targets) = gpt(residual="residual"), batch()
    want = plain(inputs)
    wrapped = wrap(plain, PLAIN, streams=4)
    torch.testing.assert_close(wrapped(inputs), want, rtol=0, atol=1e-5)
    wrapped.step(inputs, targets)
    assert all(grad is not None and grad.isfinite().all() for grad in gradients(wrapped).values())
    assert sum(".site_" in name and name.endswith(".fn") for name, _ in wrapped.named_parameters()) == 4
    with pytest.raises(InputError, match="streams: got 3; accepted: None, or the 4"):
        wrap(gpt(), PLAIN, streams=3)
    assert wrap(model := gpt(), PLAIN, streams=4).module is model


@pytest.mark.parametrize("made_by", ["configuration", "callable"])
def test_managed_memory_changes_no_bit(made_by):
    plain, (inputs, targets) = gpt(), batch()
    config = MemoryConfig("1KiB", min_bytes=256)
    memory = config if made_by == "configuration" else lambda model: manage_memory(model, config=config)
    managed = wrap(copy.deepcopy(plain), PLAIN, memory=memory)
    wrapped = wrap(plain, PLAIN)
    for _ in range(2):
        assert managed.step(inputs, targets) == wrapped.step(inputs, targets)
    for name, want in gradients(wrapped).items():
        assert torch.equal(gradients(managed)[name], want)
    assert sum(report.account.bytes_out for report in managed.memory.passes) > 0
    with pytest.raises(LanewayError, match=r"train with model.step\(…\), or within `with model.managed"):
        managed(inputs)
    with managed.managed():
        next_token_loss(managed(inputs), targets).backward()
    with torch.no_grad():
        managed(inputs)
    managed.close()


def test_a_model_without_storage_gets_it_and_its_weights_later():
    plain, tokens = gpt(), batch()[0]
    with torch.device("meta"):
        wrapped = wrap(gpt(), PLAIN)
    assert all(parameter.is_meta for parameter in wrapped.parameters())
    wrapped.to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert torch.equal(wrapped(tokens), plain(tokens))


def test_storage_for_buffers_that_nothing_fills_is_refused():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.ones(3), persistent=False)

    with torch.device("meta"):
        wrapped = wrap(nn.Sequential(nn.Linear(3, 3), Table()), PLAIN)
    with pytest.raises(LanewayError, match=r"to_empty would leave module.1.angles without values"):
        wrapped.to_empty(device="cpu")


REFUSED = [
    ({"cp": 2}, "layout.cp: got 2; accepted: 1"),
    ({"ep": 2}, "layout.ep: got 2; accepted: 1: GPT has no experts"),
    ({"chunks": 2}, "layout.chunks: got 2; accepted: 1 without pipeline stages"),
    ({"precision": "fp8"}, "layout.precision: got 'fp8'; accepted: fp32 or bf16"),
    ({"grad_bytes": 1}, "layout.grad_bytes: got 1; accepted: 2"),
    ({"zero": 0}, "layout.zero: got 0"),
    ({"dp_shard": 2, "overlap_grads": False}, "layout.overlap_grads: got False"),
    ({"recompute": "some"}, "layout.recompute: got 'some'"),
    ({"tp": 0}, "layout.tp: got 0"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_can_not_be_applied_is_refused_by_name(changes, message):
    with pytest.raises(InputError) as error:
        wrap(gpt(), replace(PLAIN, **changes))
    assert str(error.value).startswith(message)


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp": 2}, "layout.pp: got 2; accepted: 1 for Other"),
        ({"tp": 2, "sequence_parallel": True}, "layout.sequence_parallel: got True; accepted: False for Other"),
        ({"recompute": "selective"}, "layout.recompute: got 'selective'; accepted: none or full for Other"),
        ({"recompute": "full"}, "layout.recompute: got 'full'; accepted: none for a model without"),
    ],
)
def test_models_of_another_make_are_refused_by_name(changes, message):
    with pytest.raises(InputError) as error:
        wrap(Other(), replace(PLAIN, **changes))
    assert str(error.value).startswith(message)


def test_memory_with_split_models_and_wrapped_models_are_refused():
    with pytest.raises(InputError, match=r"memory: got .*None with layout.tp > 1"):
        wrap(gpt(), replace(PLAIN, tp=2), memory=MemoryConfig("1GiB"))
    with pytest.raises(InputError, match=r"memory.optimizer_state: got 'streamed'"):
        wrap(gpt(), PLAIN, memory=MemoryConfig("1GiB", optimizer_state="streamed"))
    with pytest.raises(InputError, match="model: got 'DistributedDataParallel'"):
        wrap(DistributedDataParallel.__new__(DistributedDataParallel), PLAIN)


def test_another_number_of_processes_is_one_clear_error(monkeypatch):
    with pytest.raises(LanewayError) as error:
        wrap(gpt(), Layout(tp=2, dp_shard=4))
    assert str(error.value) == (
        "the plan needs 8 processes (dp_shard 4 × tp 2), but 1 run; start 8 processes (torchrun --nproc-per-node …), or plan "
        "for 1: strategy.scaled_to(1)"
    )
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(LanewayError, match=r"no process group was begun: call torch.distributed.init_process_group first"):
        wrap(gpt(), Layout(tp=2, dp_shard=4))


def test_a_topology_of_another_size_is_refused():
    device = Device("CPU", {"fp32": 1e12, "bf16": 1e12}, 1e10, 1e10, 100.0, "made up")
    with pytest.raises(InputError, match="topology: got '8 devices'; accepted: the layout's 1"):
        wrap(gpt(), PLAIN, topology=Topology(device, (Level("L1", 8, 1e-6, 1e9),)))


def test_rows_that_micro_batches_do_not_divide_are_refused():
    with pytest.raises(InputError, match="batch: got"):
        wrap(gpt(), PLAIN).step(*batch(3))
