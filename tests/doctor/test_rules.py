"""Each rule fires on a run that shows its symptom, says the numbers, and its neighbours stay silent."""

import math

import numpy as np
import pytest
from synthetic import Run, config, healthy

from laneway.core import ASKED_MEMORY
from laneway.doctor import RULES, RunFacts, examine_run, measures
from laneway.doctor.facts import Series


def loss_above_start(run: Run) -> None:
    for index in range(10, 110):
        run.rows[index]["loss"] += 4.0 * math.exp(-index / 60)


def early_spikes(run: Run) -> None:
    for index in (20, 40, 60, 80):
        run.rows[index]["loss"] += 2.5


def early_gradient_spikes(run: Run) -> None:
    for index in (25, 50, 75):
        run.rows[index]["grad_norm"] *= 60


def early_nonfinite(run: Run) -> None:
    run.rows[30]["loss"] = run.rows[30]["grad_norm"] = None
    run.events.append({"kind": "nonfinite", "step": 31})


def early_nonfinite_event_only(run: Run) -> None:
    """The row was not logged, the event was written."""
    run.events.append({"kind": "nonfinite", "step": 31})


def climbs_back(run: Run) -> None:
    for index in range(400, 600):
        run.rows[index]["loss"] += 2.0 * (index - 400) / 200


def late_nonfinite(run: Run) -> None:
    run.events += [{"kind": "nonfinite", "step": step} for step in (400, 410)]


def tiny_rate(run: Run) -> None:
    """At a rate far too low the loss falls by the same amount each step."""
    random = np.random.default_rng(0)
    run.column("loss", [5.5 - 1.7 * i / 600 + random.normal(0, 0.05) for i in range(600)])
    for row in run.rows:
        if "val_loss" in row:
            row["val_loss"] = row["loss"] + 0.05


def learns_nothing(run: Run) -> None:
    random = np.random.default_rng(0)
    run.column("loss", [5.54 - 0.2 * (1 - math.exp(-i / 100)) + random.normal(0, 0.05) for i in range(600)])
    for row in run.rows:
        if "val_loss" in row:
            row["val_loss"] = row["loss"] + 0.05


def overfits(run: Run) -> None:
    validations = [row for row in run.rows if "val_loss" in row]
    for row, value in zip(validations, (2.4, 2.0, 1.9, 2.0, 2.1, 2.25), strict=True):
        row["val_loss"] = value


def collapsed(run: Run) -> None:
    for row in run.rows:
        if "collapse" in row:
            row["collapse"], row["site_collapse"] = 0.99996, [0.99996] * 8


def frozen(run: Run) -> None:
    for row in run.rows:
        if "res_entropy" in row:
            row["res_entropy"], row["site_res_entropy"] = 0.0478, [0.0478 + 1e-6 * row["step"] / 600] * 8


def frozen_without_sites(run: Run) -> None:
    frozen(run)
    for row in run.rows:
        row.pop("site_res_entropy", None)


def gains(run: Run) -> None:
    for row in run.rows:
        if "gain_forward" in row:
            row["gain_forward"] = 1.0 + row["step"]
            row["site_gain_forward"] = np.linspace(1, 1 + row["step"], 8).tolist()


def backward_gains(run: Run) -> None:
    run.rows[199]["gain_backward"] = 11.0


def inexact(run: Run) -> None:
    run.rows[199]["sinkhorn_error"] = 0.4


def nearly_full(run: Run) -> None:
    run.env["memory_bytes"] = int(max(row["peak_bytes"] for row in run.rows) / 0.93)


def device_nearly_full(run: Run) -> None:
    run.env["device"] = {"type": "cuda", "bytes": int(max(row["peak_bytes"] for row in run.rows) / 0.97)}


def out_of_memory(run: Run) -> None:
    run.events.append({"kind": "notice", "step": 300, "message": "CUDA out of memory. Tried to allocate 2.00 GiB"})


def out_of_memory_on_cpu(run: Run) -> None:
    run.events.append({"kind": "stop", "step": 300, "reason": "DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"})


