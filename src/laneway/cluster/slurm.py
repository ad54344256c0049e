"""Hosts, devices and switches from the variables that Slurm really sets.

Read are, of the job or of the step that runs: SLURM_JOB_NODELIST (SLURM_NODELIST, SLURM_STEP_NODELIST), SLURM_NNODES
(SLURM_JOB_NUM_NODES, SLURM_STEP_NUM_NODES), SLURM_TASKS_PER_NODE (SLURM_STEP_TASKS_PER_NODE, SLURM_NTASKS_PER_NODE), SLURM_NTASKS
(SLURM_NPROCS), SLURM_GPUS_PER_NODE, SLURM_GPUS_PER_TASK, SLURM_GPUS, SLURM_GPUS_ON_NODE, SLURM_JOB_GPUS, SLURM_TOPOLOGY_ADDR with
its SLURM_TOPOLOGY_ADDR_PATTERN. See the sections on output variables of sbatch(1) and srun(1).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from laneway.cluster.hostlist import expand_hosts
from laneway.cluster.hosts import Host
from laneway.core import InputError

__all__ = ["is_slurm", "slurm_device", "slurm_hosts", "switch_path"]

_log = logging.getLogger("laneway")
LARGEST = 1_000_000
Environ = Mapping[str, str]

_NODES = (("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"), ("SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"))
_GRES = "a number of GPUs, with their type or without: 8, a100:8, gpu:a100:8"


def is_slurm(environ: Environ) -> bool:
    """Whether these are the variables of a Slurm job that says how many nodes or tasks it has."""
    said = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    return any(environ.get(name) for name in (*said, "SLURM_TASKS_PER_NODE", "SLURM_NTASKS"))


def slurm_hosts(environ: Environ) -> tuple[list[Host], bool]:
    """The job's hosts with the devices that its ranks use on each, and whether their names are real.

    One rank is taken to use one device. Where a node has one task (which then starts a rank for each of its devices, as torchrun
    does), all devices that the job got there count.

    Raises:
        InputError: a variable that can't be read, or that contradicts another; it is named.
    """
    names = _names(environ)
    tasks = _tasks(environ, None if names is None else len(names))
    count = len(names) if names is not None else _count(environ) or (len(tasks) if tasks else 1)
    devices = _devices(environ, count, tasks if tasks is not None else _tasks_alike(environ, count))
    if len(devices) != count:
        raise InputError("SLURM_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE"), f"tasks of {count} nodes")
    return [Host(name, each) for name, each in zip(names or _numbered(count), devices, strict=True)], names is not None


def _numbered(count: int) -> list[str]:
    return [f"node{index}" for index in range(count)]


def _names(environ: Environ) -> list[str] | None:
    for names, number in (*_NODES, ("SLURM_NODELIST", "SLURM_NNODES")):
        if environ.get(names):
            found = list(dict.fromkeys(expand_hosts(environ[names], names)))
            if environ.get(number) and _integer(environ, number) != len(found):
                raise InputError(number, environ[number], f"{len(found)}, the nodes in {names}")
            return found
    return None


def _count(environ: Environ) -> int | None:
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        if environ.get(name):
            return _integer(environ, name)
    return None


def _integer(environ: Environ, name: str) -> int:
    text = environ[name].strip()
    if not re.fullmatch(r"[0-9]{1,7}", text, re.ASCII) or not 1 <= int(text) <= LARGEST:
        raise InputError(name, environ[name], f"an integer from 1 to {LARGEST}")
    return int(text)


def _tasks(environ: Environ, nodes: int | None) -> list[int] | None:
    """Tasks of each node: "4(x2),3" are 4, 4 and 3."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if not environ.get(name):
            continue
        tasks: list[int] = []
        for part in environ[name].split(","):
            found = re.fullmatch(r"\s*([0-9]{1,6})(?:\(x([0-9]{1,6})\))?\s*", part, re.ASCII)
            if found is None or int(found[1]) < 1 or len(tasks) > LARGEST:
                raise InputError(name, environ[name], "tasks of each node, such as 4(x2),3")
            tasks += [int(found[1])] * int(found[2] or 1)
        if nodes is None or len(tasks) == nodes or name == "SLURM_TASKS_PER_NODE":
            return tasks
    return None


