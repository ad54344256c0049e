"""The stability bench: what counts as diverged and as recovered, faults that hit what they say, runs that go on."""

from __future__ import annotations

import csv
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from laneway.bench import stability
from laneway.bench import stability_runs as runs
from laneway.bench.stability_conditions import CONDITIONS, NOISE_STEPS, SPIKE_FACTOR, corrupt, disturb, onset, units
from laneway.bench.stability_variants import RESIDUALS, VARIANTS
from laneway.bench.stats import holm, sign_flip, wilson
from laneway.bench.table import COLUMNS, show
from laneway.connections import param_groups
from laneway.core import InputError, LanewayError
from laneway.models.gpt import GPT
from laneway.train.step import token_loss
from laneway.train.workbench import seed_all

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = runs.Shape(dim=16, context=16, steps=20, validation_sequences=4)


@pytest.fixture(autouse=True)
def _small(monkeypatch, text_file):
    """Two layers in place of sixteen, and a small text."""
    for name, condition in CONDITIONS.items():
        monkeypatch.setitem(CONDITIONS, name, replace(condition, layers=2))
    folder = str(text_file.parent / "cache")
    monkeypatch.setattr(stability, "TextDataConfig", lambda: runs_text(str(text_file), folder))


def runs_text(path: str, cache: str):
    from laneway.data.text import TextDataConfig

    return TextDataConfig(path=path, cache=cache)


def small(**changes) -> stability.StabilityOptions:
    given = {"variants": ("residual", "mhc"), "conditions": ("lr-0.003", "persistent"), "seeds": 2, "shape": SHAPE}
    return stability.StabilityOptions(**(given | changes))


@pytest.mark.parametrize(("hits", "trials"), [(0, 20), (20, 20), (3, 20), (1, 1)])
def test_wilson_solves_its_equation(hits, trials):
    """The bounds are the p at which the observed share lies z deviations of p away."""
    found = wilson(hits, trials)
    assert 0 <= found.low <= found.value <= found.high <= 1
    for p in (found.low, found.high):
        if 1e-9 < p < 1 - 1e-9:
            assert abs(found.value - p) == pytest.approx(1.959964 * math.sqrt(p * (1 - p) / trials))
    with pytest.raises(ValueError, match="trials"):
        wilson(1, 0)


def test_verdicts():
    fine = np.ones(40, dtype=bool)
    assert runs.verdict(fine, np.array([4.0, 3.5, 3.2, 3.3]), 10) == ("", None)
    assert runs.verdict(fine, np.array([4.0, 3.5, 3.2, 3.51]), 10) == ("climbed", 40)
    assert runs.verdict(fine, np.array([4.0, 3.5, 3.2, 5.6]), 10) == ("guess", 40)
    assert runs.verdict(fine, np.array([4.0, 3.5, math.nan, math.nan]), 10) == ("guess", 40)
    broken = fine.copy()
    broken[12:22] = False
    assert runs.verdict(broken, np.full(4, 3.0), 10) == ("nonfinite", 22)
    broken[15] = True
    assert runs.verdict(broken, np.full(4, 3.0), 10) == ("", None)


def test_recovery_is_the_last_time_over_the_twin():
    twin = np.random.default_rng(0).normal(3, 1, 60)
    for length in (0, 1, 7, 15):
        loss = twin.copy()
        loss[30 : 30 + length] += 2.0
        assert runs.recovery_steps(loss, twin, 30) == length
    never = twin.copy()
    never[30:] += 0.1
    assert runs.recovery_steps(never, twin, 30) is None
    never[30:] = math.nan
    assert runs.recovery_steps(never, twin, 30) is None


def test_the_first_batch_is_the_same_at_every_quarter(monkeypatch):
    """At the end it is one of those that are averaged."""
    seen: list[list[torch.Tensor]] = []
    replicas, _ = runs.build_replicas("residual", CONDITIONS["lr-0.003"], [0], SHAPE)
    monkeypatch.setattr(replicas, "loss", lambda inputs, targets: seen[-1].append(inputs) or inputs.double().mean()[None])
    shape = replace(SHAPE, validation_sequences=48)
    corpus = stability.prepare(stability.TextDataConfig())
    found = []
    for all_batches in (False, True):
        seen.append([])
        found.append(runs._validate(replicas, shape, corpus, all_batches))
    assert [len(batches) for batches in seen] == [1, 3]
    assert torch.equal(seen[0][0], seen[1][0])
    assert found[0][0] == found[1][0]
    assert found[1].shape == (3, 1)


