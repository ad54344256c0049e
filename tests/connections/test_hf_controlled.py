"""Controls on transformers' models: converted ones, and those whose own hyper-connections ours stand in for (MoE)."""

from __future__ import annotations

import itertools

import pytest

import laneway as lw
from laneway.connections import hf
from laneway.connections.controls import CONTROLS, build

pytest.importorskip("transformers.models.glm5_next", reason="needs the `hf` extra: transformers ≥ 5.24")
from convert_cases import batch, loss_of, plain
from hf_models import deepseek_v4, glm5_next, hy_v4, tokens

from control_steps import steps_and_removal

pytestmark = pytest.mark.peers
CONVERTED = ("llama", "gpt2", "gpt_neox", "vit")
OWN = {"deepseek_v4": deepseek_v4, "glm5_next": glm5_next}


def test_converted_models_take_every_control_and_give_it_back():
    models = {kind: (lw.convert(plain(kind), streams=3), batch(kind)) for kind in CONVERTED}
    for name, kind in zip(CONTROLS, itertools.cycle(CONVERTED), strict=False):
        model, inputs = models[kind]

        def output(model=model, inputs=inputs):
            return model(**inputs).logits

        steps_and_removal(model, name, output, lambda m=model, k=kind, i=inputs: loss_of(m, k, i))


@pytest.mark.parametrize("kind", ["deepseek_v4", pytest.param("glm5_next", marks=pytest.mark.slow)])
def test_a_mixture_of_experts_with_sites_of_its_own_does_too(kind):
    model, ids = hf.accelerate_hf(OWN[kind]()), tokens()
    for name in CONTROLS:
        steps_and_removal(model, name, lambda: model(ids).logits, lambda: model(ids, labels=ids).loss)


def test_sites_without_a_map_between_streams_have_nothing_to_control():
    with pytest.raises(lw.InputError, match="a model with hyper-connections of two or more streams"):
        build("constant", hf.accelerate_hf(hy_v4()))
