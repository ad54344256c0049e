"""The manifests: valid, in agreement with themselves, and with what the variables in them mean to laneway."""

import copy
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

from k8s import pod_spec, problems, quantity  # noqa: E402

from laneway.cli.train import read_request  # noqa: E402
from laneway.memory.config import VARIABLES, MemoryConfig, from_environment  # noqa: E402
from laneway.sizes import check_host_buffer, parse_bytes  # noqa: E402
from laneway.train.settings import to_toml  # noqa: E402

FOLDER = Path(__file__).parents[2] / "deploy" / "k8s"
FILES = sorted(FOLDER.glob("*.yaml"))
MANIFESTS = {file.name: manifest for file in FILES for manifest in yaml.safe_load_all(file.read_text("utf-8"))}
PODS = {file: manifest for file, manifest in MANIFESTS.items() if pod_spec(manifest) is not None}


def container(manifest: dict) -> dict:
    (only,) = pod_spec(manifest)["containers"]
    return only


def environment(manifest: dict) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(manifest)["env"]}


def volume(manifest: dict, path: str) -> dict:
    """The volume in which ``path`` lies."""
    mount = next(mount for mount in container(manifest)["volumeMounts"] if path.startswith(mount["mountPath"]))
    return next(volume for volume in pod_spec(manifest)["volumes"] if volume["name"] == mount["name"])


def test_the_files_are_these():
    assert [file.name for file in FILES] == ["job-nvme.yaml", "job.yaml", "pod.yaml", "storage.yaml"]
    assert {manifest["kind"] for manifest in MANIFESTS.values()} == {"Job", "Pod", "PersistentVolumeClaim"}
    told = (FOLDER / "README.md").read_text("utf-8")
    assert all(f"`{file.name}`" in told for file in FILES)


@pytest.mark.parametrize("file", MANIFESTS)
def test_a_manifest_is_valid(file):
    assert problems(MANIFESTS[file]) == []


@pytest.mark.parametrize("file", PODS)
def test_variables_are_ones_that_are_read_and_their_values_are_fine(file):
    environ = environment(PODS[file])
    ours = {name for name in environ if name.startswith("MHC_")}
    assert ours <= set(VARIABLES.values())
    assert {"MHC_EVICTION_STRATEGY", "MHC_MAX_SWAP_OPS_PER_SEC", "MHC_MEMORY_BUDGET"} <= ours
    given = from_environment(environ)
    assert len(given) == len(ours)
    assert MemoryConfig(**given).problems() == []
    assert MemoryConfig(**given).on


@pytest.mark.parametrize("file", PODS)
def test_memory_is_asked_for_in_full_and_holds_what_lies_in_it(file):
    manifest = PODS[file]
    resources = container(manifest)["resources"]
    limit = quantity(resources["limits"]["memory"])
    assert quantity(resources["requests"]["memory"]) == limit
    config = MemoryConfig(**from_environment(environment(manifest)))
    shared = volume(manifest, "/dev/shm")["emptyDir"]
    assert shared["medium"] == "Memory"
    held = quantity(shared["sizeLimit"])
    if config.tier == "host":
        held += config.host_buffer_bytes(int(limit))
        device = parse_bytes("annotation", manifest["spec"]["template"]["metadata"]["annotations"]["laneway/device-memory"])
        assert check_host_buffer(limit, config.host_buffer_ratio, device) is None
    if "nvidia.com/gpu" not in resources["limits"]:
        held += config.budget_bytes(int(limit))
    assert held <= 0.9 * limit, "the process itself needs some"


