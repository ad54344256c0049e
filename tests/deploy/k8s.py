"""The part of the Kubernetes API that our manifests use, by hand: fields, kinds, what is required, and what must agree.

Field names and rules: the API reference of Kubernetes 1.29 (core/v1, batch/v1). A field that is not listed here is refused, so
a new one is looked up once and added.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(rf"{LABEL.pattern}(\.{LABEL.pattern})*")
KEY = re.compile(rf"({SUBDOMAIN.pattern}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_.-][A-Za-z0-9_.-]*")
QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
SCALE = {None: 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    f"{letter}i": 1024.0**power for power, letter in enumerate("KMGT", start=1)
}


def quantity(text: Any) -> float:
    """A Kubernetes quantity as a number; ValueError where it is none."""
    found = QUANTITY.fullmatch(str(text))
    if found is None or isinstance(text, bool):
        raise ValueError(f"{text!r} is no quantity")
    return float(found[1]) * SCALE[found[2]]


def is_quantity(value: Any) -> bool:
    try:
        return quantity(value) > 0
    except ValueError:
        return False


def text(value: Any) -> bool:
    return isinstance(value, str)


def count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 63 and LABEL.fullmatch(value) is not None


def path(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("/") and ":" not in value


def one_of(*options: str) -> Callable[[Any], bool]:
    return lambda value: value in options


def pairs(value: Any) -> bool:
    return isinstance(value, dict) and all(KEY.fullmatch(str(key)) and isinstance(item, str) for key, item in value.items())


def amounts(value: Any) -> bool:
    return isinstance(value, dict) and all(KEY.fullmatch(str(key)) and is_quantity(item) for key, item in value.items())


# A schema is a check of a leaf, a list with the schema of its items, or a dict of fields; a field with ! is required.
METADATA = {"name!": name, "labels": pairs, "annotations": pairs}
RESOURCES = {"requests": amounts, "limits": amounts}
CLAIM = {
    "accessModes!": [one_of("ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod", "ReadOnlyMany")],
    "storageClassName": text,
    "resources!": {"requests!": amounts},
}
CONTAINER = {
    "name!": name,
    "image!": text,
    "command": [text],
    "args": [text],
    "env": [{"name!": lambda value: text(value) and VARIABLE.fullmatch(value), "value!": text}],
    "resources": RESOURCES,
    "securityContext": {"allowPrivilegeEscalation": flag, "capabilities": {"drop": [text]}},
    "volumeMounts": [{"name!": name, "mountPath!": path, "readOnly": flag}],
}
VOLUME = {
    "name!": name,
    "emptyDir": {"medium": one_of("Memory"), "sizeLimit": is_quantity},
    "persistentVolumeClaim": {"claimName!": name},
    "ephemeral": {"volumeClaimTemplate!": {"spec!": CLAIM}},
}
POD = {
    "restartPolicy": one_of("Always", "OnFailure", "Never"),
    "terminationGracePeriodSeconds": count,
    "securityContext": {"runAsNonRoot": flag, "runAsUser": count, "runAsGroup": count, "fsGroup": count},
    "containers!": [CONTAINER],
    "volumes": [VOLUME],
}
JOB = {
    "completions": count,
    "parallelism": count,
    "backoffLimit": count,
    "podReplacementPolicy": one_of("Failed", "TerminatingOrFailed"),
    "podFailurePolicy": {
        "rules!": [
            {
                "action!": one_of("FailJob", "Ignore", "Count"),
                "onExitCodes": {"containerName": name, "operator!": one_of("In"), "values!": [count]},
                "onPodConditions": [{"type!": text, "status!": one_of("True", "False")}],
            }
        ]
    },
    "template!": {"metadata": {"labels": pairs, "annotations": pairs}, "spec!": POD},
}
KINDS = {("v1", "Pod"): POD, ("v1", "PersistentVolumeClaim"): CLAIM, ("batch/v1", "Job"): JOB}


def problems(manifest: Any) -> list[str]:
    """Everything that an API server would refuse, as far as our manifests go, and volumes or amounts that don't agree."""
    if not isinstance(manifest, dict):
        return ["no mapping"]
    kind = manifest.get("apiVersion"), manifest.get("kind")
    if kind not in KINDS:
        return [f"apiVersion and kind: {kind} is none of {sorted(KINDS)}"]
    found = list(_shape(manifest, {"apiVersion!": text, "kind!": text, "metadata!": METADATA, "spec!": KINDS[kind]}, ""))
    if not found and (pod := pod_spec(manifest)) is not None:
        found += _pod(pod)
        if kind[1] == "Job":
            found += _job(manifest["spec"])
    return found


