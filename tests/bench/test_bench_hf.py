"""The bench of transformers' models: what it compares is one model, and it says what part of a step the connections are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from laneway.core import InputError

pytest.importorskip("transformers.models.hy_v4", reason="needs the `hf` extra: transformers ≥ 5.24")
from laneway.bench import hf, hf_models
from laneway.checkpoint.convert import quiet_transformers

pytestmark = pytest.mark.peers
TINY = hf.HFOptions(models=("deepseek_v4", "hy_v4"), dim=128, layers=1, batch_size=1, time=16, seconds=0.0, quick=True, threads=1)


def test_rows_and_summary():
    report = hf.run(TINY)
    rows = report.tables["hf"]
    assert [(row["model"], row["variant"]) for row in rows] == [
        (model, variant) for model in TINY.models for variant in ("transformers", "accelerate_hf", "plain_residual")
    ]
    assert len({tuple(row) for row in rows}) == 1
    by_variant = {row["variant"]: row for row in rows[:3]}
    assert by_variant["accelerate_hf"]["over_accelerated"] == 1.0
    assert by_variant["plain_residual"]["connections_share"] == 0.0
    summary = report.summary["deepseek_v4 fp32 1t"]
    assert summary["step_speedup"]["value"] == by_variant["transformers"]["over_accelerated"]
    assert summary["connections_share_after"]["value"] == by_variant["accelerate_hf"]["connections_share"]
    assert summary["step_memory_over_transformers"]["value"] <= 1.0
    assert summary["loss_difference"] < 1e-5


@pytest.mark.parametrize("name", list(hf_models.BUILDERS))
def test_the_plain_model_adds_every_sublayer_to_one_stream(name):
    """One stream and x + f: the streams that leave a layer are those that entered plus what its two parts gave."""
    with quiet_transformers():
        model = hf_models.plain_residual(name, torch.float32, dim=128, layers=1).eval()
    layer = next(m for m in model.modules() if type(m).__name__.endswith("DecoderLayer"))
    seen = {}
    for part in ("self_attn", "mlp"):
        getattr(layer, part).register_forward_hook(
            lambda _, __, out, part=part: seen.update({part: out[0] if isinstance(out, tuple) else out})
        )
    layer.register_forward_hook(lambda _, args, out: seen.update(x=args[0], y=out[0] if isinstance(out, tuple) else out))
    model(input_ids=torch.randint(4, 100, (1, 12)), use_cache=False)
    torch.testing.assert_close(seen["y"], seen["x"] + (seen["self_attn"] + seen["mlp"]).unsqueeze(2))


@pytest.mark.parametrize(
    ("change", "field", "part"),
    [
        ({"models": ("deepseek_v3",)}, "models", "did you mean 'deepseek_v4'?"),
        ({"dtypes": ("fp64",)}, "dtype", "fp32, bf16"),
        ({"dim": 64}, "dim", "an integer ≥ 128"),
        ({"layers": 0}, "layers", "an integer ≥ 1"),
        ({"threads": -1}, "threads", "an integer ≥ 0"),
    ],
)
def test_bad_options(change, field, part):
    with pytest.raises(InputError) as caught:
        hf.run(replace(TINY, **change))
    assert caught.value.field == field
    assert part in str(caught.value)


def test_quick_is_smaller_and_says_so():
    options = hf.quick(hf.HFOptions())
    assert options.quick
    assert options.threads == 1
    assert options.time * options.dim * options.layers < 512 * 512 * 2 / 10
