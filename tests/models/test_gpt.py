"""The GPT: shapes, causality, rotary positions, configuration errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import laneway as lw
from laneway.models.gpt import GPT, RESIDUALS, GPTConfig, rotary_table, rotate

SMALL = {"dim": 32, "layers": 2, "heads": 2, "context": 16}


@pytest.mark.parametrize("residual", RESIDUALS)
def test_logits_gradients_and_learning(residual):
    torch.manual_seed(0)
    model, tokens = GPT(GPTConfig(**SMALL, residual=residual)), torch.randint(0, 256, (2, 16))
    optimizer = torch.optim.AdamW(lw.param_groups(model), lr=3e-3)
    losses = []
    for _ in range(30):
        logits = model(tokens)
        assert logits.shape == (2, 16, 256)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert not without


@pytest.mark.parametrize("residual", RESIDUALS)
def test_no_token_sees_a_later_one(residual):
    model, tokens = GPT(GPTConfig(**SMALL, residual=residual)), torch.randint(0, 256, (1, 16))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, lw.HyperConnection) and not module.disabled:
                module.fn.normal_(std=0.3)
        before = model(tokens)
        tokens[0, 9:] = 255 - tokens[0, 9:]
        after = model(tokens)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().max() > 1e-3


def test_rotation_depends_on_the_distance_alone():
    table = rotary_table(32, 8, 10_000.0)
    q, k = torch.randn(8), torch.randn(8)
    scores = rotate(q.expand(1, 1, 32, 8), table) @ rotate(k.expand(1, 1, 32, 8), table).transpose(-1, -2)
    for distance in (0, 3, 10):
        diagonal = scores[0, 0].diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_head_is_tied_and_sizes_are_as_said():
    model = GPT(GPTConfig(**SMALL))
    assert model.head.weight is model.embedding.weight
    assert GPTConfig(dim=128).hidden == 352
    assert GPTConfig(ffn_dim=100).hidden == 100


def test_same_seed_same_weights_whatever_the_residual():
    states = []
    for residual in ("residual", "mhc", "hc"):
        torch.manual_seed(3)
        states.append(GPT(GPTConfig(**SMALL, residual=residual)).state_dict())
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name])
        assert torch.equal(states[0][name], states[2][name])


@pytest.mark.parametrize(
    ("fields", "field", "part"),
    [
        ({"dim": 0}, "model.dim", "an integer ≥ 1"),
        ({"dim": 30, "heads": 4}, "model.dim", "a multiple of 2·heads = 8"),
        ({"streams": 0}, "model.streams", "an integer ≥ 1"),
        ({"layers": -1}, "model.layers", "an integer ≥ 1"),
        ({"residual": "mch"}, "model.residual", "did you mean 'mhc'?"),
        ({"residual": "mhc-lite", "streams": 9}, "streams", "too large"),
        ({"logit_cap": -1.0}, "model.logit_cap", "a number > 0"),
        ({"norm_eps": 0.0}, "model.norm_eps", "a number > 0"),
        ({"ffn_dim": 0}, "model.ffn_dim", "an integer ≥ 1"),
    ],
)
def test_configuration_errors_name_the_field(fields, field, part):
    with pytest.raises(lw.InputError) as caught:
        GPT(GPTConfig(**fields))
    assert caught.value.field == field
    assert part in str(caught.value)


def test_all_problems_are_listed():
    fields = [problem.field for problem in GPTConfig(dim=0, layers=0, residual="x").problems()]
    assert fields == ["model.layers", "model.dim", "model.residual"]


def test_a_batch_longer_than_the_context_is_refused():
    with pytest.raises(lw.InputError, match="at most context = 16"):
        GPT(GPTConfig(**SMALL))(torch.zeros(1, 17, dtype=torch.long))


def test_cap_can_be_switched_off_from_a_file():
    assert GPT(GPTConfig(**SMALL, logit_cap=0.0)).blocks[0].site_ffn.cap is None


@pytest.mark.parametrize("residual", ["residual", "hc", "mhc"])
def test_autocast_narrows_the_streams_and_not_the_maps(residual):
    model, seen = GPT(GPTConfig(**SMALL, residual=residual)), []
    model.readout.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    tokens = torch.randint(0, 256, (2, 16))
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    loss.backward()
    assert seen == [torch.bfloat16]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    assert abs(loss.item() - F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).item()) < 0.05
