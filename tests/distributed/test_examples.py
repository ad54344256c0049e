"""The scripts in ``examples/`` do what they say, and pages show them as they are."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from launch import torchrun
from netlab import assert_bytes, require

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPT = str(EXAMPLES / "ddp_levels.py")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a script of that folder is started."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])


def losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", said, re.MULTILINE)]


def sent(said: str) -> dict[str, int]:
    return {level: int(nbytes) for level, nbytes in re.findall(r"^sent over (\w+): (\d+) bytes$", said, re.MULTILINE)}


def alone(world: int, steps: int) -> list[float]:
    """The curve of one process that sees every rank's batch."""
    import ddp_levels

    model = ddp_levels.make_model()
    optimizer = ddp_levels.make_optimizer(model)
    found = []
    for step in range(1, steps + 1):
        batches = [ddp_levels.make_batch(rank, step) for rank in range(world)]
        loss = ddp_levels.loss_of(model, (torch.cat([a for a, _ in batches]), torch.cat([b for _, b in batches])))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.distributed
def test_ddp_over_two_hosts_trains_as_one_process(tmp_path):
    said = torchrun(2, SCRIPT, "--topology", "1xCPU_2nodes", "--steps", "4", cwd=tmp_path).stdout
    assert losses(said) == pytest.approx(alone(2, 4), rel=1e-4)
    assert sent(said)["L1"] == 0 < sent(said)["L2"]


@pytest.mark.slow
@pytest.mark.distributed
def test_four_ranks_drop_between_hosts(tmp_path):
    command = [SCRIPT, "--topology", "2xCPU_2nodes", "--steps", "12"]
    exact = torchrun(4, *command, cwd=tmp_path).stdout
    less = torchrun(4, *command, "--wire", "bf16", "--drop", "0.9", cwd=tmp_path).stdout
    assert losses(exact) == pytest.approx(alone(4, 12), rel=1e-3)
    assert losses(less)[-1] < 0.9 * losses(less)[0]
    assert sent(less)["L1"] == sent(exact)["L1"] > 0
    assert sent(less)["L2"] < 0.1 * sent(exact)["L2"]


@pytest.mark.distributed
def test_the_lab_counts_what_an_uplink_carries():
    """Each rack sends half of the vector's sums up and the other half's results: the vector once."""
    require()
    import lab_all_reduce

    counted = lab_all_reduce.main(1 << 18)
    for rack in range(2):
        assert_bytes(counted[f"rack{rack}.up"], 4 << 18)
        assert_bytes(counted[f"rack{rack}.down"], 4 << 18)


@pytest.mark.parametrize(("page", "script"), [("reduction", "ddp_levels"), ("netlab", "lab_all_reduce")])
def test_pages_show_scripts_as_they_are(page, script):
    """Every ``py`` block is lines of the script, one after the other, without their indentation."""
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    whole = [line.strip() for line in (EXAMPLES / f"{script}.py").read_text("utf-8").splitlines() if line.strip()]
    shown = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert shown
    for block in shown:
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        first = whole.index(lines[0])
        assert whole[first : first + len(lines)] == lines