def leaks(run: Run) -> None:
    run.column("peak_bytes", [int(1e9 + 1.5e6 * index) for index in range(600)])


def slows_down(run: Run) -> None:
    for index in range(350, 600):
        run.rows[index]["tokens_per_s"] *= 0.5


def path_corrected_for_ever(run: Run) -> None:
    events = [(300, 1), (309, 10), (399, 100)]
    run.events += [
        {"kind": "purify", "step": step, "path": "blocks.3.mlp", "score": 9.0, "correction": 0.1, "in_a_row": count}
        for step, count in events
    ]


def path_not_finite(run: Run) -> None:
    run.events.append({"kind": "purify", "step": 300, "path": "blocks.2", "score": None, "correction": None, "in_a_row": 1})


SYMPTOMS = [
    (loss_above_start, "unstable-start", ["loss", "from 5."]),
    (early_spikes, "unstable-start", ["4 loss rows", "above the running median"]),
    (early_gradient_spikes, "unstable-start", ["3 gradient norms", "×"]),
    (early_nonfinite, "unstable-start", ["1 non-finite steps, the first at step 31"]),
    (early_nonfinite_event_only, "unstable-start", ["1 non-finite steps, the first at step 31"]),
    (climbs_back, "diverged", ["at the end"]),
    (late_nonfinite, "nonfinite-steps", ["the first at step 400, the last at step 410"]),
    (tiny_rate, "slow-convergence", ["of its fall", "a power law through both"]),
    (learns_nothing, "slow-convergence", ["after 600 steps", "a uniform guess has 5.55"]),
    (overfits, "overfit", ["validation 1.900 at step 300, 2.250 at the end"]),
    (collapsed, "streams-collapsed", ["mean cosine 0.99996 at step 600"]),
    (frozen, "residual-map-frozen", ["31 probes up to step 600"]),
    (frozen_without_sites, "residual-map-frozen", ["31 probes up to step 600"]),
    (gains, "composite-gain", ["forward gain 601 at step 600, largest at site 7 of 8"]),
    (backward_gains, "composite-gain", ["backward gain 11 at step 200"]),
    (inexact, "sinkhorn-error", ["0.4 at step 200"]),
    (path_corrected_for_ever, "path-outlier", ["blocks.3.mlp was corrected in 100 checks in a row", "first at step 300"]),
    (path_not_finite, "path-outlier", ["the gradient of blocks.2 was not finite"]),
    (nearly_full, "memory-overflow", ["(93 %)"]),
    (device_nearly_full, "memory-overflow", ["(97 %)"]),
    (out_of_memory, "memory-overflow", ["1 out-of-memory events, the first at step 300"]),
    (out_of_memory_on_cpu, "memory-overflow", ["1 out-of-memory events"]),
    (leaks, "memory-growth", ["MiB a step", "memory is full"]),
    (slows_down, "throughput-drop", ["below 70 % from about step"]),
]


@pytest.mark.parametrize(("symptom", "rule", "evidence"), SYMPTOMS, ids=[s[0].__name__ for s in SYMPTOMS])
@pytest.mark.parametrize("seed", range(5))
def test_a_symptom_fires_its_rule_and_no_other(symptom, rule, evidence, seed):
    run = healthy(seed, spikes=0.0)
    symptom(run)
    found = examine_run(run.facts)
    assert [finding.rule for finding in found] == [rule]
    for words in evidence:
        assert words in found[0].evidence
    assert found[0].knobs


def test_just_under_the_thresholds_is_healthy():
    run = healthy(1, spikes=0.0)
    run.rows[199] |= {"gain_forward": 9.9, "sinkhorn_error": 0.099}
    for row in run.rows:
        if "collapse" in row:
            row["collapse"] = 0.9985
    run.env["memory_bytes"] = int(max(row["peak_bytes"] for row in run.rows) / 0.89)
    for index in range(350, 600):
        run.rows[index]["tokens_per_s"] *= 0.78
    for index in range(20, 22):
        run.rows[index]["loss"] += 2.5
    run.rows[60]["grad_norm"] *= 60
    assert examine_run(run.facts) == []