def pod_spec(manifest: dict[str, Any]) -> dict[str, Any] | None:
    """The pod that a manifest makes, if it makes one."""
    spec = manifest["spec"]
    return {"Pod": spec, "Job": spec.get("template", {}).get("spec")}.get(manifest["kind"])


def _shape(value: Any, schema: Any, at: str) -> Iterator[str]:
    if callable(schema):
        if not schema(value):
            yield f"{at}: {value!r}"
    elif isinstance(schema, list):
        if not isinstance(value, list) or not value:
            yield f"{at}: no list, or an empty one"
            return
        for index, item in enumerate(value):
            yield from _shape(item, schema[0], f"{at}[{index}]")
    elif not isinstance(value, dict):
        yield f"{at}: no mapping"
    else:
        fields = {key.rstrip("!"): inner for key, inner in schema.items()}
        for key in schema:
            if key.endswith("!") and key[:-1] not in value:
                yield f"{at}.{key[:-1]}: required"
        for key, item in value.items():
            if key not in fields:
                yield f"{at}.{key}: unknown field"
            else:
                yield from _shape(item, fields[key], f"{at}.{key}")


def _pod(pod: dict[str, Any]) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    if len(volumes) != len(pod.get("volumes", [])):
        yield "volumes: a name twice"
    for volume in volumes.values():
        if len(volume) != 2:
            yield f"volume {volume['name']}: needs exactly one source"
    for container in pod["containers"]:
        yield from _container(container, volumes)


def _container(container: dict[str, Any], volumes: dict[str, Any]) -> Iterator[str]:
    mounts, env = container.get("volumeMounts", []), [entry["name"] for entry in container.get("env", [])]
    if len(set(env)) != len(env):
        yield "env: a variable twice"
    if len({mount["mountPath"] for mount in mounts}) != len(mounts):
        yield "volumeMounts: a path twice"
    for mount in mounts:
        if mount["name"] not in volumes:
            yield f"volumeMounts: no volume {mount['name']}"
    for unused in set(volumes) - {mount["name"] for mount in mounts}:
        yield f"volumes: {unused} is not mounted"
    resources = container.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for resource, wanted in requests.items():
        if resource in limits and quantity(limits[resource]) < quantity(wanted):
            yield f"resources: limit of {resource} below its request"
    for resource in requests.keys() | limits.keys():
        if "/" in resource and (requests.get(resource, limits.get(resource)) != limits.get(resource)):
            yield f"resources: {resource} must have a limit, and request no other amount"


def _job(spec: dict[str, Any]) -> Iterator[str]:
    pod, policy = spec["template"]["spec"], spec.get("podFailurePolicy")
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        yield "restartPolicy: a Job needs Never or OnFailure"
    if policy and pod["restartPolicy"] != "Never":
        yield "podFailurePolicy: needs restartPolicy Never"
    if policy and spec.get("podReplacementPolicy", "Failed") != "Failed":
        yield "podReplacementPolicy: must be Failed beside a podFailurePolicy"
    for rule in policy["rules"] if policy else []:
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            yield "podFailurePolicy: a rule needs exit codes or conditions"
        codes = rule.get("onExitCodes", {})
        if codes and codes.get("containerName") not in [container["name"] for container in pod["containers"]]:
            yield "podFailurePolicy: no such container"
        if codes and 0 in codes["values"]:
            yield "podFailurePolicy: 0 is no failure"