def _tasks_alike(environ: Environ, nodes: int) -> list[int] | None:
    if environ.get("SLURM_NTASKS_PER_NODE"):
        return [_integer(environ, "SLURM_NTASKS_PER_NODE")] * nodes
    for name in ("SLURM_NTASKS", "SLURM_NPROCS"):
        if environ.get(name):
            total = _integer(environ, name)
            if total % nodes:
                raise InputError(name, environ[name], f"a multiple of {nodes} nodes, or SLURM_TASKS_PER_NODE")
            return [total // nodes] * nodes
    return None


def _devices(environ: Environ, nodes: int, tasks: list[int] | None) -> list[int]:
    if environ.get("SLURM_GPUS_PER_TASK") and tasks:
        each = _gres(environ, "SLURM_GPUS_PER_TASK")[0]
        return [count * each for count in tasks]
    gpus = _gpus_of_a_node(environ, nodes)
    if gpus is None:
        return tasks or [1] * nodes
    if tasks is not None and max(tasks) > 1:
        return [min(count, gpus) for count in tasks]
    return [gpus] * nodes


def _gpus_of_a_node(environ: Environ, nodes: int) -> int | None:
    if environ.get("SLURM_GPUS_PER_NODE"):
        return _gres(environ, "SLURM_GPUS_PER_NODE")[0]
    if environ.get("SLURM_GPUS_ON_NODE"):
        return _gres(environ, "SLURM_GPUS_ON_NODE")[0]
    if environ.get("SLURM_GPUS"):
        total = _gres(environ, "SLURM_GPUS")[0]
        if total % nodes:
            raise InputError("SLURM_GPUS", environ["SLURM_GPUS"], f"a multiple of {nodes} nodes, or SLURM_TASKS_PER_NODE")
        return total // nodes
    if environ.get("SLURM_JOB_GPUS"):
        return len(environ["SLURM_JOB_GPUS"].split(","))
    return None


def slurm_device(environ: Environ) -> str | None:
    """The type of the job's GPUs as Slurm calls it, "a100"; "" where it names none; None for a job without GPUs."""
    found = None
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS", "SLURM_GPUS_ON_NODE"):
        if environ.get(name):
            found = found or _gres(environ, name)[1]
    return "" if found is None and environ.get("SLURM_JOB_GPUS") else found


def _gres(environ: Environ, name: str) -> tuple[int, str]:
    """Number and type of a request: "8", "a100:8", "gpu:a100:8(S:0-1)", "gres/gpu:8", "a100:4,a100:4"."""
    total, kinds = 0, set()
    for part in re.sub(r"\([^)]*\)", "", environ[name]).split(","):
        words = part.strip().removeprefix("gres/").replace("=", ":").split(":")
        words = words[1:] if words[0].lower() == "gpu" and len(words) > 1 else words
        kind, number = (words[0], words[1]) if len(words) == 2 else ("", words[0])
        if len(words) > 2 or not re.fullmatch(r"[0-9]{1,6}", number, re.ASCII):
            raise InputError(name, environ[name], _GRES)
        total += int(number)
        kinds |= {kind} - {""}
    if total < 1:
        raise InputError(name, environ[name], _GRES)
    if len(kinds) > 1:
        raise InputError(name, environ[name], "GPUs of one type")
    return total, kinds.pop() if kinds else ""


def switch_path(environ: Environ) -> tuple[str, ...]:
    """The switches above this node, outermost first, from SLURM_TOPOLOGY_ADDR: root.cell1.leaf7.node12 with its pattern
    switch.switch.switch.node. Without a pattern, the node's own name says where the switches end.
    """  # fmt: skip
    address, pattern = environ.get("SLURM_TOPOLOGY_ADDR", ""), environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    if not address:
        return ()
    kinds = pattern.split(".") if pattern else []
    if kinds and kinds[-1] == "node":
        words = address.split(".", len(kinds) - 1)  # a node's name may hold dots
        if len(words) == len(kinds):
            return tuple(words[:-1])
        _log.warning("laneway: SLURM_TOPOLOGY_ADDR=%s does not fit its pattern %s; racks are left out", address, pattern)
        return ()
    own = environ.get("SLURMD_NODENAME", "")
    if own and address.endswith(f".{own}"):
        return tuple(address.removesuffix(f".{own}").split("."))
    return tuple(address.split(".")[:-1]) if own != address else ()