def test_noise_is_a_burst_that_depends_on_seed_and_step():
    inputs, targets = torch.randint(0, 256, (2, 3, 2, 16))
    first = onset(SHAPE.steps)
    hit = [s for s in range(1, 21) if corrupt("noise", s, SHAPE.steps, [5, 6, 7], inputs, targets)[0] is not inputs]
    assert hit == list(range(first, first + NOISE_STEPS))
    one, shifted = corrupt("noise", first, SHAPE.steps, [5, 6, 7], inputs, targets)
    assert torch.equal(one[:, :, 1:], shifted[:, :, :-1])
    again, _ = corrupt("noise", first, SHAPE.steps, [7], inputs[:1], targets[:1])
    assert torch.equal(again[0], one[2])
    assert not torch.equal(one[0], one[1])
    assert corrupt("spike", first, SHAPE.steps, [5], inputs, targets)[0] is inputs


@pytest.mark.parametrize(("fault", "hit"), [("spike", [11]), ("persistent", list(range(11, 21))), ("noise", [])])
def test_spikes_hit_one_path(fault, hit):
    replicas, _ = runs.build_replicas("mhc", CONDITIONS["spike"], [0, 1], SHAPE)
    for step in range(1, 21):
        replicas.grad.fill_(1.0)
        disturb(fault, step, 20, replicas)
        for name, columns in replicas.columns.items():
            expected = SPIKE_FACTOR if step in hit and name.startswith("blocks.1.ffn.") else 1.0
            assert (replicas.grad[:, columns] == expected).all()


def test_units_put_faults_behind_their_twin():
    assert units(("fp16", "spike", "lr-0.003", "persistent")) == [("fp16",), ("lr-0.003", "spike", "persistent")]
    assert units(("noise",)) == [("lr-0.003", "noise")]
    assert all(not CONDITIONS[c].twin or CONDITIONS[c].twin in CONDITIONS for c in CONDITIONS)
    assert all(variant.against in VARIANTS for variant in VARIANTS.values())


def test_rows_summary_and_going_on(tmp_path, monkeypatch):
    path = tmp_path / "runs.csv"
    told: list[str] = []
    report = stability.run(small(runs=str(path)), told.append)
    assert len(told) == 4
    rows = stability.read_runs(path)
    assert len(rows) == 8
    curves = report.tables["stability_curves"]
    assert [row["step"] for row in curves] == [*range(1, 21)] * 4
    assert all(row["finite_runs"] == 2 and row["loss_median"] > 0 for row in curves)
    for row in rows:
        own = [c["gain_backward_max"] for c in curves if (c["variant"], c["condition"]) == (row["variant"], row["condition"])]
        assert row["gain_backward_max"] <= max(own) * (1 + 1e-5)
    cells = report.tables["stability"]
    assert [(c["condition"], c["variant"]) for c in cells] == [
        (condition, variant) for condition in ("lr-0.003", "persistent") for variant in ("residual", "mhc")
    ]
    for cell in cells:
        own = [r for r in rows if (r["variant"], r["condition"]) == (cell["variant"], cell["condition"])]
        assert cell["runs"] == 2
        assert cell["val_loss"] == pytest.approx(np.mean([r["val_loss"] for r in own]), rel=1e-5)
        assert set(COLUMNS["stability"]) <= set(cell)
    assert cells[1]["val_loss_minus_mhc"] == 0.0
    assert cells[0]["recovered"] is None
    assert cells[3]["val_excess"] is not None
    show(report)

    monkeypatch.setattr(stability, "run_unit", lambda *_: pytest.fail("the runs are there"))
    again = stability.run(small(runs=str(path)), told.append)
    assert "stability_curves" not in again.tables
    assert [c["diverged"] for c in again.tables["stability"]] == [c["diverged"] for c in cells]
    assert again.tables["stability"][3]["val_excess"] == pytest.approx(cells[3]["val_excess"], rel=1e-4)
    with path.open() as file:
        assert len(list(csv.reader(file))) == 9


