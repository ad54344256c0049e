"""The precision bench: whole steps in turns, the processor's instructions, ratios within the rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from laneway.bench import precision
from laneway.core import InputError

TINY = precision.PrecisionOptions(dim=32, layers=1, context=16, batch_size=2, threads=1, seconds=0.01)


@pytest.fixture(scope="module")
def report():
    return precision.run(TINY)


def test_rows_and_summary(report):
    rows = report.tables["precision"]
    assert [(row["variant"], row["dtype"]) for row in rows] == [
        (variant, dtype) for variant in ("residual", "mhc") for dtype in ("fp32", "bf16")
    ]
    assert len({tuple(row) for row in rows}) == 1
    for row in rows:
        assert row["rounds"] >= 7
        assert row["fp32_over_low"] <= row["fp32_over"] <= row["fp32_over_high"]
        assert row["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert rows[0]["fp32_over"] == rows[2]["fp32_over"] == 1.0
    for variant, row in zip(("residual", "mhc"), rows[1::2], strict=True):
        found = report.summary[variant]["fp32_over_bf16"]
        assert found == {"value": row["fp32_over"], "low": row["fp32_over_low"], "high": row["fp32_over_high"]}
        assert row["fp32_over"] == pytest.approx(rows[0 if variant == "residual" else 2]["wall_ms"] / row["wall_ms"], rel=0.8)
    assert report.notes == [precision.processor_line()]


def test_both_precisions_train_the_same_network(report):
    loss = {(row["variant"], row["dtype"]): row["loss"] for row in report.tables["precision"]}
    for variant in ("residual", "mhc"):
        assert loss[variant, "bf16"] != loss[variant, "fp32"], "the two are not the same arithmetic"
        assert loss[variant, "bf16"] == pytest.approx(loss[variant, "fp32"], rel=0.02)


@pytest.mark.parametrize(
    ("text", "have"),
    [
        ("flags\t\t: fpu sse avx2 avx512f avx512_bf16 amx_bf16\n", ["avx512_bf16", "amx_bf16"]),
        ("flags\t\t: fpu sse avx2 avx512f avx512_vnni\n", []),
        ("Features\t: fp asimd bf16 i8mm\n", ["bf16"]),
        ("model name\t: an amx_bf16 processor\nflags\t\t: fpu\n", []),
    ],
)
def test_instructions_are_read_from_the_list_of_features(tmp_path, text, have):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert precision.bf16_instructions(path) == have


def test_without_such_a_list_torch_is_asked(tmp_path):
    looks = (torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported())
    assert precision.bf16_instructions(tmp_path / "none") == [
        name for name, have in zip(("avx512_bf16", "amx_bf16"), looks, strict=True) if have
    ]


@pytest.mark.parametrize(
    ("change", "field", "part"),
    [
        ({"variants": ("mch",)}, "variants", "did you mean 'mhc'?"),
        ({"dim": 30}, "model.dim", "a multiple of"),
        ({"layers": 0}, "model.layers", "an integer ≥ 1"),
        ({"batch_size": 0}, "batch_size", "an integer ≥ 1"),
        ({"seconds": 0.0}, "seconds", "a number > 0"),
        ({"threads": -1}, "threads", "an integer ≥ 0"),
    ],
)
def test_bad_options(change, field, part):
    with pytest.raises(InputError) as caught:
        precision.run(replace(TINY, **change))
    assert caught.value.field == field
    assert part in str(caught.value)


def test_quick_is_smaller_and_says_so():
    options = precision.quick(precision.PrecisionOptions())
    assert (options.quick, options.dim, options.layers, options.threads) == (True, 64, 2, 1)
    notes = precision.run(replace(TINY, quick=True)).notes
    assert any("60 s" in note for note in notes)
