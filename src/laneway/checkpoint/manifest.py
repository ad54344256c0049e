"""The manifest: what a complete checkpoint consists of. It is written last; a folder without a valid one is no checkpoint.

It holds size and SHA-256 of every file, and a SHA-256 of itself, so that a cut or a flipped bit anywhere, in the manifest too,
is seen. The checksums find damage, not malice: who can write the files can write the manifest.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from laneway.core import LanewayError

NAME = "manifest.json"
FORMAT = 1


class TornError(LanewayError):
    """A checkpoint that is incomplete or damaged; the message says in what."""


@dataclass(frozen=True)
class Manifest:
    """What one checkpoint consists of.

    Args:
        step: optimizer step after which it was saved.
        order: 1 for the first save of a run, then one more with each; tells the newest also where a run went back to an
            earlier step.
        time: seconds since 1970.
        world_size: number of ranks that saved it.
        files: name -> {"size": bytes, "sha256": hexadecimal digest}.
        format: version of the layout.
    """

    step: int
    order: int
    time: float
    world_size: int
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    format: int = FORMAT

    def render(self) -> bytes:
        """The file's bytes: the same for the same content, so that reading can compare byte for byte."""
        body = asdict(self)
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return json.dumps({"sha256": digest, **body}, indent=1, sort_keys=True).encode() + b"\n"


def describe(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of one file. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises TornError where it is missing, damaged or of a later format."""
    try:
        data = (folder / NAME).read_bytes()
    except FileNotFoundError as error:
        raise TornError(f"it has no {NAME}") from error
    except OSError as error:
        raise TornError(f"{NAME} cannot be read ({error.strerror})") from error
    try:
        fields = json.loads(data)
        fields.pop("sha256")
        if fields["format"] > FORMAT:
            raise TornError(f"it has format {fields['format']}, made by a later version; this version reads up to {FORMAT}")
        manifest = Manifest(**fields)
        intact = manifest.render() == data
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TornError(f"{NAME} is cut or damaged") from error
    if not intact:
        raise TornError(f"{NAME} does not match its own checksum")
    return manifest


def verify(folder: Path, step: int) -> Manifest:
    """Read every byte of a checkpoint and return its manifest. Raises TornError, naming the first file that is wrong."""
    manifest = check_sizes(folder, step)
    for name, expected in manifest.files.items():
        try:
            found = describe(folder / name)
        except OSError as error:
            raise TornError(f"{name} cannot be read ({error.strerror})") from error
        if found != expected:
            raise TornError(f"{name} does not match its checksum")
    return manifest


def check_sizes(folder: Path, step: int) -> Manifest:
    """The quick half of ``verify``: the manifest is intact and every file is there with its size. Raises TornError."""
    manifest = read(folder)
    if manifest.step != step:
        raise TornError(f"{NAME} is that of step {manifest.step}")
    for name, expected in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise TornError(f"{name} is missing") from error
        if size != expected["size"]:
            raise TornError(f"{name} has {size} of {expected['size']} bytes")
    return manifest
