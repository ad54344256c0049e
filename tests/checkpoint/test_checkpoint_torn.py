"""A checkpoint that is cut, changed or incomplete in any place is never loaded; the one before it is, and it is said once."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from laneway.checkpoint import CheckpointStore, manifest
from laneway.core import LanewayError
from laneway.rundir import RunDirectory

FILES = [".metadata", "__0_0.distcp", "plain.json", "manifest.json"]


def notices(run: RunDirectory) -> list[str]:
    return [event["message"] for event in run.read_events() if event["kind"] == "notice"]


def positions(size: int, number: int, seed: int) -> list[int]:
    """The first and last few byte positions of a file and a sample of those between."""
    edge = {*range(min(8, size)), *range(max(0, size - 8), size)}
    return sorted(edge | set(random.Random(seed).sample(range(size), min(size, number))))


def assert_falls_back(run: RunDirectory, name: str) -> None:
    store = CheckpointStore(run, keep=3)
    assert store.latest_step() == 2, name
    assert len(store.notices) == 1
    assert "step_00000003 is skipped" in store.notices[0]
    state = {"w": torch.zeros(5)}
    with pytest.raises(LanewayError, match="torn or damaged"):
        store.load(3, state)
    assert state["w"].tolist() == [0] * 5
    store.load(2, state)
    assert state["w"].tolist() == [2] * 5


def test_a_checkpoint_consists_of_the_files_tested_here(three):
    assert sorted(path.name for path in three.folder(3).iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_truncation_at_any_byte_is_seen(three, name):
    path = three.folder(3) / name
    whole = path.read_bytes()
    for position in positions(len(whole), 30, seed=1):
        path.write_bytes(whole[:position])
        assert_falls_back(three.run, f"{name} cut at {position}")
    path.write_bytes(whole)
    assert CheckpointStore(three.run).latest_step() == 3


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_seen(three, name):
    path = three.folder(3) / name
    whole = path.read_bytes()
    for position in positions(len(whole), 30, seed=2):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        assert_falls_back(three.run, f"{name} flipped at {position}")
    path.write_bytes(whole)
    assert CheckpointStore(three.run).latest_step() == 3


def test_every_byte_of_the_manifest_counts(three):
    """Without the rest of the store, so that all positions and several bits of each can be tried."""
    path = three.folder(3) / "manifest.json"
    whole = path.read_bytes()
    for position in range(len(whole)):
        changed = bytearray(whole)
        for flip in (0x01, 0x20, 0x80):
            changed[position] = whole[position] ^ flip
            path.write_bytes(changed)
            with pytest.raises(manifest.TornError):
                manifest.verify(three.folder(3), 3)
        path.write_bytes(whole[:position])
        with pytest.raises(manifest.TornError):
            manifest.verify(three.folder(3), 3)


@pytest.mark.parametrize("name", FILES)
def test_bytes_added_at_the_end_are_seen(three, name):
    with (three.folder(3) / name).open("ab") as file:
        file.write(b"\n")
    assert_falls_back(three.run, name)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_seen(three, name):
    (three.folder(3) / name).unlink()
    assert_falls_back(three.run, name)


@pytest.mark.parametrize("name", FILES)
def test_a_folder_in_the_place_of_a_file_is_seen(three, name):
    (three.folder(3) / name).unlink()
    (three.folder(3) / name).mkdir()
    assert_falls_back(three.run, name)


def test_an_empty_folder_is_no_checkpoint(three):
    shutil.rmtree(three.folder(3))
    three.folder(3).mkdir()
    assert_falls_back(three.run, "folder")


def test_a_folder_under_another_step_s_name_is_no_checkpoint(three):
    three.folder(3).rename(three.folder(7))
    shutil.copytree(three.folder(7), three.folder(3))
    store = CheckpointStore(three.run)
    assert store.latest_step() == 3
    assert "step_00000007 is skipped: manifest.json is that of step 3" in store.notices[0]


def test_files_of_two_checkpoints_do_not_mix(three):
    for name in (".metadata", "__0_0.distcp", "plain.json"):
        shutil.copy(three.folder(1) / name, three.folder(3) / name)
    assert_falls_back(three.run, "mixed")


def test_it_is_said_once(three):
    (three.folder(3) / "plain.json").unlink()
    for _ in range(3):
        assert three.latest_step() == 2
    expected = "checkpoint step_00000003 is skipped: plain.json is missing; step_00000002 is used instead"
    assert three.notices == [expected]
    assert notices(three.run) == [expected]


def test_fallback_goes_on_to_the_newest_good_one(three):
    (three.folder(3) / "manifest.json").unlink()
    with (three.folder(2) / "__0_0.distcp").open("r+b") as file:
        file.seek(40)
        file.write(b"\xff\xfe")
    assert three.latest_step() == 1
    assert len(three.notices) == 2
    state = {"w": torch.zeros(5), "cursor": None}
    assert three.load_latest(state) == 1
    assert (state["w"][0].item(), state["cursor"]) == (1, 1)


def test_an_older_torn_one_is_no_news(three):
    (three.folder(1) / "plain.json").unlink()
    assert three.latest_step() == 3
    assert three.notices == []


def test_none_good_is_a_clear_error(three):
    for step in (1, 2, 3):
        (three.folder(step) / "manifest.json").unlink()
    assert three.latest_step() is None
    assert len(three.notices) == 3
    with pytest.raises(LanewayError, match=r"no checkpoint to load \(.*step_00000002: it has no manifest\.json"):
        three.load_latest({"w": torch.zeros(5)})


def test_no_checkpoint_at_all(store):
    assert store.latest_step() is None
    assert store.notices == []
    with pytest.raises(LanewayError, match=r"no checkpoint to load \(there is none"):
        store.load_latest({})
    with pytest.raises(LanewayError, match="steps with a checkpoint: none"):
        store.load(4, {})


def test_a_step_that_was_not_saved_names_those_that_were(three):
    with pytest.raises(LanewayError, match="steps with a checkpoint: 1, 2, 3"):
        three.load(4, {})


def test_a_later_format_is_named_as_such(three):
    path = three.folder(3) / "manifest.json"
    fields = json.loads(path.read_bytes())
    fields.pop("sha256")
    path.write_bytes(manifest.Manifest(**{**fields, "format": 2}).render())
    with pytest.raises(LanewayError, match="format 2, made by a later version"):
        three.load(3, {})


def test_a_notice_that_cannot_be_written_does_not_stop_a_reader(three):
    (three.folder(3) / "plain.json").unlink()
    three.run.events.mkdir()  # opening it for appending fails, for root too
    assert three.latest_step() == 2
    assert "could not be written" in three.notices[1]


def test_latest_is_not_trusted(three):
    for text in ("step_00000001\n", "", "nonsense", "step_00000009\n"):
        three.run.latest.write_text(text)
        assert CheckpointStore(three.run).latest_step() == 3
    three.run.latest.unlink()
    assert CheckpointStore(three.run).latest_step() == 3


def test_other_things_in_the_folder_are_left_alone(three):
    names = ["notes.txt", "step_5", "step_x", "step_000000010"]
    for name in names:
        (three.run.checkpoints / name).mkdir()
    assert three.latest_step() == 3
    assert three.notices == []
    three.save(4, {"w": torch.zeros(5)})
    assert set(names) <= {path.name for path in Path(three.run.checkpoints).iterdir()}
