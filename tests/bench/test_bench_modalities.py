"""The modalities bench trains its networks on the same data from the same start and pairs what it compares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from laneway.bench import modalities
from laneway.core import InputError
from laneway.data.digits import best_alone, load_digits

TINY = modalities.ModalityOptions(seeds=2, steps=2, threads=1)


@pytest.fixture(scope="module", autouse=True)
def _digits():
    pytest.importorskip("sklearn", reason="scikit-learn is missing: pip install 'laneway[vision]'")


@pytest.fixture(scope="module")
def report(_digits):
    return modalities.run(TINY)


def test_rows_and_summary(report):
    rows = report.tables["modalities"]
    want = [(m, s, v) for m in ("vit", "convnet", "image_text") for s in (0, 1) for v in ("residual", "mhc")]
    assert [(row["modality"], row["seed"], row["variant"]) for row in rows] == want
    assert len({tuple(row) for row in rows}) == 1
    for row in rows:
        assert 0 <= row["accuracy"] <= 1
        assert row["threads"] == 1
    for name in ("vit", "convnet", "image_text"):
        assert report.summary[f"{name} residual"]["accuracy_minus_residual"]["value"] == 0.0
        own = [row["accuracy"] for row in rows if (row["modality"], row["variant"]) == (name, "mhc")]
        assert report.summary[f"{name} mhc"]["accuracy"]["value"] == pytest.approx(sum(own) / 2)
        assert report.summary[f"{name} mhc"]["step_time_over_residual"]["value"] > 1
        parameters = {row["variant"]: row["parameters"] for row in rows if row["modality"] == name}
        assert parameters["mhc"] > parameters["residual"]


def test_only_questions_have_a_best_without_one_input(report):
    found = {row["modality"]: row["best_alone"] for row in report.tables["modalities"]}
    assert found == {"vit": None, "convnet": None, "image_text": max(best_alone(load_digits()[1]).values())}


def test_a_run_does_not_depend_on_its_neighbours(report):
    together = [row for row in report.tables["modalities"] if (row["variant"], row["seed"]) == ("residual", 0)]
    alone = modalities.run(replace(TINY, variants=("residual",), seeds=1)).tables["modalities"]
    assert [row["test_loss"] for row in together] == [row["test_loss"] for row in alone]


@pytest.mark.parametrize("name", modalities.MODALITIES)
def test_variants_begin_as_the_same_function_on_the_same_batches(name):
    train, _ = load_digits()
    modality = modalities.MODALITIES[name]
    runs = [modalities._Run(modality, variant, 1, 10) for variant in ("residual", "mhc")]
    a, b = (run.step(train) for run in runs)
    assert a == pytest.approx(b, rel=1e-5)
    assert a != pytest.approx(modalities._Run(modality, "residual", 2, 10).step(train), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "field", "part"),
    [
        ({"modalities": ("vit", "vidio")}, "modalities", "one of vit, convnet, image_text"),
        ({"variants": ("residual", "mch")}, "variants", "did you mean 'mhc'?"),
        ({"variants": ("mhc",)}, "variants", "with residual"),
        ({"seeds": 0}, "seeds", "an integer ≥ 1"),
        ({"steps": 0}, "steps", "an integer ≥ 1"),
        ({"threads": -1}, "threads", "an integer ≥ 0"),
    ],
)
def test_bad_options(change, field, part):
    with pytest.raises(InputError) as caught:
        modalities.run(replace(TINY, **change))
    assert caught.value.field == field
    assert part in str(caught.value)


def test_quick_is_smaller_and_says_so():
    options = modalities.quick(modalities.ModalityOptions())
    assert (options.quick, options.seeds, options.threads) == (True, 1, 1)
    assert options.steps < modalities.ModalityOptions().steps / 5
    notes = modalities.run(replace(options, steps=1, modalities=("vit",))).notes
    assert any("60 s" in note for note in notes)


def test_threads_are_put_back(report):
    before = torch.get_num_threads()
    modalities.run(replace(TINY, seeds=1, steps=1, modalities=("vit",), variants=("residual",)))
    assert torch.get_num_threads() == before
