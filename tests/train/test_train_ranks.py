"""One process among others: its device, and decisions that all ranks share (several ranks: tests/distributed)."""

import pytest
import torch
import torch.distributed as dist

from laneway.core import InputError, LanewayError
from laneway.train.environment import cpu_model, describe_environment
from laneway.train.ranks import Ranks, pick_device, ranks_of_run

ALONE = Ranks(0, 0, 1, torch.device("cpu"))


def fail() -> None:
    raise LanewayError("it broke")


@pytest.mark.parametrize("name", ["on_first", "one_by_one_machine", "together"])
def test_alone_an_action_is_just_called(name):
    assert getattr(ALONE, name)(lambda: 7) == 7
    assert getattr(ALONE, name)(lambda: None) is None
    with pytest.raises(LanewayError, match="it broke"):
        getattr(ALONE, name)(fail)
    with pytest.raises(ZeroDivisionError):
        getattr(ALONE, name)(lambda: 1 // 0)


def test_alone_a_sum_is_the_value():
    values = torch.tensor([1.0, 2.0])
    assert ALONE.sum(values) is values
    assert values.tolist() == [1.0, 2.0]


def test_the_cpu_is_always_there():
    assert pick_device("cpu", 3) == torch.device("cpu")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_auto_is_the_cpu_without_an_accelerator():
    assert pick_device("auto", 0) == torch.device("cpu")
    with pytest.raises(InputError, match="device: got 'cuda'; accepted: one of auto, cpu"):
        pick_device("cuda", 0)


def test_without_torchrun_there_is_one_rank_and_no_group(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with ranks_of_run("cpu") as ranks:
        assert (ranks.rank, ranks.world_size, ranks.first) == (0, 1, True)
        assert not dist.is_initialized()


def test_the_environment_names_the_processor():
    assert cpu_model()
    env = describe_environment(ALONE)
    assert env["cpu"] == cpu_model()
    assert env["world_size"] == 1
    assert env["device"] == {"type": "cpu"}
    assert env["memory_bytes"] > 2**28