def made(variant: str, condition: str, losses: np.ndarray, diverged: int = 0) -> list[dict]:
    rows = [{"variant": variant, "condition": condition, "seed": s, "val_loss": x, "diverged": 0} for s, x in enumerate(losses)]
    return [row | {"diverged": int(row["seed"] < diverged)} for row in rows]


@pytest.mark.parametrize(
    ("shifts", "verdict"),
    [((0, 0), "neutral"), ((-0.1, 0), "helps"), ((0, 0.1), "hurts"), ((-0.1, 0.1), "depends"), ((-0.1, -0.2), "helps")],
)
def test_what_a_mechanism_is_worth(shifts, verdict):
    """Differences larger than their spread are found, noise is not, and seeds that diverged are left out."""
    rng = np.random.default_rng(3)
    runs_made = []
    for condition, shift in zip(("lr-0.003", "fp16"), shifts, strict=True):
        base = rng.normal(3, 0.2, 20)
        noise = rng.permutation(np.repeat([-0.01, 0.01], 10))
        runs_made += made("mhc", condition, base, diverged=2) + made("mhc-constant", condition, base)
        runs_made += made("mhc-curvature", condition, base + shift + noise, diverged=1)
    found = stability.verdicts_of(runs_made)
    assert [(row["variant"], row["against"]) for row in found][1:] == [
        ("mhc-curvature", "mhc"),
        ("mhc-curvature", "mhc-constant"),
    ]
    for row, pairs in zip(found[1:], (36, 38), strict=True):
        assert row["verdict"] == verdict
        assert (row["conditions"], row["pairs"], row["diverged"]) == (2, pairs, 2)
        assert row["better"].split() == [c for c, s in zip(("lr-0.003", "fp16"), shifts, strict=True) if s < 0]
        assert row["difference_mean"] == pytest.approx(sum(shifts) / 2, abs=2e-3)
    assert found[1]["against_diverged"] == 4
    assert not stability.verdicts_of(made("mhc-curvature", "fp16", np.ones(5)))


def test_a_condition_that_no_run_survived_still_counts_its_divergences():
    base = np.linspace(3, 4, 6)
    healthy = made("mhc", "lr-0.003", base) + made("mhc-curvature", "lr-0.003", base)
    dead = made("mhc", "fp16", base, diverged=1) + made("mhc-curvature", "fp16", base, diverged=6)
    [row] = stability.verdicts_of(healthy + dead)
    assert (row["conditions"], row["pairs"]) == (1, 6), "there are losses to compare in one of them"
    assert (row["diverged"], row["against_diverged"]) == (6, 1)


def test_few_runs_are_not_called_neutral():
    runs_made = made("mhc", "fp16", np.full(5, 3.0)) + made("mhc-purify", "fp16", np.full(5, 2.0))
    assert [row["verdict"] for row in stability.verdicts_of(runs_made)] == ["too few runs"]
    runs_made = made("mhc", "fp16", np.full(8, 3.0)) + made("mhc-purify", "fp16", np.full(8, 2.0))
    assert [row["verdict"] for row in stability.verdicts_of(runs_made)] == ["helps"]


def test_flipped_signs_are_the_exact_test():
    """All 2ⁿ sign patterns, counted."""
    values = np.random.default_rng(1).normal(0.4, 1, 8)
    signs = np.array(list(itertools.product((-1, 1), repeat=8)))
    exact = (np.abs(signs @ values) >= abs(values.sum()) - 1e-12).mean()
    assert sign_flip(values) == pytest.approx(exact, abs=0.015)
    assert sign_flip(np.full(20, 0.3)) < 1e-3
    assert sign_flip([1.0, -1.0]) == 1.0
    with pytest.raises(ValueError, match="differences"):
        sign_flip([])


