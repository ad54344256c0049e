"""Four processes on two hosts train the curve of one, gradients going over levels; residuals of dropping outlive them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from launch import torchrun

from laneway.checkpoint import CheckpointStore
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.loop import train
from laneway.train.settings import to_toml

pytestmark = pytest.mark.distributed
SCRIPT = str(Path(__file__).with_name("levels_curves.py"))


@pytest.fixture(scope="module")
def eight(small: TrainConfig) -> TrainConfig:
    return dataclasses.replace(small, batch_size=8)


@pytest.fixture(scope="module")
def curves(eight: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of one process (``one``) and one run for each way of four."""
    folder = tmp_path_factory.mktemp("levels")
    (folder / "c.toml").write_text(to_toml(eight))
    train(eight, out=folder / "one", console=None)
    torchrun(4, SCRIPT, "c.toml", ".", cwd=folder)
    return folder


def column(folder: Path, key: str) -> list[float]:
    return [row[key] for row in RunDirectory(folder).read_metrics() if key in row]


@pytest.mark.parametrize("way", ["ddp", "ddp-auto", "fsdp", "fsdp-hosts"])
@pytest.mark.parametrize("key", ["loss", "grad_norm", "val_loss"])
def test_the_curve_is_that_of_one_process(curves: Path, way: str, key: str) -> None:
    """To rounding; a norm that counted the copies in both hosts would be larger by the root of two."""
    assert column(curves / way, key) == pytest.approx(column(curves / "one", key), rel=2e-5)


@pytest.mark.parametrize("way", ["ddp", "ddp-dropping", "fsdp", "fsdp-hosts"])
def test_the_rows_say_what_went_over_each_level(curves: Path, way: str) -> None:
    for level in ("L1", "L2"):
        sent = column(curves / way, f"sent_bytes_{level}")
        assert len(sent) == 10
        assert 0 < sent[0] < sent[-1]


def test_dropping_sends_less_between_hosts(curves: Path) -> None:
    """Half of the entries in bf16 and a mask: far less than all of them in fp32."""
    sent = {way: column(curves / way, "sent_bytes_L2")[-1] for way in ("ddp", "ddp-dropping")}
    assert sent["ddp-dropping"] < 0.4 * sent["ddp"]
    assert column(curves / "ddp-dropping", "loss") == pytest.approx(column(curves / "one", "loss"), rel=0.1)


def cut(curves: Path, way: str, to: Path) -> Path:
    """A copy of a run as it was right after step 5."""
    shutil.copytree(curves / way, to / way)
    store = CheckpointStore(RunDirectory(to / way))
    for later in [step for step in store.steps() if step > 5]:
        shutil.rmtree(store.folder(later))
    shutil.copy(curves / "c.toml", to)
    return to


def test_what_was_not_sent_outlives_the_processes(curves: Path, tmp_path: Path) -> None:
    """Four ranks go on bit for bit; two hold what all four had not sent, and go on with it."""
    sums = []
    for ranks in (4, 2):
        where = tmp_path / str(ranks)
        where.mkdir()
        torchrun(ranks, SCRIPT, "c.toml", ".", "ddp-dropping", cwd=cut(curves, "ddp-dropping", where))
        sums.append(json.loads((where / "residuals.json").read_text())["sum"])
        losses = column(where / "ddp-dropping", "loss")
        assert len(losses) == 10
        assert (losses == column(curves / "ddp-dropping", "loss")) == (ranks == 4)
    assert sums[0] != 0
    assert sums[1] == pytest.approx(sums[0], rel=1e-9)
