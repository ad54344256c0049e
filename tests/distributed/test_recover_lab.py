"""Ranks, hosts and links of a network that fail while ranks reduce over its levels; and training under torchrun that goes on."""

from __future__ import annotations

from typing import Any

import netlab_losses
import pytest
from netlab import Lab

from laneway.bench.netlab import Network

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

LIMIT = 3.0
WORLD = 8  # two racks of two hosts of two ranks


def survivors(found: list[Any], lost: list[int]) -> list[dict[str, Any]]:
    """Those that are left, after checking that they name the lost alike and sum over a ragged world without them."""
    others = [said for rank, said in enumerate(found) if rank not in lost]
    assert {said["kind"] for said in others} == {"RankLostError"}, others
    assert len({said["text"] for said in others}) == 1
    assert all(said["lost"] == lost for said in others)
    total = float(sum(2**rank for rank in range(WORLD) if rank not in lost))
    for place, said in enumerate(others):
        assert (said["after"], said.get("rank"), said.get("sums")) == ("went on", place, [total]), said
    return others


def test_a_rank_is_killed_in_a_reduction_over_three_levels(lab: Lab):
    found = lab.run(netlab_losses.lose, Network(), {"victim": 5, "how": "kill", "limit": LIMIT}, timeout=60, may_die=[5])
    others = survivors(found, [5])
    assert "lost rank 5 of 8 on host r1h0 (process " in others[0]["text"]
    assert "its process is gone" in others[0]["text"]


def test_a_host_is_cut_off_and_stops(lab: Lab):
    found = lab.run(netlab_losses.lose, Network(), {"victim": 5, "how": "cut", "limit": LIMIT}, timeout=60)
    others = survivors(found, [4, 5])
    assert "lost ranks 4, 5 on host r1h0 of 8 ranks: no sign of life for 3 s" in others[0]["text"]
    assert [(found[rank]["kind"], found[rank]["after"]) for rank in (4, 5)] == [("CutOffError", "CutOffError")] * 2
    assert max(found[rank]["seconds"] for rank in (4, 5)) < min(said["seconds"] for said in others)


@pytest.mark.slow
def test_a_rank_freezes_in_a_reduction_over_three_levels(lab: Lab):
    found = lab.run(netlab_losses.lose, Network(), {"victim": 2, "how": "stop", "limit": LIMIT}, timeout=60, may_die=[2])
    assert "lost rank 2 of 8 on host r0h1 (process " in survivors(found, [2])[0]["text"]