@pytest.mark.parametrize("file", PODS)
def test_the_disk_tier_has_a_volume_of_known_size(file):
    manifest = PODS[file]
    swap = volume(manifest, environment(manifest)["MHC_SWAP_FOLDER"])
    assert "hostPath" not in swap
    limits = container(manifest)["resources"]["limits"]
    if "emptyDir" in swap:
        assert "medium" not in swap["emptyDir"]
        assert quantity(swap["emptyDir"]["sizeLimit"]) < quantity(limits["ephemeral-storage"])
    else:
        spec = swap["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert spec["storageClassName"]
        assert quantity(spec["resources"]["requests"]["storage"]) > quantity(limits["memory"])


@pytest.mark.parametrize("file", PODS)
def test_runs_lie_in_the_claim_that_is_made(file):
    manifest = PODS[file]
    claim = volume(manifest, "/runs/x")["persistentVolumeClaim"]["claimName"]
    assert claim == MANIFESTS["storage.yaml"]["metadata"]["name"]
    assert environment(manifest)["LANEWAY_CACHE"].startswith("/runs/")


def commands(manifest: dict) -> list[list[str]]:
    """Every ``laneway train`` in a container's command, as words."""
    if container(manifest)["command"][0] == "laneway":
        return [container(manifest)["command"]]
    lines = re.findall(r"laneway train[^\n&]*", container(manifest)["args"][0])
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("file", PODS)
def test_commands_are_ones_that_laneway_takes(file, tmp_path):
    found = commands(PODS[file])
    assert len(found) == (1 if file == "pod.yaml" else 2)
    for words in found:
        assert words[:2] == ["laneway", "train"]
        where = tmp_path / "run"
        words = [str(where) if word.startswith(("/runs/", "$RUN")) else word for word in words]
        where.mkdir(exist_ok=True)
        (where / "config.toml").write_text(to_toml(read_request(["tiny"]).settings), "utf-8")
        request = read_request(words[2:])
        assert request.out == where
        assert request.settings.problems() == []


JOBS = [file for file in PODS if PODS[file]["kind"] == "Job"]


@pytest.mark.slow
@pytest.mark.parametrize("file", JOBS[:1])
def test_a_job_that_is_stopped_goes_on_in_the_next_pod(file, tmp_path, text_file):
    """The Job's own script with a real run, made small by flags: SIGTERM saves and ends with 143; then it resumes."""
    assert all(container(PODS[name])["args"] == container(PODS[file])["args"] for name in JOBS)
    flags = f"--steps 60 --batch-size 2 --micro-batch-size 2 --precision fp32 --data.path {text_file} --validate-every 0"
    flags += " --model.dim 16 --model.heads 1 --model.layers 1 --model.context 16 --sample-tokens 0 --model.residual residual"
    laneway = tmp_path / "laneway"
    laneway.write_text(f'#!/bin/sh\nexec {sys.executable} -m laneway "$@" {flags}\n', "utf-8")
    laneway.chmod(0o755)
    run = tmp_path / "runs" / "small"
    environ = os.environ | {
        "RUN": str(run),
        "LANEWAY_CACHE": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    words = [*container(PODS[file])["command"], *container(PODS[file])["args"]]

    first, rows = started(words, environ), run / "metrics" / "rank0.jsonl"
    until = time.monotonic() + 60
    while not (rows.is_file() and rows.stat().st_size) and first.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    told = ended(first)
    assert first.returncode == 143, told
    assert "stopped by SIGTERM" in told
    assert (run / "latest").is_file()

    second = started(words, environ)
    told = ended(second)
    assert second.returncode == 0, told
    assert "resuming in" in told
    assert "after 60 steps" in told


def started(words: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
    """A process in a session of its own, as a container has one."""
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, env=environ, start_new_session=True, **out)


def ended(process: subprocess.Popen[str]) -> str:
    """What it said, once it ended; after a minute and a half it is ended, with what it started."""
    try:
        return process.communicate(timeout=90)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# The check itself


def changed(file: str, *way, value=None) -> dict:
    """A manifest with one place set, or removed where ``value`` is None."""
    manifest = copy.deepcopy(MANIFESTS[file])
    place = manifest
    for part in way[:-1]:
        place = place[part]
    if value is None:
        del place[way[-1]]
    else:
        place[way[-1]] = value
    return manifest


TRAIN = ("spec", "template", "spec", "containers", 0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (changed("job.yaml", "apiVersion", value="v1"), "apiVersion and kind"),
        (changed("job.yaml", "kind", value="Jobs"), "apiVersion and kind"),
        (changed("job.yaml", "metadata", "name"), ".metadata.name: required"),
        (changed("job.yaml", "metadata", "name", value="Laneway_Small"), ".metadata.name: 'Laneway_Small'"),
        (changed("job.yaml", "spec", "template"), ".spec.template: required"),
        (changed("job.yaml", "spec", "template", "spec", "restartPolicy", value="OnFailure"), "needs restartPolicy Never"),
        (changed("job.yaml", "spec", "template", "spec", "restartPolicy", value="Always"), "a Job needs Never or OnFailure"),
        (changed("job.yaml", "spec", "podReplacementPolicy", value="TerminatingOrFailed"), "must be Failed"),
        (changed("job.yaml", *TRAIN, "name", value="other"), "no such container"),
        (changed("job.yaml", *TRAIN, "image"), ".image: required"),
        (changed("job.yaml", *TRAIN, "resource", value={}), ".resource: unknown field"),
        (changed("job.yaml", *TRAIN, "env", 0, "value", value=1), ".env[0].value: 1"),
        (changed("job.yaml", *TRAIN, "env", 0, "name", value="LANEWAY_CACHE"), "a variable twice"),
        (changed("job.yaml", *TRAIN, "resources", "limits", "memory", value="1Gi"), "limit of memory below its request"),
        (changed("job.yaml", *TRAIN, "resources", "limits", "memory", value="1GB"), ".resources.limits"),
        (changed("job.yaml", *TRAIN, "resources", "limits", "nvidia.com/gpu"), "nvidia.com/gpu must have a limit"),
        (changed("job.yaml", *TRAIN, "resources", "limits", "nvidia.com/gpu", value="2"), "request no other amount"),
        (changed("job.yaml", *TRAIN, "volumeMounts", 0, "name", value="run"), "no volume run"),
        (changed("job.yaml", *TRAIN, "volumeMounts", 0, "mountPath", value="runs"), ".mountPath: 'runs'"),
        (changed("job.yaml", *TRAIN, "volumeMounts", 1, "mountPath", value="/runs"), "a path twice"),
        (changed("job.yaml", *TRAIN, "volumeMounts", 2), "volumes: shm is not mounted"),
        (changed("pod.yaml", "spec", "volumes", 1, "hostPath", value={"path": "/mnt"}), ".hostPath: unknown field"),
        (changed("pod.yaml", "spec", "volumes", 1, "emptyDir"), "needs exactly one source"),
        (changed("pod.yaml", "spec", "volumes", 1, "name", value="runs"), "volumes: a name twice"),
        (changed("pod.yaml", "spec", "containers", value=[]), ".spec.containers: no list, or an empty one"),
        (changed("pod.yaml", "spec", "securityContext", "runAsNonRoot", value="true"), ".runAsNonRoot: 'true'"),
        (changed("storage.yaml", "spec", "resources"), ".spec.resources: required"),
        ([], "no mapping"),
    ],
)
def test_what_the_server_would_refuse_is_found(wrong, words):
    found = problems(wrong)
    assert any(words in problem for problem in found), found


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("500m", 0.5), ("2Gi", 2**31), ("2G", 2e9), (3, 3)])
def test_quantities(text, value):
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "1GB", "1 Gi", "-1", None, True, "1gi"])
def test_what_is_no_quantity(text):
    with pytest.raises(ValueError, match="is no quantity"):
        quantity(text)
