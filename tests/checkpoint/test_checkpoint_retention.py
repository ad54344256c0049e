"""Which checkpoints are kept, what ``latest`` says, and what a killed run leaves behind."""

import os
from pathlib import Path

import pytest
import torch

from laneway.checkpoint import CheckpointStore
from laneway.core import LanewayError


def state(value: float) -> dict:
    return {"w": torch.full((3,), float(value))}


def loaded(store: CheckpointStore, step: int) -> float:
    target = {"w": torch.zeros(3)}
    store.load(step, target)
    return target["w"][0].item()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(run, keep):
    store = CheckpointStore(run, keep=keep)
    for step in (10, 20, 30, 40):
        folder = store.save(step, state(step))
        assert folder == run.checkpoints / f"step_{step:08d}"
        assert run.latest.read_text() == f"step_{step:08d}\n"
        assert store.latest_step() == step
    assert store.steps() == [10, 20, 30, 40][-keep:]
    assert [loaded(store, step) for step in store.steps()] == store.steps()


def test_nothing_else_is_left_in_the_run(run, store):
    store.save(1, state(1))
    store.save(1, state(1))
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "latest"]
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000001"]


def test_a_torn_one_does_not_count_and_goes_when_there_are_enough_good_ones(run):
    store = CheckpointStore(run, keep=2)
    store.save(1, state(1))
    store.save(2, state(2))
    (store.folder(2) / "plain.json").unlink()
    store.save(3, state(3))
    assert store.steps() == [1, 3]
    (store.folder(3) / "manifest.json").unlink()
    (store.folder(1) / "manifest.json").unlink()
    store.save(4, state(4))
    assert store.steps() == [1, 3, 4]  # too few good ones: what is torn may still be of use to someone


def test_going_back_to_an_earlier_step_makes_the_new_history_the_newest(run):
    store = CheckpointStore(run, keep=2)
    for step in (10, 20):
        store.save(step, state(step))
    assert loaded(store, 10) == 10
    store.save(15, state(15.5))
    assert CheckpointStore(run).latest_step() == 15
    assert run.latest.read_text() == "step_00000015\n"
    assert store.steps() == [15, 20]
    store.save(20, state(20.5))
    assert store.steps() == [15, 20]
    assert loaded(store, 20) == 20.5
    assert CheckpointStore(run).latest_step() == 20


def test_saving_a_step_again_replaces_it(run, store):
    store.save(5, state(1))
    store.save(5, state(2))
    assert loaded(store, 5) == 2
    assert store.steps() == [5]


def test_saving_a_torn_step_again_mends_it(run, store):
    store.save(5, state(1))
    (store.folder(5) / "__0_0.distcp").write_bytes(b"")
    assert store.latest_step() is None
    store.save(5, state(2))
    assert loaded(store, 5) == 2


def test_leftovers_of_a_killed_run_are_ignored_then_removed(run, store):
    store.save(1, state(1))
    leftover = run.checkpoints / ".tmp_step_00000002"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"half")
    assert CheckpointStore(run).latest_step() == 1
    assert store.steps() == [1]
    assert store.notices == []
    store.save(3, state(3))
    assert not leftover.exists()


def test_a_leftover_of_the_same_step_does_not_get_into_the_new_one(run, store):
    leftover = run.checkpoints / ".tmp_step_00000003"
    leftover.mkdir(parents=True)
    (leftover / "__9_0.distcp").write_bytes(b"half")
    folder = store.save(3, state(3))
    assert "__9_0.distcp" not in os.listdir(folder)
    assert loaded(store, 3) == 3


def test_killed_between_the_two_renames_the_old_one_counts(run, store):
    store.save(1, state(1))
    store.folder(1).rename(run.checkpoints / ".old_step_00000001")
    again = CheckpointStore(run)
    assert again.steps() == [1]
    assert again.latest_step() == 1
    assert loaded(again, 1) == 1
    again.save(2, state(2))
    assert sorted(os.listdir(run.checkpoints)) == ["step_00000001", "step_00000002"]
    assert loaded(again, 1) == 1


def test_killed_after_the_second_rename_the_new_one_counts(run, store):
    store.save(1, state(1))
    store.folder(1).rename(run.checkpoints / ".old_step_00000001")
    CheckpointStore(run).run.checkpoints.joinpath("x").mkdir()
    fresh = CheckpointStore(type(run)(run.path.with_name("other")))
    fresh.run.path.mkdir()
    fresh.save(1, state(1.5)).rename(store.folder(1))
    assert loaded(CheckpointStore(run), 1) == 1.5
    store.save(2, state(2))
    assert not (run.checkpoints / ".old_step_00000001").exists()
    assert loaded(store, 1) == 1.5


def test_a_run_folder_that_is_gone_is_a_clear_error(run, store):
    run.path.rmdir()
    run.path.write_text("a file")
    with pytest.raises(LanewayError, match=r"saving step 1 failed: .*run"):
        store.save(1, state(1))


def test_everything_is_flushed_before_it_gets_its_name(run, store, monkeypatch):
    """The order that a power cut needs: files, folder, name, folder above; then the marker and its folder."""
    log = []
    real_sync, real_replace, real_rename = os.fsync, os.replace, Path.rename

    def fsync(handle):
        log.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        real_sync(handle)

    def replace(source, target):
        log.append(("name", Path(target).name))
        real_replace(source, target)

    def rename(path, target):
        log.append(("name", Path(target).name))
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(Path, "rename", rename)
    folder = store.save(1, state(1))
    named = log.index(("name", "step_00000001"))
    flushed = {name for kind, name in log[:named] if kind == "sync"}
    files = {path.name for path in folder.iterdir()}
    assert {name if name != ".metadata" else ".metadata.tmp" for name in files} <= flushed
    assert ("sync", ".tmp_step_00000001") in log[:named]
    assert log[:named].index(("sync", "manifest.json")) > log[:named].index(("sync", "plain.json"))
    assert log[named + 1] == ("sync", "checkpoints")
    assert log[named + 2 :] == [("name", "latest"), ("sync", "run")]
    assert ("sync", ".tmp_latest") in log[:named]
