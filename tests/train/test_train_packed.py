"""What ranks share in a step goes in one collective, comes back as its op says, and is there again after a resume."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.core import InputError, LanewayError, SharesStatistics, Statistics
from laneway.data.text import TextDataConfig
from laneway.models.gpt import GPTConfig
from laneway.train.config import TrainConfig
from laneway.train.packed import OPS, SharedStatistics
from laneway.train.settings import to_toml

RANKS = 2


def layouts(seed: int) -> list[dict[str, Any]]:
    """Vectors and three steps of values for each rank; now and then a rank gives none, or one that is no number."""
    draw = random.Random(seed)
    found = []
    for _ in range(12):
        entries = {f"v{i}": (draw.randint(1, 5), draw.choice(OPS)) for i in range(draw.randint(0, 6))}
        steps = [[_values(draw, entries) for _ in range(RANKS)] for _ in range(3)]
        found.append({"entries": entries, "steps": steps})
    return found


def _values(draw: random.Random, entries: dict[str, tuple[int, str]]) -> dict[str, list[float]]:
    odd = [math.nan, math.inf, -math.inf, 0.0, -1e-30]
    return {
        name: [float(np.float32(draw.choice([draw.gauss(0, 100), draw.gauss(0, 1), *odd[draw.randint(0, 4) :]])))] * size
        if draw.random() < 0.3
        else [float(np.float32(draw.gauss(0, 10))) for _ in range(size)]
        for name, (size, _) in entries.items()
        if draw.random() < 0.8
    }


def expected(entry: tuple[int, str], given: list[list[float] | None]) -> np.ndarray:
    """In float64."""
    size, op = entry
    idle = {"sum": 0.0, "max": -math.inf, "gather": math.nan}[op]
    by_rank = np.array([[idle] * size if values is None else values for values in given])
    with np.errstate(invalid="ignore"):
        return {"sum": by_rank.sum(0), "max": by_rank.max(0), "gather": by_rank}[op]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> list[dict[str, Any]]:
    """What each of two ranks found, with the layouts they were given."""
    folder = tmp_path_factory.mktemp("packed")
    config = TrainConfig(
        model=GPTConfig(context=16, layers=1, heads=2, dim=16, streams=2),
        data=TextDataConfig(path=str(text_file), cache=str(text_file.parent / "cache"), validation_fraction=0.2),
        steps=5, batch_size=6, micro_batch_size=1, device="cpu", validate_every=0, validation_batches=1, probe_every=0,
        checkpoint_every=3, sample_tokens=0,
    )  # fmt: skip
    (folder / "c.toml").write_text(to_toml(config), "utf-8")
    given = layouts(random.randrange(2**32))
    (folder / "layouts.json").write_text(json.dumps(given), "utf-8")
    script = Path(__file__).with_name("packed_ranks.py")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [{"given": given} | json.loads((folder / f"rank{rank}.json").read_text("utf-8")) for rank in range(RANKS)]


def test_every_op_is_as_in_float64_and_takes_one_collective(ranks):
    given = ranks[0]["given"]
    steps = [(layout["entries"], step) for layout in given for step in layout["steps"]]
    assert len(ranks[0]["layouts"]) == len(steps)
    for (entries, step), (count, found) in zip(steps, ranks[0]["layouts"], strict=True):
        assert count == (1 if entries else 0)
        for name, entry in entries.items():
            want = expected(entry, [by_name.get(name) for by_name in step])
            exact = entry[1] != "sum"
            np.testing.assert_allclose(found[name], want, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-4)


def test_all_ranks_have_the_same_bits(ranks):
    assert len({json.dumps(rank["layouts"]) for rank in ranks}) == 1


def test_ranks_that_share_different_statistics_all_say_so(ranks):
    for place, rank in enumerate(ranks):
        assert rank["disagreement"] == (
            f"the ranks share different statistics; rank {place} has load (sum of {2 if place == 1 else 3})"
        )


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_extensions_share_costs_no_collective(ranks, kind):
    """From the third step on: DDP makes its buckets anew in the second."""
    counts = {tuple(set(rank[name]["counts"][2:])) for rank in ranks for name in (kind, f"{kind} shared")}
    assert len(counts) == 1
    assert len(counts.pop()) == 1  # the same number in every step


def test_a_step_of_ddp_reduces_one_bucket_and_one_vector(ranks):
    """The small model's gradients are one bucket; two micro-batches; a norm, a stop request and a loss that all ranks know."""
    for rank in ranks:
        assert set(rank["ddp"]["counts"][2:]) == {2}


