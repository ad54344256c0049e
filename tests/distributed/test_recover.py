"""Ranks that are killed, frozen or cut off: one error on all others that names them, within the limit; and they go on or stop."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recovery import LIMIT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

SLACK = 3.0  # seconds that a busy machine may take to run a thread that is due


def find(*cases: str) -> dict[str, Any]:
    """What the ranks of each case said; raises where one crashed or had to be killed."""
    command = [sys.executable, str(Path(__file__).with_name("recovery.py")), *cases]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    for name, case in found.items():
        for rank, said in case["ranks"].items():
            assert not (said or {}).get("hung"), f"{name}: rank {rank} hung; {done.stderr[-2000:]}"
            assert "crash" not in (said or {}), f"{name}: rank {rank}: {said['crash']}"
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return find("kill", "freeze", "cut", "minority", "store_host", "own_error")


def left(case: dict[str, Any], *lost: int, later: int | None = None) -> dict[int, dict[str, Any]]:
    """What the others said, by rank, after checking that they name ``lost`` alike and that one of them speaks.

    ``later``: one that was lost after that, and said nothing.
    """
    others = {int(rank): said for rank, said in case["ranks"].items() if int(rank) not in (*lost, later)}
    assert {said["kind"] for said in others.values()} == {"RankLostError"}
    assert len({said["text"] for said in others.values()}) == 1
    assert all(said["lost"] == list(lost) for said in others.values())
    if later is None:
        assert [rank for rank, said in others.items() if said["speaks"]] == [min(others)]
    return others


def check_new_world(others: dict[int, dict[str, Any]]) -> None:
    """They have new ranks in the old order and sum over all that are left."""
    for place, (rank, said) in enumerate(sorted(others.items())):
        assert (said.get("size"), said.get("rank")) == (len(others), place), (rank, said)
        assert said["total"] == [float(sum(others))]


def test_a_killed_rank_is_named_at_once_and_the_others_go_on(found):
    case = found["kill"]
    others = left(case, 2)
    said = others[0]
    assert said["text"].startswith("lost rank 2 of 4 on host ")
    assert "its process is gone; noticed by rank" in said["text"]
    assert case["ranks"]["2"] is None
    assert max(said["at"] for said in others.values()) - case["when"] < LIMIT + SLACK
    check_new_world(others)


def test_a_frozen_rank_is_lost_at_the_limit_and_stops_when_it_wakes(found):
    case = found["freeze"]
    others = left(case, 1)
    for said in others.values():
        assert "no sign of life for 2 s (frozen, or cut off)" in said["text"]
        assert 0.7 * LIMIT < said["at"] - case["when"] < LIMIT + SLACK
    check_new_world(others)
    frozen = case["ranks"]["1"]
    assert frozen["text"].startswith("rank 1 of 4 was given up by the others")
    assert frozen["regroup"] == "RankLostError"  # it can't come back


def test_of_a_cut_network_the_side_without_the_store_stops_first(found):
    case = found["cut"]
    others = left(case, 1, 3)
    check_new_world(others)
    for rank in ("1", "3"):
        said = case["ranks"][rank]
        assert (said["kind"], said["regroup"]) == ("CutOffError", "CutOffError")
        assert f"rank {rank} of 5 lost the store at 127.0.0.1:" in said["text"]
        assert said["at"] - case["when"] < LIMIT + SLACK
        assert said["at"] < min(other["again"] for other in others.values())
    assert [rank for rank, said in case["ranks"].items() if said["speaks"]] == ["0"]  # all are on one machine


def test_a_minority_stops_also_where_it_has_the_store(found):
    case = found["minority"]
    for rank, said in case["ranks"].items():
        assert said["regroup"] == ("MinorityError" if rank in ("2", "3") else "CutOffError")
    assert "2 of 5 ranks are left, at least 3 must be" in case["ranks"]["2"]["regroup_text"]


def test_a_store_that_dies_with_its_host_is_an_error_on_all(found):
    case = found["store_host"]
    for rank in ("1", "2"):
        said = case["ranks"][rank]
        assert (said["kind"], said["regroup"]) == ("CutOffError", "CutOffError")
        assert said["at"] - case["when"] < LIMIT + SLACK
        assert 0 in said["lost"]
        assert re.search(r"\branks? 0\b.* on host ", said["text"])


def test_a_rank_with_an_error_of_its_own_is_named_with_it(found):
    ranks = found["own_error"]["ranks"]
    assert ranks["1"] == {"kind": "ValueError", "text": "a number too many"}
    for rank in ("0", "2"):
        assert ranks[rank]["kind"] == "CollectiveFailedError"
        assert ranks[rank]["text"].startswith("rank 1 of 3 on host ")
        assert ranks[rank]["text"].endswith("failed: ValueError: a number too many")
        assert ranks[rank]["size"] == 2  # that rank has ended since


@pytest.mark.slow
def test_other_losses():
    found = find("kill_host", "kill_first", "kill_twice", "quiet")
    others = left(found["kill_host"], 2, 3)
    assert "lost ranks 2, 3 on host " in others[0]["text"]
    check_new_world(others)
    check_new_world(left(found["kill_first"], 0))
    first = left(found["kill_twice"], 1, later=0)
    second = {rank: said["second"] for rank, said in first.items()}
    assert found["kill_twice"]["ranks"]["0"] is None
    assert all(said["lost"] == [0] for said in second.values())  # its rank in the second world
    check_new_world(second)
    assert all(said == {"kind": "NoneType"} for said in found["quiet"]["ranks"].values())