def test_growth_that_never_fills_the_memory_is_no_leak():
    run = healthy(1, spikes=0.0)
    run.column("peak_bytes", [int(1e9 + 4e5 * index) for index in range(600)])
    assert examine_run(run.facts) == []
    run.env["memory_bytes"] = 3 << 30
    assert [finding.rule for finding in examine_run(run.facts)] == ["memory-growth"]


def test_knobs_know_the_values_of_the_run():
    run = healthy(0, spikes=0.0)
    early_spikes(run)
    knobs = {knob.name: knob.advice for knob in examine_run(run.facts)[0].knobs}
    assert (
        knobs["optimizer.lr"]
        == "15–20 % under what you used for HC or for the plain residual: 0.0024 to 0.00255, if that was 0.003"
    )
    assert knobs["optimizer.warmup"] == "twice as long (now 0.05)"
    assert "model.logit_cap" not in knobs, "the cap is on"
    run.config["model"]["logit_cap"] = 0
    assert "model.logit_cap" in {knob.name for knob in examine_run(run.facts)[0].knobs}


def test_gain_of_hc_points_at_the_manifold():
    run = healthy(0, residual="hc", spikes=0.0)
    gains(run)
    (finding,) = examine_run(run.facts)
    assert finding.rule == "composite-gain"
    assert finding.knobs[0].name == "model.residual"
    assert finding.knobs[0].advice.startswith("mhc:")


def test_rules_over_streams_leave_plain_runs_alone():
    run = healthy(0, residual="residual", spikes=0.0)
    for row in run.rows:
        row |= {"collapse": 1.0, "sinkhorn_error": 1.0}
    assert examine_run(run.facts) == []


def test_one_stream_cannot_collapse_or_freeze():
    run = healthy(0, spikes=0.0)
    collapsed(run)
    frozen(run)
    run.config["model"]["streams"] = 1
    assert examine_run(run.facts) == []


def test_the_start_may_be_collapsed():
    run = healthy(0, spikes=0.0)
    collapsed(run)
    run.rows = run.rows[:40]
    assert examine_run(run.facts) == []


def test_single_corrections_are_what_purification_is_for():
    run = healthy(0, spikes=0.0)
    run.events += [
        {"kind": "purify", "step": step, "path": f"blocks.{step % 4}", "score": 9.0, "correction": 0.1, "in_a_row": 1}
        for step in range(100, 130)
    ]
    run.events += [{"kind": "purify", "step": s, "path": "blocks.1", "score": 9.0, "correction": 0.1} for s in range(100, 150)]
    assert examine_run(run.facts) == []


def test_generated_text_is_no_evidence():
    run = healthy(0, spikes=0.0)
    run.events.append({"kind": "sample", "step": 300, "prompt": "oom", "text": "CUDA out of memory"})
    run.events.append({"kind": "notice", "step": 300, "message": "the loom and the broom"})
    assert examine_run(run.facts) == []


def test_a_finetuned_run_that_starts_low_is_not_slow():
    run = healthy(0, spikes=0.0)
    random = np.random.default_rng(0)
    run.column("loss", [1.5 - 0.02 * (1 - math.exp(-i / 50)) + random.normal(0, 0.03) for i in range(600)])
    for row in run.rows:
        if "val_loss" in row:
            row["val_loss"] = 1.5
    assert examine_run(run.facts) == []


def test_several_symptoms_are_all_told():
    run = healthy(0, spikes=0.0)
    for symptom in (collapsed, gains, inexact, nearly_full, slows_down):
        symptom(run)
    assert [finding.rule for finding in examine_run(run.facts)] == [
        "streams-collapsed", "composite-gain", "sinkhorn-error", "memory-overflow", "throughput-drop",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "facts",
    [
        Run({}, [], env={}),
        Run({"steps": "many", "model": 3, "optimizer": []}, [{"step": 1}], env={"device": "cpu", "memory_bytes": "x"}),
        Run(config(10), [{"step": s, "loss": None, "grad_norm": math.nan, "peak_bytes": "big"} for s in range(60, 400)]),
        Run(
            config(10), [{"step": s, "loss": 0.0, "grad_norm": 0.0, "tokens_per_s": 0.0, "peak_bytes": 0} for s in range(1, 400)]
        ),
        Run(
            config(10),
            [{"step": s, "site_res_entropy": [None], "site_gain_forward": [], "collapse": None} for s in range(1, 400)],
        ),
        Run(config(0), [{"step": 1, "loss": 1e308}, {"step": 2, "loss": -1e308}]),
        Run({}, [], events=[{"kind": None, "step": None}, {"message": 3}, {"kind": "nonfinite"}]),
    ],
)
def test_odd_runs_do_not_break_the_rules(facts):
    for finding in examine_run(facts.facts):
        assert "nan" not in finding.evidence
        assert "nan" not in " ".join(knob.advice for knob in finding.knobs)


