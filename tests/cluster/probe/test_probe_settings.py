"""Settings that follow from a topology; what the user has set stays."""

from __future__ import annotations

import csv
import subprocess
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.cluster.probe.settings import Interfaces, found_interfaces, settings_of
from laneway.cluster.probe.tuner import TUNER_HEADER
from laneway.cluster.topology import Topology
from laneway.core import InputError

NAMES = Interfaces(("eth0", "eth1"), ("mlx5_0", "mlx5_1"))
TOPOLOGIES = ["8xH100_4nodes_2racks@NDR400/400GbE:4", "8xA100_2nodes", "8xH100_2nodes_2sites", "4xCPU_2nodes_2racks", "8xH100"]


@given(st.sampled_from(TOPOLOGIES), st.sampled_from([None, NAMES]))
def test_the_users_values_stay_and_are_told(text, names):
    topology = Topology.parse(text)
    ours = settings_of(topology, interfaces=names, environ={})
    assert ours.kept == ()
    for each in ours.variables:
        theirs = settings_of(topology, interfaces=names, environ={each.name: "mine"})
        assert theirs.environment == {name: value for name, value in ours.environment.items() if name != each.name}
        assert [(kept.name, kept.users) for kept in theirs.kept] == [(each.name, "mine")]


def test_names_of_interfaces():
    found = settings_of(Topology.parse(TOPOLOGIES[0]), interfaces=NAMES, environ={}).environment
    assert found["NCCL_SOCKET_IFNAME"] == "=eth0,eth1"
    assert found["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1"
    assert found["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "NCCL_ALGO" not in found
    assert list(settings_of(Topology.parse(TOPOLOGIES[3]), interfaces=NAMES, environ={}).environment) == ["GLOO_SOCKET_IFNAME"]
    assert settings_of(Topology.parse("8xH100"), interfaces=NAMES, environ={}).environment == {}


def test_a_long_fat_link_gets_larger_buffers():
    near, far = (settings_of(Topology.parse(text), environ={}).environment for text in ("8xH100_2nodes", "8xH100_2nodes_2sites"))
    assert "NCCL_BUFFSIZE" not in near
    size = int(far["NCCL_BUFFSIZE"])
    assert 4 * 2**20 < size <= 64 * 2**20
    assert size & (size - 1) == 0


@given(st.sampled_from([text for text in TOPOLOGIES if "CPU" not in text]))
def test_rows_of_the_tuner_cover_all_sizes_of_each_communicator_once(text):
    rows = settings_of(Topology.parse(text), environ={}).tuner
    by_communicator: dict = {}
    for row in rows:
        fields = row.line().split(",")
        assert len(fields) == len(TUNER_HEADER.split(",")) == 10
        assert fields[0] in ("allreduce", "reducescatter", "allgather")
        assert fields[3] in ("tree", "ring")
        assert fields[4] in ("ll", "simple") or (fields[4] == "ll128" and row.nodes == 1)
        by_communicator.setdefault((row.collective, row.nodes, row.ranks), []).append(row)
    topology = Topology.parse(text)
    assert ("allreduce", topology.world // topology.levels[0].size, topology.world) in by_communicator
    for found in by_communicator.values():
        assert found[0].least == 0
        assert found[-1].most == 2**32 - 1
        assert found[-1].protocol == "simple"
        assert all(a.most + 1 == b.least for a, b in pairwise(found))


def test_files(tmp_path):
    settings = settings_of(Topology.parse(TOPOLOGIES[0]), interfaces=NAMES, environ={"NCCL_IB_HCA": "mine; rm"})
    settings_of(Topology.parse(TOPOLOGIES[0]), interfaces=NAMES, environ={}).write(tmp_path)
    env, tuner = settings.write(tmp_path / "new")
    shell = f'. {env}; echo "$NCCL_SOCKET_IFNAME $NCCL_IB_HCA $GLOO_SOCKET_IFNAME"'
    told = subprocess.run(
        ["sh", "-c", shell], env={"NCCL_IB_HCA": "theirs"}, capture_output=True, text=True, check=True, timeout=20
    )
    assert told.stdout == "=eth0,eth1 theirs eth0\n"
    assert "yours stays, 'mine; rm'" in env.read_text()
    lines = [line for line in tuner.read_text().splitlines() if not line.startswith("#")]
    assert len(list(csv.reader(lines))) == len(settings.tuner) > 6
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="export_settings"):
        settings.write(tmp_path / "file" / "new")


def test_what_a_host_has(tmp_path):
    routes = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\nib0\t0000000A\t0\t1\t0\t0\t0\t00FFFFFF\n"
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/route").write_text(routes + "eno1\t00000000\t0100000A\t3\t0\t0\t0\t00000000\n")
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    assert found_interfaces(tmp_path) == Interfaces(("eno1",), ("mlx5_0",))
    assert found_interfaces(tmp_path / "none") == Interfaces()
