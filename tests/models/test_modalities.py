"""Images, and images with text: what holds for every model that is not the GPT."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import laneway as lw
from laneway.models.convnet import ConvNet, ConvNetConfig
from laneway.models.multimodal import ImageTextConfig, ImageTextModel
from laneway.models.vit import ViT, ViTConfig

# Smallest gradient norm of a map's rows of the projection at step 0, as a share of the largest in the model (as in test_start).
FLOOR = 1e-4
RESIDUALS = ("mhc", "mhc-lite", "kronecker", "orthogonal", "identity", "hc")
SMALL = {"dim": 32, "layers": 2, "heads": 2}


@dataclass(frozen=True)
class Case:
    """A model, its small shape and random inputs for it."""

    model: type[nn.Module]
    config: type
    shape: dict
    words: bool = False

    def build(self, residual: str, streams: int = 4, **options) -> nn.Module:
        torch.manual_seed(5)
        return self.model(self.config(**self.shape, residual=residual, streams=streams, **options))

    def inputs(self, batch: int = 6) -> tuple[torch.Tensor, ...]:
        images = torch.rand(batch, 1, 8, 8)
        return (images, torch.randint(0, 13, (batch, 6))) if self.words else (images,)


CASES = {
    "vit": Case(ViT, ViTConfig, SMALL),
    "convnet": Case(ConvNet, ConvNetConfig, {"widths": (8, 16), "blocks": 2}),
    "image and text": Case(ImageTextModel, ImageTextConfig, {**SMALL, "patch": 4, "vocab_size": 13, "context": 6}, words=True),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def loss_of(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    out = model(*inputs)
    return F.cross_entropy(out, torch.arange(len(out)) % out.shape[1])


def plain_blocks(trunk: nn.Module, x: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """The encoder as it is written without streams."""
    for block in trunk.blocks:
        x = x + block.attention(block.norm_attention(x), valid)
        x = x + block.mlp(block.norm_mlp(x))
    return trunk.norm(x)


def plain(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The network as it is written without hyper-connections."""
    if isinstance(model, ViT):
        return model.head(plain_blocks(model.trunk, model.embedding(inputs[0])).mean(1))
    if isinstance(model, ImageTextModel):
        images, words = inputs
        parts = [model.answer.expand(len(images), 1, -1), model.patches(images), model.words(words) + model.position]
        valid = torch.cat([torch.ones(len(images), 1 + model.config.patches, dtype=torch.bool), words != 0], dim=1)
        return model.head(plain_blocks(model.trunk, torch.cat(parts, dim=1), valid)[:, 0])
    x = model.stem(inputs[0]).contiguous(memory_format=torch.channels_last)
    for layer in model.layers:
        x = x + layer.out(F.gelu(layer.conv(layer.norm(x)))) if hasattr(layer, "site") else layer.conv(x)
    return model.head(model.norm(x.movedim(1, -1)).mean((1, 2)))


@EVERY
@pytest.mark.parametrize(("residual", "streams"), [("residual", 4), ("mhc", 1)])
def test_one_stream_is_the_plain_network_bit_for_bit(case, residual, streams):
    model, inputs = case.build(residual, streams), case.inputs()
    results = []
    for forward in (lambda: model(*inputs), lambda: plain(model, inputs)):
        model.zero_grad()
        out = forward()
        F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long)).backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
    assert torch.equal(results[0][0], results[1][0])
    # Gradients to rounding: a norm uses its input twice, and autograd adds those two and the residual's in another order.
    for a, b in zip(results[0][1:], results[1][1:], strict=True):
        assert (a - b).abs().max() <= 3e-6 * b.abs().max()


@EVERY
@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("streams", [2, 3, 4])
def test_the_first_function_is_the_plain_networks(case, residual, streams):
    inputs, options = case.inputs(), {"norm_eps": 1e-12} if residual == "hc" else {}  # hc: up to the last norm's epsilon
    want = case.build("residual", **options)(*inputs)
    got = case.build(residual, streams, **options)(*inputs)
    assert (got - want).abs().max() < 5e-6 * want.abs().max()


@EVERY
@pytest.mark.parametrize("residual", ["mhc", "mhc-lite", "orthogonal"])
def test_gradients_reach_every_map_of_every_site(case, residual):
    model = case.build(residual)
    loss_of(model, case.inputs(16)).backward()
    sites = [module for module in model.modules() if isinstance(module, lw.HyperConnection)]
    assert [site.site for site in sites] == list(range(4))
    norms = [[part.norm().item() for part in site.fn.grad.split([4, 4, len(site.fn) - 8])] for site in sites]
    largest = max(map(max, norms))
    norms[0] = norms[0][1:]  # the first site reads multiples of one embedding, and its norm takes the multiple away
    assert min(map(min, norms)) > FLOOR * largest
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@EVERY
def test_the_streams_carry_something_once_the_maps_have_moved(case):
    """The maps are used: other maps give another function."""
    model, inputs = case.build("mhc"), case.inputs()
    before = model(*inputs)
    for module in model.modules():
        if isinstance(module, lw.HyperConnection):
            nn.init.normal_(module.fn, std=0.3)
    assert (model(*inputs) - before).abs().max() > 1e-2 * before.abs().max()