def test_advice_without_a_configuration_has_no_gaps():
    run = healthy(0, spikes=0.0)
    for symptom in (early_spikes, collapsed, gains, inexact, leaks, slows_down, out_of_memory):
        symptom(run)
    run.config = {}
    found = examine_run(run.facts)
    assert len(found) >= 5
    for finding in found:
        for knob in finding.knobs:
            assert not any(word in knob.advice for word in ("nan", "None", "not set", "()"))


def test_every_knob_is_a_field_of_the_training_configuration():
    """The doctor itself never imports the training code; its advice must still name fields that exist."""
    from laneway.train.config import TrainConfig
    from laneway.train.settings import flatten

    fields = set(flatten(TrainConfig()))
    named = set()
    for symptom, _, _ in SYMPTOMS:
        for residual in ("mhc", "hc"):
            run = healthy(0, residual=residual, spikes=0.0)
            symptom(run)
            for finding in examine_run(run.facts):
                named |= {knob.name for knob in finding.knobs}
                rule = next(rule for rule in RULES if rule.name == finding.rule)
                assert {knob.name for knob in finding.knobs} <= set(rule.knobs)
    assert len(named) > 15
    assert named <= {name for rule in RULES for name in rule.knobs} <= fields


def test_every_flag_is_one_of_train_and_sets_its_field():
    from laneway.cli.train import read_request
    from laneway.train.settings import flatten

    flags = {}
    for symptom, _, _ in SYMPTOMS:
        run = healthy(0, spikes=0.0)
        symptom(run)
        run.config |= {"batch_size": 8, "activation_checkpointing": False}
        flags |= {knob.name: knob for finding in examine_run(run.facts) for knob in finding.knobs if knob.flag}
    assert len(flags) > 10
    read = flatten(read_request(["tiny", *(word for knob in flags.values() for word in knob.flag.split())]).settings)
    for name, knob in flags.items():
        assert str(read[name]).lower() == knob.value or float(read[name]) == float(knob.value)
        assert knob.words.endswith(f": {knob.flag}")


def test_a_wild_start_wants_a_tenth_and_a_spiky_one_a_little_less():
    run = healthy(0, spikes=0.0)
    run.column("loss", [5.5 + 1.5 * min(1, i / 60) - 4 * max(0, i - 100) / 500 for i in range(600)])
    (finding,) = examine_run(run.facts)
    assert finding.evidence.startswith("loss 7.00 around step")
    knobs = {knob.name: knob for knob in finding.knobs}
    assert knobs["optimizer.lr"].flag == "--optimizer.lr 0.0003"
    assert "optimizer.clip_norm" not in knobs, "clipping does not help a loss that climbs evenly"
    run.config["optimizer"]["warmup"] = 0.0
    knobs = {knob.name: knob for knob in examine_run(run.facts)[0].knobs}
    assert knobs["optimizer.warmup"].flag == "--optimizer.warmup 0.1", "twice nothing is nothing"
    run = healthy(0, spikes=0.0)
    early_spikes(run)
    knobs = {knob.name: knob for knob in examine_run(run.facts)[0].knobs}
    assert knobs["optimizer.lr"].flag == "--optimizer.lr 0.0024"
    assert knobs["optimizer.clip_norm"].flag == "--optimizer.clip-norm 0.5"


