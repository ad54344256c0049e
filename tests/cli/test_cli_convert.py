"""The convert verb: what it writes, what it refuses, and that nothing is left of a failure."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import laneway as lw
from laneway.cli import main

transformers = pytest.importorskip("transformers", minversion="5.24", reason="needs transformers 5.24")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A saved Llama in bf16 with a tokenizer's files beside it."""
    folder = tmp_path_factory.mktemp("source") / "plain"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, initializer_range=0.2, max_position_embeddings=24)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "merges.txt").write_text("a b\n")
    (folder / "README.md").write_text("about the plain model\n")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    return folder


def files(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_it_writes_a_model_that_loads_and_computes_the_same(source, tmp_path, capsys):
    out = tmp_path / "deep" / "wide"
    assert main(["convert", str(source), str(out), "--streams", "3", "--manifold", "birkhoff", "--json"]) == 0
    told, error = capsys.readouterr()
    found = json.loads(told)
    assert error == ""
    assert (found["sites"], found["streams"], found["manifold"], found["class"]) == (4, 3, "birkhoff", "LlamaForCausalLM")
    assert 0 < found["largest_difference"] < 1e-5 * max(1, found["largest_output"])
    assert files(out) >= {"config.json", "model.safetensors", "tokenizer.json", "merges.txt", "generation_config.json"}
    assert not files(out) & {"README.md", "pytorch_model.bin.index.json"}
    assert files(out.parent) == {"wide"}
    model, plain = lw.load_converted(out), transformers.LlamaForCausalLM.from_pretrained(source)
    assert found["parameters"] == sum(p.numel() for p in plain.parameters())
    assert found["parameters"] + found["parameters_added"] == sum(p.numel() for p in model.parameters())
    tokens = torch.randint(32, (2, 9))
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=0, atol=1e-5)


def test_it_says_what_it_did(source, tmp_path, capsys):
    assert main(["convert", str(source), str(tmp_path / "wide")]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    assert "LlamaForCausalLM in float32: 4 sites, 4 streams, sinkhorn" in out
    assert str(tmp_path / "wide") in out.splitlines()[-1]


def refused(capsys, *words) -> tuple[int, str]:
    capsys.readouterr()  # what transformers said while the test saved a model
    code = main(["convert", *map(str, words)])
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1, error
    return code, error


def test_an_existing_folder_is_left_alone(source, tmp_path, capsys):
    (tmp_path / "wide").mkdir()
    code, error = refused(capsys, source, tmp_path / "wide")
    assert code == 2
    assert "a path where nothing is yet" in error
    assert files(tmp_path / "wide") == set()


def _opt(folder, source):
    transformers.OPTConfig(architectures=["OPTForCausalLM"]).save_pretrained(folder)


def _nothing(folder, source):
    pass


def _converted(folder, source):
    model = lw.convert(transformers.LlamaForCausalLM.from_pretrained(source))
    model.save_pretrained(folder)


def _no_json(folder, source):
    folder.mkdir()
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("make", "options", "part"),
    [
        (_nothing, [], "it holds no config.json"),
        (_opt, [], "got 'opt, OPTForCausalLM'"),
        (_converted, [], "it is converted already"),
        (_no_json, [], "model: got"),
        (shutil.copytree, ["--streams", "0"], "streams: got 0"),
        (shutil.copytree, ["--manifold", "sinkhron"], "did you mean 'sinkhorn'?"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(make, options, part, source, tmp_path, capsys):
    folder = tmp_path / "model"
    if make is shutil.copytree:
        shutil.copytree(source, folder)
    else:
        make(folder, source)
    before = files(tmp_path)
    code, error = refused(capsys, folder, tmp_path / "wide", *options)
    assert code == 2
    assert part in error
    assert files(tmp_path) == before


def _cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _without_a_weight(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _without_weights(folder):
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "part"),
    [(_cut, "model"), (_without_a_weight, "1 missing keys, first model.layers.1.mlp.up_proj"), (_without_weights, "model")],
)
def test_damaged_files_are_one_line_and_leave_nothing(damage, part, source, tmp_path, capsys):
    shutil.copytree(source, tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin.index.json").unlink()
    damage(tmp_path / "model")
    code, error = refused(capsys, tmp_path / "model", tmp_path / "wide")
    assert code == 1
    assert part in error
    assert files(tmp_path) == {"model"}


def test_a_place_that_cannot_be_written_is_one_line(source, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, error = refused(capsys, source, tmp_path / "file" / "wide")
    assert code == 1
    assert "file" in error


def test_a_failure_while_writing_leaves_nothing(source, tmp_path, capsys, monkeypatch):
    def full(self, folder):
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(transformers.LlamaForCausalLM, "save_pretrained", full)
    code, error = refused(capsys, source, tmp_path / "wide")
    assert code == 1
    assert "no space left on the disk" in error
    assert files(tmp_path) == set()
