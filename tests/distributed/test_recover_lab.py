"""Ranks, hosts and links of a network that fail while ranks reduce over its levels; and training under torchrun that goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import netlab_losses
import pytest
from netlab import Lab

from laneway.bench.netlab import Network
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.settings import to_toml

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

LIMIT = 3.0
TRAIN = str(Path(__file__).with_name("netlab_trains.py"))
ELASTIC = ("--max-restarts", "3", "--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2")
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


def trains(lab: Lab, small: TrainConfig, folder: Path, how: str, *options: str, **more: Any) -> tuple[Any, RunDirectory]:
    """`laneway train` on two hosts of two ranks; what torchrun did, and the run."""
    config = dataclasses.replace(small, steps=24, probe_every=0, validate_every=8, failure_timeout=LIMIT)
    (folder / "c.toml").write_text(to_toml(config))
    command = [TRAIN, how, str(folder / "run"), "--config", str(folder / "c.toml")]
    done = lab.torchrun(command, Network(((2,), (2,))), options=options, timeout=150, grace=90, **more)
    return done, RunDirectory(folder / "run")


def history(run: RunDirectory) -> list[tuple[str, int]]:
    """What happened to the run and on how many ranks."""
    events = [event for event in run.read_events() if event["kind"] in ("start", "resume", "lost", "finish")]
    assert [row["step"] for row in run.read_metrics()] == list(range(1, 25))
    return [(event["kind"], event.get("world_size", 0)) for event in events]


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_torchrun_starts_all_hosts_again_after_a_rank_was_killed(lab: Lab, small, tmp_path, rendezvous):
    done, run = trains(lab, small, tmp_path, "rank", "--max-restarts", "3", rendezvous=rendezvous)
    assert set(done.codes.values()) == {0}
    assert history(run) == [("start", 4), ("lost", 0), ("resume", 4), ("finish", 0)]
    assert "on host r1h0" in next(event["reason"] for event in run.read_events() if event["kind"] == "lost")


@pytest.mark.slow
def test_the_remaining_host_goes_on_alone(lab: Lab, small, tmp_path):
    done, run = trains(lab, small, tmp_path, "host", *ELASTIC, "--nnodes", "1:2", rendezvous="c10d", may_die=["r1h0"])
    assert done.codes["r0h0"] == 0
    assert history(run) == [("start", 4), ("lost", 0), ("resume", 2), ("finish", 0)]
    notices = [event["message"] for event in run.read_events() if event["kind"] == "notice"]
    assert any("the number of processes (4 → 2) changed" in notice for notice in notices)


@pytest.mark.slow
def test_a_host_that_is_replaced_joins_again(lab: Lab, small, tmp_path):
    """Agents that share the rendezvous' store don't tell a new one where it is: each round then needs a store of its own."""
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    more = {"rendezvous": "c10d", "may_die": ["r1h0"], "environment": apart}
    done, run = trains(lab, small, tmp_path, "replace", *ELASTIC, "--nnodes", "2", **more)
    assert done.codes == {"r0h0": 0, "r1h0": 0}
    assert history(run) == [("start", 4), ("lost", 0), ("resume", 4), ("finish", 0)]