@pytest.mark.parametrize(
    ("fields", "ranks", "flag"),
    [
        ({"batch_size": 64}, 1, "--micro-batch-size 32"),
        ({"batch_size": 64}, 4, "--micro-batch-size 8"),
        ({"batch_size": 12, "micro_batch_size": 6}, 1, "--micro-batch-size 3"),
        ({"batch_size": 15, "micro_batch_size": 5}, 1, "--micro-batch-size 1"),
        ({"batch_size": 8, "micro_batch_size": 1}, 1, None),
    ],
)
def test_half_a_micro_batch_divides_the_share_of_a_rank(fields, ranks, flag):
    run = healthy(0, spikes=0.0)
    out_of_memory(run)
    run.config |= fields
    run.env["world_size"] = ranks
    flags = [knob.flag for knob in examine_run(run.facts)[0].knobs if knob.name == "micro_batch_size"]
    assert flags == ([] if flag is None else [flag])


def test_the_peak_of_another_rank_counts():
    run = healthy(0, spikes=0.0)
    run.env["device"] = {"type": "cuda", "bytes": 10 << 30}
    facts = RunFacts(
        run.config, run.env, run.rows, run.events, {1: run.rows, 3: [{"step": 9, "peak_bytes": 95 * (10 << 30) // 100}]}
    )
    (finding,) = examine_run(facts)
    assert finding.rule == "memory-overflow"
    assert finding.evidence == "peak 9.50 GiB of 10.00 GiB (95 %) on rank 3"


def test_a_short_slow_stretch_at_the_end_is_the_machine_s():
    run = healthy(0, spikes=0.0)
    slows_down(run)
    run.column("time", [1e9 + 0.1 * index for index in range(600)])
    assert examine_run(run.facts) == []
    run.column("time", [1e9 + 1.0 * index for index in range(600)])
    assert [finding.rule for finding in examine_run(run.facts)] == ["throughput-drop"]


def test_measures_are_told_of_healthy_runs_too():
    run = healthy(0, spikes=0.0)
    run.env["memory_bytes"] = int(max(row["peak_bytes"] for row in run.rows) / 0.5)
    found = measures(run.facts)
    assert set(found) == {"unstable-start", "slow-convergence", "memory-overflow"}
    assert all(measure.value < measure.limit for measure in found.values())
    assert found["memory-overflow"].value == pytest.approx(0.5, rel=1e-6)
    loss_above_start(run)
    rise = measures(run.facts)["unstable-start"]
    assert rise.value > rise.limit
    assert measures(Run({}, [], env={}).facts) == {}


def test_findings_as_json():
    run = healthy(0, spikes=0.0)
    inexact(run)
    told = examine_run(run.facts)[0].as_json()
    assert set(told) == {"rule", "finding", "evidence", "knobs", "threshold"}
    assert told["knobs"][0] == {
        "name": "model.logit_cap",
        "advice": "4 (now 8): smaller logits converge faster",
        "flag": "--model.logit-cap 4",
    }


def test_series_noise_and_blocks():
    random = np.random.default_rng(0)
    series = Series(np.arange(4000.0), np.linspace(9, 1, 4000) + random.normal(0, 0.3, 4000))
    assert series.noise() == pytest.approx(0.3, rel=0.05)
    series.values[::100] = 50
    assert series.noise() == pytest.approx(0.3, rel=0.1), "spikes are not noise"
    series.values[7] = math.nan
    blocks = series.blocks(20)
    assert len(blocks) == 20
    assert np.allclose(blocks.values, np.linspace(9, 1, 4000).reshape(20, 200).mean(1), atol=0.1)
    assert len(Series(np.array([1.0]), np.array([math.nan])).blocks(20)) == 0


@pytest.mark.parametrize(
    "words",
    [
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12",
        "CPU out of memory (the system has no more): wanted 4096 bytes, live 0 bytes, limit none",
        "CUDA out of memory. Tried to allocate 4096 bytes. GPU 0 has …",
    ],
)
def test_what_was_asked_for_is_read_from_the_words_of_any_allocator(words):
    found = ASKED_MEMORY.search(words)
    assert found is not None
    assert f"{found[1]} {found[2]}" == "4096 bytes"
