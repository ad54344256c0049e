"""The runs whose losses are written down, and the machine they were written down on.

    python tests/golden/golden.py --record

writes ``losses.json`` anew. Do that only for a change that is meant to change the arithmetic, and say so in the commit.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from laneway.data.text import TextDataConfig
from laneway.models.gpt import GPTConfig
from laneway.rundir import RunDirectory
from laneway.train.config import OptimizerConfig, TrainConfig
from laneway.train.environment import cpu_model
from laneway.train.loop import train

FILE = Path(__file__).with_name("losses.json")
TEXT = Path(__file__).with_name("text.txt")
RESIDUALS = ("residual", "hc", "mhc")


def config(residual: str, cache: str) -> TrainConfig:
    """Ten steps, long enough for every parameter to have moved."""
    return TrainConfig(
        model=GPTConfig(context=32, layers=3, heads=2, dim=32, streams=4, residual=residual),
        data=TextDataConfig(path=str(TEXT), cache=cache, validation_fraction=0.2),
        optimizer=OptimizerConfig(lr=1e-2, warmup=0.2),
        steps=10,
        batch_size=8,
        micro_batch_size=4,
        seed=11,
        device="cpu",
        validate_every=0,
        validation_batches=2,
        checkpoint_every=0,
        probe_every=5,
        sample_tokens=0,
    )


def fingerprint() -> dict[str, str]:
    """What decides the bits of a sum: the processor, the instructions in use, the build of torch."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"cpu": cpu_model(), "revision": cpu_revision(), "capability": capability, "torch": torch.__version__}


def cpu_revision() -> str:
    """Family, model and stepping: a virtual machine's processor often has a general name only."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").split("\n\n")[0].splitlines() if info.is_file() else []
    pairs = [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]
    return " ".join(value for key, value in pairs if key in ("cpu family", "model", "stepping"))


def losses(residual: str, folder: Path) -> list[float]:
    """The ten training losses and the validation loss, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = train(config(residual, str(folder / "cache")), out=folder / residual, console=None)
    finally:
        torch.set_num_threads(threads)
    assert result.val_loss is not None
    return [row["loss"] for row in RunDirectory(folder / residual).read_metrics()] + [result.val_loss]


def record() -> dict[str, Any]:
    """Run everything and write the file."""
    with tempfile.TemporaryDirectory() as folder:
        written = {"machine": fingerprint(), "losses": {name: losses(name, Path(folder)) for name in RESIDUALS}}
    FILE.write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    return written


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit("usage: golden.py --record")
    print(json.dumps(record(), indent=1))