def test_an_extension_finds_its_values_in_the_next_step_and_after_a_resume(ranks):
    def values(step: int) -> dict[str, Any]:
        by_rank = [float(10 * step + rank) for rank in range(RANKS)]
        return {"a": [sum(by_rank)] * 2, "b": [max(by_rank)], "c": [[value] * 2 for value in by_rank]}

    for rank in ranks:
        assert rank["ddp shared"]["found"] == [{"a": None, "b": None, "c": None}, values(1), values(2), values(3)]
        assert rank["ddp resumed"]["found"] == [values(3), values(4)]  # steps 4 and 5


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(OPS)), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=50)
def test_alone_values_come_back_as_they_were(entries, seed):
    shared = SharedStatistics("cpu")
    for name, (size, op) in enumerate(entries):
        shared.add(str(name), size, op)
    assert all(shared.get(str(name)) is None for name in range(len(entries)))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        values = [torch.randn(size, generator=generator) for size, _ in entries]
        for name, value in enumerate(values):
            shared.put(str(name), value)
        shared.start()
        shared.finish()
        for name, value in enumerate(values):
            assert torch.equal(shared.taken(str(name)).reshape(-1), value)
    again = SharedStatistics("cpu")
    for name, (size, op) in enumerate(entries):
        again.add(str(name), size, op)
    again.load_state_dict(shared.state_dict())
    assert all(torch.equal(again.taken(str(name)), shared.taken(str(name))) for name in range(len(entries)))


def test_values_stay_as_they_were_while_the_next_step_goes_on():
    shared = SharedStatistics("cpu")
    shared.add("x", 2)
    shared.put("x", [1.0, 2.0])
    shared.start()
    shared.put("x", torch.tensor([3.0, 4.0]))  # belongs to the step after
    shared.finish()
    first = shared.taken("x")
    shared.start()
    assert first.tolist() == [1.0, 2.0] == shared.taken("x").tolist()
    shared.finish()
    assert first.tolist() == [1.0, 2.0]
    assert shared.taken("x").tolist() == [3.0, 4.0]
    shared.start()
    shared.finish()
    assert shared.taken("x").tolist() == [0.0, 0.0]  # a step in which nothing was put


def test_a_state_of_other_ranks_leaves_out_what_was_by_rank():
    alone, three = SharedStatistics("cpu"), SharedStatistics("cpu", 1, 3)
    for shared in (alone, three):
        shared.add("sum", 2)
        shared.add("each", 2, "gather")
    three.load_state_dict({"sum": torch.tensor([1.0, 2.0]), "each": torch.ones(1, 2), "gone": torch.ones(1)})
    assert three.taken("sum").tolist() == [1.0, 2.0]
    assert three.get("each") is None


def test_mistakes_are_named():
    shared = SharedStatistics("cpu")
    shared.add("load", 2)
    with pytest.raises(InputError, match="name: got 'load'; accepted: a name that no other"):
        shared.add("load")
    with pytest.raises(InputError, match="op: got 'mean'; accepted: one of sum, max, gather"):
        shared.add("x", op="mean")
    with pytest.raises(InputError, match="size: got 0; accepted: an integer ≥ 1"):
        shared.add("x", 0)
    with pytest.raises(InputError, match="rank: got 2; accepted: an integer from 0 to 1"):
        SharedStatistics("cpu", 2, 2)
    with pytest.raises(InputError, match="statistics 'load': got '3 values'; accepted: 2, as was added"):
        shared.put("load", [1.0, 2.0, 3.0])
    with pytest.raises(InputError, match="name: got 'loads'; accepted: one of load; did you mean 'load'"):
        shared.put("loads", [1.0, 2.0])
    with pytest.raises(LanewayError, match="before the first step"):
        shared.add("late")
    with pytest.raises(LanewayError, match="no step has finished"):
        shared.taken("load")
    with pytest.raises(LanewayError, match=r"finish\(\) needs a start"):
        shared.finish()
    shared.start()
    with pytest.raises(LanewayError, match=r"start\(\) came twice"):
        shared.start()


def test_the_protocols_of_the_core_are_kept():
    class Sharing:
        def share(self, statistics: Statistics) -> None:
            statistics.add("x")

    assert isinstance(Sharing(), SharesStatistics)
    shared = SharedStatistics("cpu")
    Sharing().share(shared)
    assert shared.nbytes == 4