def test_holm_stops_at_the_first_that_is_not_rejected():
    assert holm([0.01, 0.04, 0.03], 0.05) == [True, False, False]
    assert holm([0.03, 0.01, 0.02], 0.05) == [True, True, True]
    assert holm([0.5, 0.02], 0.05) == [False, True]
    assert holm([], 0.05) == []


def batches(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + step)
    return torch.randint(0, 256, (2, 16), generator=generator), torch.randint(0, 256, (2, 16), generator=generator)


def trained_alone(variant: str, seed: int, steps: int) -> tuple[GPT, list]:
    """The model itself, without vmap, with its control, in a loop as ``laneway train`` has it."""
    config = SHAPE.config(variant, CONDITIONS["spike"], seed)
    seed_all(seed)
    model = GPT(config.model)
    model.chained = True
    extensions = VARIANTS[variant].prepare(model)
    optimizer = torch.optim.AdamW(param_groups(model, 0.1), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(1, steps + 1):
        for extension in extensions:
            extension.on_step_begin(step)
        inputs, targets = batches(seed, step)
        loss = token_loss(model(inputs), targets)
        loss.backward()
        if step == onset(SHAPE.steps):
            for name, parameter in model.named_parameters():
                if name.startswith("blocks.1.ffn."):
                    parameter.grad *= SPIKE_FACTOR
        for extension in extensions:
            extension.on_backward_end(step)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for extension in extensions:
            extension.on_step_end(step, {"loss": float(loss.detach()), "grad_norm": float(norm)})
    return model, extensions


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in RESIDUALS])
def test_a_mechanism_does_under_vmap_what_it_does_alone(variant):
    """Two replicas with their controls, against the models alone: what each has measured, decided and learnt."""
    seeds, steps = [3, 8], 12
    replicas, extensions = runs.build_replicas(variant, CONDITIONS["spike"], seeds, SHAPE)
    for step in range(1, steps + 1):
        inputs, targets = (torch.stack(parts) for parts in zip(*(batches(seed, step) for seed in seeds), strict=True))
        runs._each(extensions, "on_step_begin", step)

        def after(step: int = step) -> None:
            disturb("spike", step, SHAPE.steps, replicas)
            runs._each(extensions, "on_backward_end", step)

        runs._end(extensions, step, replicas.step(inputs, targets, 3e-3, after))
    for index, seed in enumerate(seeds):
        model, own = trained_alone(variant, seed, steps)
        for name, weights in model.named_parameters():
            apart = (replicas.models[index].get_parameter(name) - weights).abs()
            assert apart.mean() < 0.02 * steps * 3e-3, name
        ours, theirs = {}, {}
        for mine, other in zip(extensions[index], own, strict=True):
            mine.on_step_end(steps, ours)
            other.on_step_end(steps, theirs)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.tensor(ours[key], dtype=torch.float64).allclose(
                torch.tensor(value, dtype=torch.float64), atol=0.02, equal_nan=True
            ), key
        if "scheduler" in variant:
            assert torch.tensor(theirs["priority"]).std() > 0
        if "curvature" in variant:
            assert max(map(max, theirs["curvature"])) > 0


def test_a_seed_s_run_does_not_depend_on_its_neighbours():
    two = stability.run(small(variants=("mhc",), conditions=("lr-0.003",))).tables["stability_runs"]
    one = stability.run(small(variants=("mhc",), conditions=("lr-0.003",), seeds=1)).tables["stability_runs"]
    assert one[0]["val_loss"] == pytest.approx(two[0]["val_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variants": ("mch",)}, "mhc"),
        ({"conditions": ("fp17",)}, "fp16"),
        ({"seeds": 0}, "seeds"),
        ({"runs": "/no/such/folder/runs.csv"}, "existing folder"),
        ({"variants": ()}, "one or more of"),
    ],
)
def test_bad_input(changes, words):
    with pytest.raises(InputError, match=words):
        small(**changes).check()


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(LanewayError, match="no file of runs"):
        stability.read_runs(tmp_path / "other.csv")


def test_quick_is_small():
    options = stability.quick(stability.StabilityOptions())
    assert options.quick
    assert options.seeds * len(options.conditions) * len(options.variants) <= 64