@EVERY
def test_same_seed_same_weights_whatever_the_residual(case):
    states = [case.build(residual).state_dict() for residual in ("residual", "mhc", "hc")]
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name])
        assert torch.equal(states[0][name], states[2][name])


@EVERY
def test_an_image_does_not_see_another(case):
    model, inputs = case.build("mhc"), case.inputs(4)
    alone = model(*(part[1:2] for part in inputs))
    torch.testing.assert_close(model(*inputs)[1:2], alone)


@EVERY
def test_autocast_narrows_the_streams_and_not_the_maps(case):
    model, inputs, seen = case.build("mhc"), case.inputs(), []
    model.get_submodule("readout" if hasattr(model, "readout") else "trunk.readout").register_forward_pre_hook(
        lambda _, given: seen.append(given[0].dtype)
    )
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, inputs)
    loss.backward()
    assert seen == [torch.bfloat16]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    assert abs(loss.item() - loss_of(model, inputs).item()) < 0.05


@pytest.mark.parametrize(
    ("config", "fields", "field", "part"),
    [
        (ViTConfig, {"dim": 0}, "model.dim", "an integer ≥ 1"),
        (ViTConfig, {"dim": 30, "heads": 4}, "model.dim", "a multiple of heads = 4"),
        (ViTConfig, {"patch": 3}, "model.patch", "a divisor of image_size = 8"),
        (ViTConfig, {"residual": "mch"}, "model.residual", "did you mean 'mhc'?"),
        (ViTConfig, {"streams": 0}, "model.streams", "an integer ≥ 1"),
        (ViTConfig, {"residual": "mhc-lite", "streams": 9}, "streams", "too large"),
        (ViTConfig, {"mlp_dim": 0}, "model.mlp_dim", "an integer ≥ 1"),
        (ViTConfig, {"init_std": 0.0}, "model.init_std", "a number > 0"),
        (ViTConfig, {"norm_eps": -1.0}, "model.norm_eps", "a number > 0"),
        (ViTConfig, {"logit_cap": -1.0}, "model.logit_cap", "0 for none"),
        (ConvNetConfig, {"widths": ()}, "model.widths", "one integer ≥ 1 for each stage"),
        (ConvNetConfig, {"widths": (8, 0)}, "model.widths", "one integer ≥ 1 for each stage"),
        (ConvNetConfig, {"blocks": 0}, "model.blocks", "an integer ≥ 1"),
        (ImageTextConfig, {"context": 0}, "model.context", "an integer ≥ 1"),
        (ImageTextConfig, {"vocab_size": -1}, "model.vocab_size", "an integer ≥ 1"),
    ],
)
def test_configuration_errors_name_the_field(config, fields, field, part):
    model = {ViTConfig: ViT, ConvNetConfig: ConvNet, ImageTextConfig: ImageTextModel}[config]
    with pytest.raises(lw.InputError) as caught:
        model(config(**fields))
    assert caught.value.field == field
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("case", "inputs", "field"),
    [
        ("vit", (torch.rand(2, 1, 6, 8),), "images"),
        ("vit", (torch.rand(2, 3, 8, 8),), "images"),
        ("convnet", (torch.rand(2, 3, 8, 8),), "images"),
        ("convnet", (torch.rand(2, 1, 1, 8),), "images"),
        ("image and text", (torch.rand(2, 1, 8, 8), torch.zeros(2, 5, dtype=torch.long)), "words"),
        ("image and text", (torch.rand(2, 1, 8, 8), torch.zeros(3, 6, dtype=torch.long)), "words"),
    ],
)
def test_inputs_of_another_shape_are_refused(case, inputs, field):
    with pytest.raises(lw.InputError) as caught:
        CASES[case].build("mhc")(*inputs)
    assert caught.value.field == field


def test_padding_is_read_by_no_place():
    case = CASES["image and text"]
    model, (images, words) = case.build("mhc"), case.inputs()
    words[:, 3:] = 0
    before = model(images, words)
    with torch.no_grad():
        model.words.weight[0] += 3
        model.position[3:] += 3
    assert torch.equal(model(images, words), before)


def test_a_convnet_takes_any_picture_and_its_streams_lie_channels_last():
    model, layouts = CASES["convnet"].build("mhc"), []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, __, out: layouts.append(out.movedim((1, 2), (-2, -1)).is_contiguous()))
    assert model(torch.rand(2, 1, 13, 6)).shape == (2, 10)
    # The strided convolution leaves them one after another; the next site brings them together in one copy.
    assert layouts == [True, True, False, True, True]
