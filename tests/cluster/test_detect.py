"""What is detected from variables of launchers and schedulers, from Kubernetes, and by the ranks themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.cluster.catalogue import device
from laneway.cluster.detect import detect_topology
from laneway.cluster.hosts import Identity
from laneway.cluster.slurm import switch_path
from laneway.cluster.switches import racks_from_switches
from laneway.core import InputError

FOUR = {"SLURM_JOB_NODELIST": "node[7-8,66,70]", "SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": "4"}
# name: (variables, devices of each host, device, hosts)
SLURM = {
    "typed GPUs, one task a node": (
        FOUR | {"SLURM_GPUS_PER_NODE": "a100:8", "SLURM_TASKS_PER_NODE": "1(x4)"},
        [8, 8, 8, 8],
        "A100",
        ["node7", "node8", "node66", "node70"],
    ),
    "typed GPUs, a task each": (FOUR | {"SLURM_GPUS_PER_NODE": "h100:8", "SLURM_TASKS_PER_NODE": "8(x4)"}, [8] * 4, "H100", None),
    "gres spelled in full": (FOUR | {"SLURM_GPUS_PER_NODE": "gpu:a100:4(S:0-1)"}, [4] * 4, "A100", None),
    "untyped GPUs": (FOUR | {"SLURM_GPUS_PER_NODE": "8"}, [8] * 4, "GPU", None),
    "GPUs on this node only": (FOUR | {"SLURM_GPUS_ON_NODE": "4", "SLURM_TASKS_PER_NODE": "1(x4)"}, [4] * 4, "GPU", None),
    "fewer tasks than GPUs": (FOUR | {"SLURM_GPUS_PER_NODE": "a100:8", "SLURM_TASKS_PER_NODE": "4(x4)"}, [4] * 4, "A100", None),
    "ragged tasks": (
        {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3", "SLURM_TASKS_PER_NODE": "4(x2),3"},
        [4, 4, 3],
        "CPU",
        ["n1", "n2", "n3"],
    ),
    "ragged tasks with GPUs": (
        {"SLURM_NNODES": "3", "SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_GPUS_PER_NODE": "a100:8"},
        [4, 4, 3],
        "A100",
        [],
    ),
    "no node list": ({"SLURM_NNODES": "2", "SLURM_GPUS_PER_NODE": "mi300x:8"}, [8, 8], "MI300X", []),
    "only the job's number of nodes": ({"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}, [8, 8], "GPU", []),
    "a variable that does not exist is not read": (
        {"SLURM_JOB_NUMNODES": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_PER_NODE": "8"},
        [8, 8],
        "GPU",
        [],
    ),
    "tasks and GPUs of each": (
        {"SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "2,1", "SLURM_GPUS_PER_TASK": "a100:4"},
        [8, 4],
        "A100",
        [],
    ),
    "GPUs of the whole job": ({"SLURM_NNODES": "2", "SLURM_GPUS": "b200:16"}, [8, 8], "B200", []),
    "GPU numbers": ({"SLURM_NNODES": "2", "SLURM_JOB_GPUS": "0,1,2,3"}, [4, 4], "GPU", []),
    "tasks alike": ({"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"}, [4, 4], "CPU", []),
    "tasks in all": ({"SLURM_NNODES": "2", "SLURM_NTASKS": "6"}, [3, 3], "CPU", []),
    "zero-padded, out of order": (
        {"SLURM_JOB_NODELIST": "gpu[009-011],gpu002", "SLURM_TASKS_PER_NODE": "2(x3),5"},
        [5, 2, 2, 2],
        "CPU",
        ["gpu002", "gpu009", "gpu010", "gpu011"],
    ),
    "a step on part of the job": (
        FOUR | {"SLURM_STEP_NODELIST": "node[66,70]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "3(x2)"},
        [3, 3],
        "CPU",
        ["node66", "node70"],
    ),
    "old names": ({"SLURM_NODELIST": "wn[005-006]", "SLURM_NNODES": "2", "SLURM_NPROCS": "4"}, [2, 2], "CPU", ["wn005", "wn006"]),
    "torchrun inside": (
        FOUR | {"SLURM_TASKS_PER_NODE": "1(x4)", "SLURM_GPUS_PER_NODE": "a100:8", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"},
        [4] * 4,
        "A100",
        ["node7", "node8", "node66", "node70"],
    ),
    "torchrun inside, on some hosts": (
        FOUR | {"SLURM_TASKS_PER_NODE": "1(x4)", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"},
        [2, 2],
        "CPU",
        [],
    ),
    "a script's own WORLD_SIZE": (FOUR | {"SLURM_TASKS_PER_NODE": "2(x4)", "WORLD_SIZE": "8", "RANK": "0"}, [2] * 4, "CPU", None),
}


@pytest.mark.parametrize(("environ", "devices", "name", "hosts"), SLURM.values(), ids=SLURM)
def test_slurm(environ, devices, name, hosts):
    topology = detect_topology(environ)
    assert list(topology.member_counts(0)) == devices
    assert topology.world == sum(devices)
    assert topology.levels[1].size == len(devices)
    assert topology.device == device(name)
    if hosts is not None:
        assert list(topology.hosts) == hosts


@pytest.mark.parametrize(
    ("environ", "field"),
    [
        ({"SLURM_NNODES": "two"}, "SLURM_NNODES"),
        ({"SLURM_NNODES": "0"}, "SLURM_NNODES"),
        ({"SLURM_NNODES": "²"}, "SLURM_NNODES"),
        (FOUR | {"SLURM_JOB_NUM_NODES": "3"}, "SLURM_JOB_NUM_NODES"),
        (FOUR | {"SLURM_JOB_NODELIST": "node[7-"}, "SLURM_JOB_NODELIST"),
        (FOUR | {"SLURM_TASKS_PER_NODE": "4(x2),3"}, "SLURM_TASKS_PER_NODE"),
        (FOUR | {"SLURM_TASKS_PER_NODE": "4x2"}, "SLURM_TASKS_PER_NODE"),
        (FOUR | {"SLURM_TASKS_PER_NODE": "0(x4)"}, "SLURM_TASKS_PER_NODE"),
        (FOUR | {"SLURM_GPUS_PER_NODE": "a100"}, "SLURM_GPUS_PER_NODE"),
        (FOUR | {"SLURM_GPUS_PER_NODE": "a100:eight"}, "SLURM_GPUS_PER_NODE"),
        (FOUR | {"SLURM_GPUS_PER_NODE": "0"}, "SLURM_GPUS_PER_NODE"),
        (FOUR | {"SLURM_GPUS_PER_NODE": "a100:4,h100:4"}, "SLURM_GPUS_PER_NODE"),
        ({"SLURM_NNODES": "3", "SLURM_GPUS": "8"}, "SLURM_GPUS"),
        ({"SLURM_NNODES": "3", "SLURM_NTASKS": "8"}, "SLURM_NTASKS"),
        ({"WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE"),
        ({"WORLD_SIZE": "eight", "LOCAL_WORLD_SIZE": "4"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE"),
        ({"WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "3"}, "WORLD_SIZE"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(environ, field):
    with pytest.raises(InputError) as caught:
        detect_topology(environ)
    assert caught.value.field == field


NAMES = [
    *("SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_TASKS_PER_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS"),
    *("SLURM_NTASKS", "SLURM_GPUS_PER_TASK", "SLURM_STEP_NODELIST", "SLURM_TOPOLOGY_ADDR", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
]
VALUES = st.one_of(
    st.sampled_from(["2", "4(x2),3", "a100:8", "n[1-3]", "8(x2)", "0", "1"]), st.text("0123(x),:[]-an. ²", max_size=8)
)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6))
@settings(max_examples=150, deadline=None)
def test_any_variables_are_read_or_refused(environ):
    try:
        topology = detect_topology(environ)
    except InputError:
        return
    assert topology.world >= 1
    assert sum(topology.member_counts(0)) == topology.world


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_nodes_are_read_or_refused(data):
    """Nodes and HyperNodes of which something is something else."""
    odd = st.sampled_from([None, 3, "x", [], {}, [3], {"name": 3}, {"x": None}, ""])
    nodes = [node(f"n{i}", 8, {"rack": "r"}) for i in range(2)]
    switches = [hypernode("s0", 1, member("Node", regexMatch={"pattern": "n"}))]
    target = data.draw(st.sampled_from([nodes[0], switches[0], switches[0]["spec"], switches[0]["spec"]["members"][0]]))
    inner = data.draw(st.sampled_from([target, *(value for value in target.values() if isinstance(value, dict))]))
    inner[data.draw(st.sampled_from([*inner, "x"]))] = data.draw(odd)
    try:
        topology = detect_topology({}, kubernetes={"items": nodes}, hypernodes=switches)
    except InputError:
        return
    assert topology.world in (8, 9, 16)


def test_an_unknown_gpu_keeps_its_name(caplog):
    topology = detect_topology({"SLURM_NNODES": "2", "SLURM_GPUS_PER_NODE": "v100:4"})
    assert (topology.world, topology.device.name) == (8, "v100")
    assert "v100" in caplog.text
    assert detect_topology({"SLURM_NNODES": "2", "SLURM_GPUS_PER_NODE": "4"}, device="H100").device == device("H100")


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}, "8xCPU_2nodes"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "4xCPU"),
        ({"WORLD_SIZE": "1"}, "1xCPU"),
        ({"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "2xCPU_3nodes"),
        ({}, "1xCPU"),
    ],
)
def test_launchers(environ, text):
    assert str(detect_topology(environ)) == text


@pytest.mark.parametrize(
    ("address", "pattern", "path"),
    [
        ("root.CELL1.leaf1.node386", "switch.switch.switch.node", ("root", "CELL1", "leaf1")),
        ("root.leaf1.node386.dc.example", "switch.switch.node", ("root", "leaf1")),
        ("node386", "node", ()),
        ("block1.node7", "block.node", ("block1",)),
        ("spine[1-2].leaf3.node7", "switch.switch.node", ("spine[1-2]", "leaf3")),
        ("leaf3.node7.dc", "", ("leaf3",)),
        ("node7", "switch.node", ()),
        ("", "switch.node", ()),
    ],
)
def test_switches_above_a_node(address, pattern, path):
    environ = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern, "SLURMD_NODENAME": "node7.dc"}
    assert switch_path(environ) == path


def test_the_ranks_switches_give_racks():
    where = {7: "s1", 8: "s0", 66: "s0", 70: "s1"}
    identities = [
        Identity(f"node{n}", f"node{n}", ("root", leaf), "NVIDIA A100-SXM4-80GB") for n, leaf in where.items() for _ in (0, 1)
    ]
    topology = detect_topology({}, identities=identities)
    assert str(topology) == "2xA100_2nodes_2racks"
    assert topology.hosts == ("node7", "node70", "node8", "node66")


def test_slurm_topology_file_gives_racks():
    text = """
    # leaf switches
    SwitchName=s0 Level=0 LinkSpeed=1 Nodes=node[7-8]
    SwitchName=s1 Level=0 LinkSpeed=1 Nodes=node[66,70]
    SwitchName=s2 Level=1 LinkSpeed=1 Nodes=node[7-8,66,70] Switches=s[0-1]
    """
    racks = racks_from_switches(text)
    assert racks == {"node7": ("s2", "s0"), "node8": ("s2", "s0"), "node66": ("s2", "s1"), "node70": ("s2", "s1")}
    topology = detect_topology(FOUR | {"SLURM_GPUS_PER_NODE": "h100:8"}, racks=racks)
    assert str(topology) == "8xH100_2nodes_2racks"
    for wrong in (
        "NodeName=x",
        "SwitchName=a Switches=b\nSwitchName=b Switches=a\nSwitchName=b Nodes=n1",
        "SwitchName=a Nodes=n[1",
    ):
        with pytest.raises(InputError, match="switches"):
            racks_from_switches(wrong)
    with pytest.raises(InputError, match="node70"):
        detect_topology(FOUR, racks={"node7": "a", "node8": "a", "node66": "b"})


def test_a_list_of_hosts_in_rank_order():
    topology = detect_topology({}, hosts=["b2", "b10", "b2", "b10", "b9", "b9"], device="H200")
    assert str(topology) == "2xH200_3nodes"
    assert topology.hosts == ("b2", "b9", "b10")
    ragged = detect_topology({}, hosts=["a", "a", "a", "b"], racks={"a": "x", "b": "y"})
    assert ragged.levels[0].counts == (3, 1)
    assert len(ragged.levels) == 2


def node(name: str, gpus: int, labels: dict[str, str]) -> dict:
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}},
    }


def test_kubernetes_labels():
    rows = [("w1", "a", "r1"), ("w2", "a", "r1"), ("w10", "a", "r2"), ("w11", "a", "r2"), ("w3", "b", "r1"), ("w4", "b", "r1")]
    same = {"topology.kubernetes.io/region": "eu", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    items = [
        node(name, 8, same | {"topology.kubernetes.io/zone": zone, "network.topology.nvidia.com/leaf": rack})
        for name, zone, rack in rows
    ]
    listed = json.dumps({"kind": "List", "items": [*items, node("control", 0, {})]})
    topology = detect_topology({}, kubernetes=listed)
    assert (topology.device.name, topology.world) == ("H100", 48)
    assert topology.hosts == ("w1", "w2", "w10", "w11", "w3", "w4")
    assert [(level.member, level.size, level.counts) for level in topology.levels] == [
        ("device", 8, None),
        ("node", 2, None),
        ("rack", 2, (2, 1)),
        ("zone", 2, None),
    ]
    assert [level.trusted for level in topology.levels] == [True, True, True, False]


def test_kubernetes_labels_as_a_table_and_with_ranks():
    labels = {f"w{n}": {"topology.kubernetes.io/zone": "ab"[n % 2], "own/rack": str(n % 2)} for n in range(4)}
    assert str(detect_topology({}, kubernetes=labels, device="H100")) == "1xH100_2nodes_2zones"
    own = detect_topology({}, kubernetes=labels, labels=["own/rack"], hosts=["w3", "w1", "w0", "w2"] * 2)
    assert own.hosts == ("w0", "w2", "w1", "w3")
    assert [level.member for level in own.levels] == ["device", "node", "rack"]
    with pytest.raises(InputError, match="other/rack"):
        detect_topology({}, kubernetes=labels, labels=["other/rack"])
    with pytest.raises(InputError, match="w9"):
        detect_topology({}, kubernetes=labels, hosts=["w9"])
    launched = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}
    assert detect_topology(launched, kubernetes=labels).world == 8


def hypernode(name: str, tier: int, *members: dict) -> dict:
    return {"kind": "HyperNode", "metadata": {"name": name}, "spec": {"tier": tier, "members": list(members)}}


def member(kind: str, **selector: object) -> dict:
    return {"type": kind, "selector": selector}


def test_volcano_hypernodes():
    nodes = {f"node-{n}": {"switch": "s2"} if n in (4, 5) else {} for n in range(6)}
    hypernodes = [
        hypernode("s0", 1, member("Node", exactMatch={"name": "node-0"}), member("Node", exactMatch={"name": "node-5x"}),
                  member("Node", exactMatch={"name": "node-3"})),
        hypernode("s1", 1, member("Node", regexMatch={"pattern": "node-[12]"})),
        hypernode("s2", 1, member("Node", labelMatch={"matchLabels": {"switch": "s2"}})),
        hypernode("s4", 2, member("HyperNode", exactMatch={"name": "s0"}), member("HyperNode", exactMatch={"name": "s1"})),
        hypernode("s5", 2, member("HyperNode", exactMatch={"name": "s2"})),
        hypernode("s6", 3, member("HyperNode", regexMatch={"pattern": "s[45]"})),
    ]  # fmt: skip
    topology = detect_topology({}, kubernetes=nodes, hypernodes=json.dumps({"items": hypernodes}), device="A100")
    assert topology.hosts == ("node-0", "node-3", "node-1", "node-2", "node-4", "node-5")
    assert [(level.member, level.counts or level.size) for level in topology.levels[1:]] == [
        ("node", 2),
        ("rack", (2, 1)),
        ("pod", 2),
    ]
    for wrong in (
        [hypernode("a", 1, member("Pod"))],
        [hypernode("a", 1, member("Node"))],
        [hypernode("a", 1, member("Node", regexMatch={"pattern": "("}))],
        [hypernode(n, 1, member("Node", exactMatch={"name": "node-0"})) for n in "ab"],
        [hypernode("a", 1, member("Node", exactMatch={"name": "node-0"}), member("HyperNode", exactMatch={"name": "a"}))],
        [{"metadata": {}}],
        "{",
    ):
        with pytest.raises(InputError, match="hypernodes"):
            detect_topology({}, kubernetes=nodes, hypernodes=wrong)


@pytest.mark.parametrize(
    "given", ["", "{", "[]", "3", 3, [3], {"items": [{}]}, [{"metadata": {"name": 3}}], {"a": 3}, "[" * 99999]
)
def test_what_is_no_list_of_nodes_is_refused(given):
    with pytest.raises(InputError, match="kubernetes"):
        detect_topology({}, kubernetes=given)


def test_devices_of_several_types_are_refused():
    mixed = [Identity(str(n), str(n), (), name) for n, name in enumerate(["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"])]
    with pytest.raises(InputError, match="one type"):
        detect_topology({}, identities=mixed)
    assert detect_topology({}, identities=mixed, device="A100").world == 2


def test_containers_and_machines_of_one_name_are_told_apart():
    twins = [Identity(machine, "worker") for machine in ("worker/boot1", "worker/boot2", "worker/boot1", "worker/boot2")]
    topology = detect_topology({}, identities=twins)
    assert (str(topology), topology.hosts) == ("2xCPU_2nodes", ("worker", "worker~2"))


def test_this_machine_alone(monkeypatch):
    """Without a launcher, in a process that has loaded torch but not initialised torch.distributed."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMPI"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NODE_NAME", "here")
    topology = detect_topology()
    assert topology.hosts == ("here",)
    assert topology.world == max(1, torch.accelerator.device_count())
    assert (topology.device == device("CPU")) == (not torch.accelerator.is_available())
    monkeypatch.setenv("SLURM_NNODES", "2")
    assert detect_topology().levels[1].size == 2


@pytest.mark.distributed
def test_ranks_tell_where_they_run(tmp_path):
    """Four gloo ranks with made-up machines: interleaved, ragged, in racks; groups made from the repaired order really add up."""
    script = str(Path(__file__).with_name("ranks_tell.py"))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, script, str(tmp_path)], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text("utf-8")) for rank in range(4)]
    assert results == [results[0]] * 4
    found = {name: (text, hosts, order, sums) for name, text, hosts, order, sums in results[0]}
    assert found["interleaved"] == ("2xCPU_2nodes", ["node7", "node66"], [0, 2, 1, 3], [2, 4, 2, 4])
    assert found["ragged"] == ("3xCPU_1node+1xCPU_1node", ["node7", "node66"], [1, 2, 3, 0], [0, 6, 6, 6])
    assert found["in order"] == ("2xCPU_2nodes", ["a", "b"], [0, 1, 2, 3], [1, 1, 5, 5])
    assert found["racks"] == ("1xCPU_2nodes_2racks", ["n1", "n10", "n2", "n9"], [0, 2, 1, 3], [0, 1, 2, 3])
