"""A run directory has one owner at a time, and an earlier run is never written over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from laneway.core import InputError
from laneway.train.place import claimed, free_folder, in_use, newest_run

HOLD = """
import sys
from laneway.train.place import claimed
with claimed(sys.argv[1], resume=False):
    print("held", flush=True)
    sys.stdin.read()
"""


def a_run(folder: Path, age: float = 0.0) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("steps = 1\n")
    moment = (folder / "config.toml").stat().st_mtime - age
    os.utime(folder / "config.toml", (moment, moment))
    return folder


def test_a_new_folder_is_made_and_held(tmp_path):
    folder = tmp_path / "deep" / "run"
    with claimed(folder, resume=False) as run:
        assert run.path == folder
        assert in_use(folder)
        with pytest.raises(InputError, match=f"process {os.getpid()} is writing to it"), claimed(folder, resume=False):
            pytest.fail("held twice")
    assert not in_use(folder)


def test_the_lock_goes_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), claimed(tmp_path / "run", resume=False):
        raise ZeroDivisionError
    assert not (tmp_path / "run").exists()


def test_another_process_keeps_its_folder_until_it_dies(tmp_path):
    folder = tmp_path / "run"
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"process {owner.pid} is writing") as caught, claimed(folder, resume=False):
            pytest.fail("held twice")
        assert "choose another --out" in str(caught.value)
        assert free_folder(folder) == tmp_path / "run-2"
    finally:
        owner.kill()
        owner.communicate()
    with claimed(folder, resume=False):  # killed without a chance to clean up: the lock is gone all the same
        assert in_use(folder)


def test_an_earlier_run_is_not_written_over(tmp_path):
    folder = a_run(tmp_path / "run")
    with pytest.raises(InputError, match="--resume --out") as caught, claimed(folder, resume=False):
        pytest.fail("taken over")
    assert caught.value.field == "out"
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml"]
    with claimed(folder, resume=True) as run:
        assert run.path == folder


def test_resuming_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"resume: got .*leave --resume out"), claimed(tmp_path / "none", resume=True):
        pytest.fail("resumed nothing")
    assert not (tmp_path / "none").exists()


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match="out: got"), claimed(tmp_path / "run", resume=False):
        pytest.fail("a file is no folder")


def test_a_free_name_is_found(tmp_path):
    wanted = tmp_path / "tiny"
    assert free_folder(wanted) == wanted
    a_run(wanted)
    assert free_folder(wanted) == tmp_path / "tiny-2"
    a_run(tmp_path / "tiny-2")
    assert free_folder(wanted) == tmp_path / "tiny-3"


def test_an_empty_folder_is_free(tmp_path):
    (tmp_path / "tiny").mkdir()
    assert free_folder(tmp_path / "tiny") == tmp_path / "tiny"


def test_the_newest_run_is_the_one_written_last(tmp_path):
    assert newest_run(tmp_path / "tiny") == tmp_path / "tiny"
    a_run(tmp_path / "tiny", age=30)
    a_run(tmp_path / "tiny-2", age=10)
    a_run(tmp_path / "tiny-3", age=20)
    a_run(tmp_path / "tiny-best")
    (tmp_path / "tiny-4").mkdir()
    assert newest_run(tmp_path / "tiny") == tmp_path / "tiny-2"
    (tmp_path / "tiny" / "events.jsonl").write_text("{}\n")
    assert newest_run(tmp_path / "tiny") == tmp_path / "tiny"
