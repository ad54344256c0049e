"""Loading runs no code that came with the files, even where the checksums are right."""

import dataclasses
import pickle
import zipfile

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from laneway.checkpoint import CheckpointStore, dcp, manifest
from laneway.core import LanewayError

RAN = []


def payload(*_):
    RAN.append(True)


class Attack:
    def __reduce__(self):
        return payload, ()


@pytest.fixture
def saved(store: CheckpointStore) -> CheckpointStore:
    store.save(1, {"w": torch.arange(4.0)})
    RAN.clear()
    return store


def forge(store: CheckpointStore, name: str, data: bytes) -> None:
    """Replace a file and make the manifest agree, as someone with write access could."""
    folder = store.folder(1)
    (folder / name).write_bytes(data)
    content = manifest.read(folder)
    files = {**content.files, name: manifest.describe(folder / name)}
    (folder / manifest.NAME).write_bytes(dataclasses.replace(content, files=files).render())
    assert manifest.verify(folder, 1)


ATTACKS = {
    "instead of the metadata": lambda metadata: Attack(),
    "in the planner's data": lambda metadata: dataclasses.replace(metadata, planner_data={"x": Attack()}),
    "in a file's entry": lambda metadata: dataclasses.replace(metadata, storage_data={"w": Attack()}),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_pickle_in_the_metadata_is_not_run(saved, name):
    good = dcp.read_metadata(saved.folder(1))
    forge(saved, ".metadata", pickle.dumps(ATTACKS[name](good)))
    target = {"w": torch.zeros(4)}
    with pytest.raises(LanewayError, match=r"names .*payload, which no checkpoint of tensors needs"):
        saved.load(1, target)
    assert RAN == []
    assert target["w"].tolist() == [0] * 4


@pytest.mark.parametrize(
    "function", [b"os\nsystem", b"builtins\neval", b"torch\nload", b"torch.storage\n_load_from_bytes", b"torch\n__loader__"]
)
def test_no_function_by_its_name(saved, function):
    forge(saved, ".metadata", b"c" + function + b"\n(S'exit'\ntR.")
    with pytest.raises(LanewayError, match="not loaded"):
        saved.load(1, {"w": torch.zeros(4)})


def test_a_pickle_in_the_place_of_a_tensor_is_not_run(saved):
    path = saved.folder(1) / "__0_0.distcp"
    forged = path.with_name("forged")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(forged, "w", zipfile.ZIP_STORED) as target:
        for entry in source.namelist():
            target.writestr(entry, pickle.dumps(Attack(), protocol=2) if entry.endswith("data.pkl") else source.read(entry))
    data = forged.read_bytes()
    forged.unlink()
    metadata = dcp.read_metadata(saved.folder(1))
    (index,) = metadata.storage_data
    metadata.storage_data[index].length = len(data)
    forge(saved, "__0_0.distcp", data)
    forge(saved, ".metadata", pickle.dumps(metadata))
    with pytest.raises(LanewayError, match="loading step 1 failed: UnpicklingError"):
        saved.load(1, {"w": torch.zeros(4)})
    assert RAN == []


def test_a_metadata_file_cannot_point_elsewhere(saved):
    metadata = dcp.read_metadata(saved.folder(1))
    (index,) = metadata.storage_data
    metadata.storage_data[index].relative_path = "../../other"
    forge(saved, ".metadata", pickle.dumps(metadata))
    with pytest.raises(LanewayError, match="points outside its folder"):
        saved.load(1, {"w": torch.zeros(4)})


@pytest.mark.parametrize("data", [b"", b"garbage", pickle.dumps(None), pickle.dumps({"a": 1}), pickle.dumps(Metadata({}))[:40]])
def test_metadata_that_is_none_is_a_clear_error(saved, data):
    forge(saved, ".metadata", data)
    with pytest.raises(LanewayError, match="is no description of tensors"):
        saved.load(1, {"w": torch.zeros(4)})


def test_the_files_name_no_path_of_the_machine(saved):
    for path in saved.folder(1).iterdir():
        assert str(saved.run.path.parent).encode() not in path.read_bytes()


def test_a_checkpoint_is_one_of_torch_s_own(saved):
    """Whoever has torch alone can read it."""
    target = {"w": torch.zeros(4)}
    with pytest.warns(UserWarning, match="intent is to load in a single process"):
        torch.distributed.checkpoint.load(target, checkpoint_id=saved.folder(1))
    assert target["w"].tolist() == [0, 1, 2, 3]


def test_warnings_of_others_are_not_swallowed(store, monkeypatch):
    import warnings

    real = dcp.torch_dcp.save

    def save(*args, **kwargs):
        warnings.warn("something else", UserWarning, stacklevel=1)
        return real(*args, **kwargs)

    monkeypatch.setattr(dcp.torch_dcp, "save", save)
    with pytest.warns(UserWarning, match="something else"):
        store.save(1, {"w": torch.ones(1)})
