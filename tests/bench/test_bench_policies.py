"""The policies bench: recording real steps, replaying, judging; the committed traces and rows."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from laneway.bench import policies, policy_models
from laneway.bench.policies import BUDGETS, LINKS, MODES, PolicyOptions, judge
from laneway.bench.policy_traces import MIN_BYTES, Workload, record
from laneway.bench.rows import source_results
from laneway.cli import main
from laneway.core import InputError, LanewayError
from laneway.memory.policies import POLICIES
from laneway.memory.trace import Trace

COMMITTED = PolicyOptions().folder()


def small_gpt(steps=4):
    return policy_models.gpt(dim=96, layers=2, context=64, batch=4, steps=steps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_thread):
    found = tmp_path_factory.mktemp("traces")
    record("gpt", small_gpt, warm=0, steps=4, repeats=1).save(found / "gpt.json.gz")
    return found


@pytest.fixture(scope="module")
def report(folder):
    return policies.run(policies.quick(PolicyOptions(traces=str(folder))))


class Chain(nn.Module):
    """Two matrices with a GELU between, all of 64 KiB and more."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 256, bias=False), nn.Linear(256, 128, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def chain(loss=lambda model, batch: model(batch).sum()):
    torch.manual_seed(0)
    return Workload(Chain(), [torch.randn(256, 128) for _ in range(3)], loss)


def test_a_trace_is_what_autograd_does(one_thread):
    """By hand: x and the parameters' storages, up's output (saved by GELU), GELU's (saved by down)."""
    trace = record("chain", chain, warm=1, steps=2, repeats=1)
    parameter, activation = 128 * 256 * 4, 256 * 256 * 4
    kinds = [(entry.kind, entry.nbytes) for entry in trace.entries]
    assert kinds[:4] == [("parameter", parameter), ("optimizer", 2 * parameter)] * 2
    step = [("activation", parameter), ("activation", activation), ("activation", activation)]
    assert [kind for kind in kinds[4:] if kind[0] == "activation"] == step * 2
    assert [kind for kind in kinds[4:] if kind[0] == "gradient"] == [("gradient", parameter)] * 4
    assert trace.given == {0, 1, 2, 3}
    names = {number: entry.module for number, entry in enumerate(trace.entries)}
    second = [(event.action, trace.entries[event.entry].kind, names[event.entry]) for event in trace.events[trace.steps[1] :]]
    assert second[:5] == [
        ("use", "parameter", "up"),
        ("produce", "activation", "up"),
        ("produce", "activation", ""),
        ("use", "parameter", "down"),
        ("produce", "activation", "down"),
    ]
    assert set(second[5:7]) == {("use", "activation", "down"), ("use", "parameter", "down")}, "the backward of down"
    assert ("use", "optimizer", "down") in second
    assert ("produce", "optimizer", "up") in second
    gelu = next(entry for entry in trace.entries if entry.kind == "activation" and entry.module == "down")
    assert gelu.recompute_seconds is not None
    assert trace.entries[gelu.inputs[0]].nbytes == activation
    assert trace.seconds() > 0


def test_a_released_address_is_another_entry(one_thread):
    """Activations of one step after the other get the same addresses; none is taken for an old one."""

    def loss(model, batch):
        total = model(batch).sum()
        for _ in range(3):
            model(batch).sum().backward()
        return total

    trace = record("again", lambda: chain(loss), warm=0, steps=1, repeats=1)
    outputs = [n for n, entry in enumerate(trace.entries) if entry.kind == "activation" and entry.nbytes == 256 * 256 * 4]
    assert len(outputs) == 8
    for number in outputs:
        actions = [event.action for event in trace.events if event.entry == number]
        assert (actions[0], actions[-1]) == ("produce", "free")


def test_a_change_in_place_after_the_save_is_refused(one_thread):
    def loss(model, batch):
        hidden = model.up(batch)
        out = F.gelu(hidden)
        with torch.no_grad():
            hidden.mul_(2)
        return model.down(out).sum()

    with pytest.raises(LanewayError, match="changed in place"):
        record("x", lambda: chain(loss), warm=0, steps=1, repeats=1)


def test_steps_that_differ_are_refused(one_thread):
    calls = iter(range(100))

    def loss(model, batch):
        return model(batch if next(calls) % 2 else batch[:128]).sum()

    with pytest.raises(LanewayError, match="must be deterministic"):
        record("x", lambda: chain(loss), warm=0, steps=1, repeats=1)


