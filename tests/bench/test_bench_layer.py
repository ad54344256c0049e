"""The layer bench measures the right functions, counts bytes, and summarises what it measured."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
from torch._dynamo.utils import counters

from laneway.bench import agreement, layer, peers
from laneway.bench.memory import highest, peak_bytes
from laneway.connections import reference
from laneway.core import InputError

SMALL = layer.LayerOptions(shapes=((32, 8),), dtypes=("fp32",), threads=(1,), compiled=False, seconds=0.0)


@pytest.mark.peers
def test_transformers_adapter_computes_the_papers_function():
    peer = peers.PEERS["transformers"]
    if not peer.present:
        pytest.skip(peer.missing)
    module = peer.make(16, 4)
    peers.fill(module, seed=1)
    x = torch.randn(1, 20, 4, 16)
    fn, base, scale = (p.double() for p in (module.fn, module.base, module.scale))
    want = reference.connection(x.double(), lambda h: h, fn, base, scale, norm_eps=peers.EPS, eps=peers.EPS)
    torch.testing.assert_close(peer.apply(module, x).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.peers
def test_hyper_connections_adapter_runs_forward_and_backward():
    peer = peers.PEERS["hyper_connections"]
    if not peer.present:
        pytest.skip(peer.missing)
    module, x = peer.make(16, 4), torch.randn(1, 20, 4, 16, requires_grad=True)
    y = peer.apply(module, x)
    assert y.shape == x.shape
    y.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_filled_weights_give_logits_of_unit_size():
    site = peers.ours_like_v4(64, 4)
    peers.fill(site, seed=0)
    logits = torch.cat(
        [part.flatten(1) for part in reference.map_logits(torch.randn(500, 4, 64), site.fn, site.base, site.scale)], 1
    )
    assert 0.7 < logits.std() < 1.3


def test_peak_counts_every_byte():
    def work():
        a = torch.empty(1000, dtype=torch.float32)
        b = torch.empty(500, dtype=torch.float64)
        del a
        c = torch.empty(100, dtype=torch.uint8)
        return b, c

    assert peak_bytes(work) == pytest.approx(8000, abs=128)
    assert highest([5, -3, 4, -6]) == 6
    assert highest([]) == 0


def test_memory_of_our_site_is_below_three_times_the_streams():
    """Counted, not timed: what the design promises for both dtypes."""
    for dtype in (torch.float32, torch.bfloat16):
        gy = torch.randn(1, 1024, 4, 512).to(dtype)
        site = peers.ours_like_v4(512, 4)
        step = layer._step(peers.apply_ours, site, gy)
        step()
        assert peak_bytes(step) <= 3 * gy.numel() * gy.element_size(), dtype


def test_rows_of_a_measurement():
    rows = layer.measure(SMALL)
    names = [row["variant"] for row in rows]
    assert names[0] == "laneway"
    assert {"plain_residual", "copy"} <= set(names)
    assert len({tuple(row) for row in rows}) == 1, "one set of columns"
    ours = rows[0]
    assert ours["over_laneway"] == 1.0
    assert ours["rounds"] == 7
    assert ours["wall_ms_q1"] <= ours["wall_ms"] <= ours["wall_ms_q3"]
    copy = rows[names.index("copy")]
    assert copy["over_floor"] == pytest.approx(8 / 42)
    assert copy["peak_bytes"] is None


def test_dtypes_share_a_process_only_where_nothing_is_compiled(monkeypatch):
    started = []
    monkeypatch.setattr(layer, "_in_fresh_process", lambda part, count: started.append((part.shapes, part.dtypes, count)) or [])
    options = replace(SMALL, dtypes=("fp32", "bf16"), threads=(1, 2))
    layer.run(options)
    assert started == [(SMALL.shapes, ("fp32", "bf16"), 1), (SMALL.shapes, ("fp32", "bf16"), 2)]
    started.clear()
    layer.run(replace(options, compiled=True))
    assert [(dtypes, count) for _, dtypes, count in started] == [(("fp32",), 1), (("bf16",), 1), (("fp32",), 2), (("bf16",), 2)]


# Between the two graphs the compiler looks at .grad of what the closure holds, and torch warns of that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.compiler
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")
def test_a_compiled_site_is_two_graphs_and_the_same_function():
    """Before and after the sub-layer; anything that fell back to eager code would be timed under the wrong name."""
    torch.compiler.reset()
    counters.clear()
    site, apply = layer._sites(16, compiled=True)["laneway_compiled"]
    x = torch.randn(1, 24, layer.STREAMS, 16)
    torch.testing.assert_close(apply(site, x), peers.apply_ours(site, x), rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 2
    torch.compiler.reset()


def test_summary_takes_ratios_from_the_rows():
    shared = {"tokens": 1, "dim": 2, "dtype": "fp32", "threads": 1, "peak_over_streams": 2.5}
    numbers = {
        f"{name}{end}": value
        for name in ("over_floor", "over_laneway")
        for end, value in (("", 3.0), ("_low", 2.0), ("_high", 4.0))
    }
    rows = [shared | numbers | {"variant": name} for name in ("laneway", "transformers_compiled", "copy")]
    summary = layer.summarise(rows)["1x2 fp32 1t"]
    assert summary["speedup_over_transformers_compiled"] == {"value": 3.0, "low": 2.0, "high": 4.0}
    assert set(summary) == {
        "over_floor",
        "peak_over_streams",
        "speedup_over_transformers_compiled",
        "speedup_over_fastest_compiled_peer",
    }


def test_the_fastest_compiled_peer_is_named():
    entry = {
        f"speedup_over_{name}": {"value": value}
        for name, value in [
            ("transformers", 1.0),
            ("laneway_compiled", 0.5),
            ("transformers_compiled", 3.0),
            ("hyper_connections_compiled", 2.0),
        ]
    }
    layer._fastest(entry)
    assert entry["speedup_over_fastest_compiled_peer"] == {"value": 2.0, "variant": "hyper_connections_compiled"}
    none: dict = {"over_floor": {"value": 1.0}}
    layer._fastest(none)
    assert list(none) == ["over_floor"]


@pytest.mark.slow  # `laneway bench layer --json` of tests/cli reads the rows of such a process
def test_worker_process_prints_rows_alone():
    done = subprocess.run(
        [sys.executable, "-m", "laneway.bench.layer", json.dumps(asdict(SMALL))],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(done.stdout)[0]["threads"] == 1


def test_agreement_rows_are_small_errors_for_every_n():
    rows = agreement.rows()
    ours = [row for row in rows if row["compared"] == "reference"]
    assert [row["streams"] for row in ours if row["dtype"] == "float32"] == [1, 2, 3, 4, 5, 6]
    for row in ours:
        bound = 1e-5 if row["dtype"] == "float32" else 2e-2
        assert all(row[f"error_{name}"] < bound for name in agreement.RESULTS), row


@pytest.mark.parametrize(
    ("change", "field"),
    [({"dtypes": ("fp64",)}, "dtype"), ({"shapes": ((0, 4),)}, "shape"), ({"threads": (-1,)}, "threads")],
)
def test_bad_options(change, field):
    with pytest.raises(InputError) as caught:
        layer.run(layer.LayerOptions(**change))
    assert caught.value.field == field
