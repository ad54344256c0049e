"""Further ways of laying a model over processes, and a transformers model by its own tensor parallel plan."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from launch import torchrun
from test_wrap_ranks import SCRIPT, bound_of
from wrapping import MORE, llama, model, train

from laneway.cluster.layout import Layout
from laneway.strategy.wrap import wrap_model

pytest.importorskip("transformers", reason="needs the peers extra: transformers")
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.peers]

CASES = [(world, name) for world, ways in MORE.items() for name in ways]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    found = {}
    for world in MORE:
        folder = tmp_path_factory.mktemp(f"more{world}")
        torchrun(world, SCRIPT, ".", "more", cwd=folder)
        found[world] = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]
    return found


@cache
def one(made: Any, streams: int | None) -> dict[str, Any]:
    return train(wrap_model(made(), Layout(precision="fp32", micro_batch=2), device="cpu", streams=streams))


@pytest.mark.parametrize(("world", "name"), CASES)
def test_training_is_that_of_one_process(ranks, world, name):
    found = ranks[world][0]["ways"][name]
    expected = one(llama if name.startswith("llama") else model, 3 if "streams" in name else None)
    for key in ("losses", "norms"):
        assert found[key] == pytest.approx(expected[key], rel=bound_of(name))
    assert found["clipped"] == pytest.approx(0.3, rel=1e-4)
    assert set(found["weights"]) == set(expected["weights"])
    weights = [expected["weights"][key] for key in found["weights"]]
    assert list(found["weights"].values()) == pytest.approx(weights, rel=bound_of(name), abs=bound_of(name))