def test_recording_does_not_change_what_is_trained(one_thread):
    """Hooks hand back the very tensors: the same parameters with and without them."""
    from laneway.bench.policy_traces import Recorder

    recorded, plain = Recorder(small_gpt()), Recorder(small_gpt())
    recorded.run(0, 3)
    for batch in plain.workload.batches[:3]:
        plain._step(batch)
    pairs = zip(recorded.workload.model.parameters(), plain.workload.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_experts_run_only_for_their_tokens(one_thread):
    torch.manual_seed(0)
    mixture = policy_models.Mixture(8, 16, 6, 2)
    x = torch.randn(5, 8)
    weights, chosen = mixture.router(x).topk(2, dim=-1)
    weights = weights.softmax(-1)
    slow = torch.stack([sum(weights[t, k] * mixture.experts[chosen[t, k]](x[t]) for k in range(2)) for t in range(5)])
    torch.testing.assert_close(mixture(x), slow)
    mixture(x).sum().backward()
    assert {number for number, expert in enumerate(mixture.experts) if expert.weight.grad is not None} == set(
        chosen.flatten().tolist()
    )


def test_rows(report):
    rows = report.tables["policies"]
    assert [(row["mode"], row["policy"]) for row in rows] == [(mode, policy) for mode in MODES for policy in POLICIES]
    assert len({tuple(row) for row in rows}) == 1
    for row in rows:
        assert row["peak_bytes"] <= row["budget_bytes"]
        assert row["time_s"] == pytest.approx(row["compute_s"] + row["stall_s"] + row["recomputed_s"])
        assert bool(row["variant"]) == (row["policy"] == "cost_aware")
        assert (row["recomputed_s"] > 0) <= (row["policy"] == "cost_aware")
    assert any("60 s" in note for note in report.notes)
    assert set(report.summary) == {"cost_aware"}


def row(trace="gpt", link=200, budget=0.63, mode="prefetch+write-behind", **cells):
    return [
        {"trace": trace, "link_mb_s": link, "budget": budget, "mode": mode, "policy": policy, "time_s": 1.0, "bytes_in": 0,
         "stall_s": stall, "overhead_percent": overhead, "bytes_out": nbytes}
        for policy in POLICIES
        for stall, overhead, nbytes in [cells.get(policy, (1.0, 10.0, 100))]
    ]  # fmt: skip


def test_targets_are_judged_by_their_cells():
    good = row(cost_aware=(0.25, 11.0, 100)) + row("moe", mode="demand", cost_aware=(1, 10, 70), belady=(1, 5, 60))
    summary, lines = judge(good)
    assert summary["cost_aware"] == pytest.approx(
        {"most_points_over_lru": 1.0, "most_stall_over_lru": 0.25, "most_bytes_over_lru": 0.7, "most_bytes_over_belady": 70 / 60}
    )
    assert [line.split(":")[0] for line in lines] == ["pass"] * 4
    bad = row(cost_aware=(0.26, 11.1, 100)) + row("moe", mode="demand", cost_aware=(1, 10, 73), belady=(1, 5, 60))
    lines = judge(bad)[1]
    assert [line.split(":")[0] for line in lines] == ["miss"] * 4
    assert "\n  gpt, 200 MB/s, 0.63, prefetch+write-behind: 1.10" in lines[0]
    other = judge(row("moe") + row(link=400))[1]
    assert [line.split(":")[0] for line in other] == ["pass", "no cell", "no cell", "no cell"]


def test_a_budget_below_one_operation_is_said(folder):
    options = replace(policies.quick(PolicyOptions(traces=str(folder))), budgets=(0.05,))
    report = policies.run(options)
    assert all(row["time_s"] is None for row in report.tables["policies"])
    assert any("an operation does not fit" in note for note in report.notes)


def test_bad_input(tmp_path):
    with pytest.raises(InputError, match="--record"):
        PolicyOptions(traces=str(tmp_path)).check()


def test_the_command(capfd, tmp_path, folder):
    assert main(["bench", "policies", "--quick", "--traces", str(folder), "--json", "--save", str(tmp_path)]) == 0
    found = json.loads(capfd.readouterr().out)
    assert len(found["rows"]) == len(MODES) * len(POLICIES)
    assert (tmp_path / "policies.csv").read_text().count("\n") == len(found["rows"]) + 1
    assert main(["bench", "policies", "--traces", str(tmp_path)]) == 2
    assert "traces: got" in capfd.readouterr().err


def test_the_command_records(capfd, tmp_path, monkeypatch):
    monkeypatch.setattr(policy_models, "RECORDED", {"gpt": (small_gpt, 0, 4)})
    assert main(["bench", "policies", "--quick", "--record", "--traces", str(tmp_path / "new"), "--json"]) == 0
    out, err = capfd.readouterr()
    assert "recording gpt: 4 steps" in err
    assert len(json.loads(out)["rows"]) == len(MODES) * len(POLICIES)
    assert len(Trace.load(tmp_path / "new" / "gpt.json.gz").steps) == 4


def test_committed_traces_are_small_and_whole():
    paths = sorted(COMMITTED.glob("*.json.gz"))
    assert [path.name.split(".")[0] for path in paths] == sorted(policy_models.RECORDED)
    for path in paths:
        assert path.stat().st_size < 200_000
        trace = Trace.load(path)
        assert len(trace.steps) == policy_models.RECORDED[trace.name][2]
        assert min(entry.nbytes for entry in trace.entries) >= MIN_BYTES
        assert {"activation", "gradient", "optimizer"} <= {entry.kind for entry in trace.entries}


def test_committed_rows_are_those_of_the_committed_traces():
    """The rows of one cell of every trace, computed anew."""
    with (source_results() / "policies.csv").open(newline="") as file:
        rows = {(r["trace"], r["link_mb_s"], r["budget"], r["mode"], r["policy"]): r for r in csv.DictReader(file)}
    assert len(rows) == len(policy_models.RECORDED) * len(LINKS) * len(BUDGETS) * len(MODES) * len(POLICIES)
    for name in policy_models.RECORDED:
        trace = Trace.load(COMMITTED / f"{name}.json.gz")
        for policy in ("lru", "belady"):
            found = policies._row(PolicyOptions(), trace, 400, 0.5, "prefetch", policy)
            committed = rows[name, "400", "0.5", "prefetch", policy]
            for key in ("time_s", "stall_s", "bytes_out", "bytes_in"):
                assert float(committed[key]) == pytest.approx(found[key], rel=1e-5, abs=1e-9)
