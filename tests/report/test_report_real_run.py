"""Runs that the training loop itself wrote: the report shows them and the doctor reads them."""

import json
import random

import pytest
import torch

from laneway.cli import main
from laneway.report import load_runs, render


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two short real runs, with and without streams."""
    base = tmp_path_factory.mktemp("real")
    words = ["stream", "tier", "level", "axis", "site", "mix", "read", "write"]
    choose = random.Random(0)
    (base / "text.txt").write_text(" ".join(choose.choice(words) for _ in range(20_000)), "utf-8")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network only waits for more
    for residual in ("mhc", "residual"):
        flags = {
            "steps": 24, "batch-size": 4, "probe-every": 6, "validate-every": 12, "sample-tokens": 8, "checkpoint-every": 12,
            "model.residual": residual, "model.dim": 32, "model.heads": 2, "model.layers": 2, "model.context": 64,
            "data.path": base / "text.txt", "data.cache": base / "cache",
        }  # fmt: skip
        arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        assert main(["train", "tiny", "--out", str(base / residual), "--json", *arguments]) == 0
    torch.set_num_threads(threads)
    return base / "mhc", base / "residual"


def test_the_report_shows_what_the_loop_wrote(runs):
    mhc, plain = load_runs(runs)
    assert (mhc.state, mhc.final.steps) == ("finished", 24)
    assert all(value is not None for value in mhc.final.as_json().values()), "every figure has a place that the loop writes"
    assert mhc.heat("site_gain_forward").values.shape == (5, 4), "probes at 1, 6, 12, 18, 24; two sites a layer"
    assert mhc.has_streams
    assert not plain.has_streams
    page = render([mhc, plain])
    for caption in ("Composite gain, forward", "Collapse by site", "Forward gain, depth × time", "Peak memory", "Bits per byte"):
        assert caption in page
    assert "residual has no stream figures" in page
    assert 'data-label="mhc: validation"' in page


def test_the_doctor_reads_what_the_loop_wrote(runs, capsys):
    for run in runs:
        assert main(["doctor", str(run), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["rows"] == 24
        # 24 steps are too few for anything but what is plain from the first step on; the machine may be busy.
        assert [f["rule"] for f in told["findings"] if f["rule"] not in ("throughput-drop", "memory-overflow")] == []
