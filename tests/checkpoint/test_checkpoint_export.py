"""Exports: other programs can read them, an older one is replaced as a whole, and what is damaged is named."""

import json
import os

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from torch import nn

from laneway.checkpoint import atomic, export, load_export
from laneway.core import InputError, LanewayError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))


STATE = {
    "fp32": torch.randn(3, 4),
    "bf16": torch.randn(5).bfloat16(),
    "int64": torch.arange(3),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "empty_too": torch.empty(0, 4),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
}


def test_tensors_and_config_come_back(tmp_path):
    config = {"dim": 3, "nested": {"list": [1, 2.5, None, "é"]}}
    folder = export(STATE, config, tmp_path / "model")
    state, found = load_export(folder)
    assert found == config
    assert set(state) == set(STATE)
    for name, value in STATE.items():
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name], value), name
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["model"]


def test_another_reader_sees_plain_names(tmp_path):
    export(nn.Sequential(nn.Linear(2, 3)), {}, tmp_path / "model")
    found = safetensors.numpy.load_file(tmp_path / "model" / "model.safetensors")
    assert {name: value.shape for name, value in found.items()} == {"0.weight": (3, 2), "0.bias": (3,)}


def test_tied_weights_are_written_once_and_tied_again(tmp_path):
    model = Tied()
    folder = export(model, {}, tmp_path / "model")
    assert (folder / "model.safetensors").stat().st_size < 2 * 15 * 4 + 250
    with safetensors.safe_open(folder / "model.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == ["embed.weight", "steps"]
        assert json.loads(file.metadata()["tied"]) == {"head.weight": "embed.weight"}
    state, _ = load_export(folder)
    assert state["head.weight"] is state["embed.weight"]
    again = Tied()
    again.load_state_dict(state)
    assert torch.equal(again.head.weight, model.head.weight)
    assert again.steps == 7


def test_views_of_one_storage_are_not_tied(tmp_path):
    base = torch.arange(12.0)
    views = {
        "all": base,
        "start": base[:4],
        "end": base[8:],
        "square": base[:9].reshape(3, 3),
        "turned": base[:9].reshape(3, 3).t(),
    }
    state, _ = load_export(export(views, {}, tmp_path / "model"))
    assert {name: torch.equal(value, views[name]) for name, value in state.items()} == dict.fromkeys(views, True)
    assert len({value.data_ptr() for value in state.values()}) == 5


def test_what_was_loaded_does_not_hang_on_the_file(tmp_path):
    folder = export({"w": torch.ones(5000)}, {}, tmp_path / "model")
    state, _ = load_export(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    assert state["w"].sum() == 5000


def test_an_older_export_is_replaced_as_a_whole(tmp_path):
    tokenizer = tmp_path / "bpe.json"
    tokenizer.write_text("{}")
    folder = export({"a": torch.ones(1)}, {"version": 1}, tmp_path / "out" / "model", tokenizer_file=tokenizer)
    assert (folder / "tokenizer.json").read_text() == "{}"
    export({"b": torch.ones(2)}, {"version": 2}, folder)
    state, config = load_export(folder)
    assert (list(state), config) == (["b"], {"version": 2})
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    assert os.listdir(folder.parent) == ["model"]


def test_a_failure_in_the_second_rename_brings_the_older_one_back(tmp_path, monkeypatch):
    folder = export({"a": torch.ones(1)}, {"version": 1}, tmp_path / "model")
    real = type(folder).rename

    def rename(path, target):
        if path.name.startswith(".tmp_"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, target)

    monkeypatch.setattr(type(folder), "rename", rename)
    with pytest.raises(LanewayError, match=r"exporting to .*model failed: Permission denied"):
        export({"a": torch.zeros(1)}, {"version": 2}, folder)
    assert load_export(folder)[1] == {"version": 1}
    assert os.listdir(tmp_path) == ["model"]


def test_killed_between_the_renames_the_older_one_counts(tmp_path):
    folder = export({"a": torch.ones(1)}, {"version": 1}, tmp_path / "model")
    folder.rename(atomic.aside(folder))
    (tmp_path / ".tmp_model").mkdir()
    assert load_export(folder)[1] == {"version": 1}
    export({"a": torch.ones(1)}, {"version": 2}, folder)
    assert load_export(folder)[1] == {"version": 2}
    assert os.listdir(tmp_path) == ["model"]


def test_truncated_weights_are_an_error_at_every_length(tmp_path):
    folder = export({"w": torch.arange(20.0), "v": torch.ones(3)}, {}, tmp_path / "model")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(LanewayError, match=r"model\.safetensors is cut or damaged"):
            load_export(folder)
    path.write_bytes(whole)
    assert load_export(folder)[0]["v"].sum() == 3


def test_a_truncated_config_is_an_error_at_every_length(tmp_path):
    folder = export({"w": torch.ones(1)}, {"dim": 3, "name": "x"}, tmp_path / "model")
    path = folder / "config.json"
    whole = path.read_bytes()
    for length in range(len(whole) - 1):  # the last byte is the newline
        path.write_bytes(whole[:length])
        with pytest.raises(LanewayError, match=r"config\.json is no JSON, it is cut or damaged"):
            load_export(folder)
    path.write_text("[1, 2]")
    with pytest.raises(LanewayError, match="no JSON object"):
        load_export(folder)


def test_a_tie_to_nothing_is_damage(tmp_path):
    folder = export({"w": torch.ones(1)}, {}, tmp_path / "model")
    for tied in ('{"head": "gone"}', "not JSON", "[1]"):
        safetensors.numpy.save_file({"w": np.ones(1)}, folder / "model.safetensors", metadata={"tied": tied})
        with pytest.raises(LanewayError, match="cut or damaged"):
            load_export(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    folder = export({"w": torch.ones(1)}, {}, tmp_path / "model")
    (folder / name).unlink()
    with pytest.raises(InputError, match=f"it holds no {name}"):
        load_export(folder)


def test_no_such_export(tmp_path):
    with pytest.raises(InputError, match=r"folder: got .*nowhere"):
        load_export(tmp_path / "nowhere")


BAD = {
    "config no dict": ({"config": [1]}, "config: got 'list'"),
    "config no JSON": ({"config": {"a": object()}}, "plain JSON data"),
    "config not finite": ({"config": {"a": float("nan")}}, "plain JSON data"),
    "no model": ({"model": 3}, "model: got 'int'"),
    "no tensor": ({"model": {"a": 3}}, "model: got 'a'"),
    "no tokenizer": ({"tokenizer_file": "nowhere.json"}, "tokenizer_file: got 'nowhere.json'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_nothing_is_written(tmp_path, name):
    given, message = BAD[name]
    with pytest.raises(InputError, match=message):
        export(**{"model": {"a": torch.ones(1)}, "config": {}, "folder": tmp_path / "model", **given})
    assert os.listdir(tmp_path) == []


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(InputError, match=r"it holds 'precious\.txt'"):
        export({"a": torch.ones(1)}, {}, tmp_path)
    with pytest.raises(InputError, match="there is a file of this name"):
        export({"a": torch.ones(1)}, {}, tmp_path / "precious.txt")
    assert os.listdir(tmp_path) == ["precious.txt"]


def test_extra_state_that_is_no_tensor_is_refused(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(InputError, match="_extra_state"):
        export(Extra(1, 1), {}, tmp_path / "model")
