from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from flaxckpt.store import layout
from flaxckpt.store.local import ABANDONED_SECS, commit_by_rename, remove_abandoned

ATTEMPT = "0123456789ab"
HOLD_THE_LOCK = """
import pathlib, sys
from flaxckpt.store.local import commit_by_rename
final = pathlib.Path(sys.argv[1])
with commit_by_rename(final, "0123456789ab", overwrite=False, fsync=False) as path:
    (path / "half").write_text("written")
    print("locked", flush=True)
    sys.stdin.read()
"""


def listing(directory) -> list[str]:
    """What lies in `directory`."""
    return sorted(p.name for p in directory.iterdir())


def test_the_directory_of_a_writer_in_this_process_is_left_alone(tmp_path):
    with commit_by_rename(tmp_path / "1", ATTEMPT, overwrite=False, fsync=False) as path:
        (path / "x").write_text("")
        assert remove_abandoned(tmp_path) == []
    assert listing(tmp_path) == ["1"]


def test_the_directory_of_a_living_process_is_left_alone_and_of_a_killed_one_removed(tmp_path):
    command = [sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path / "1")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as writer:
        try:
            assert writer.stdout.readline() == b"locked\n"
            assert remove_abandoned(tmp_path) == []
            assert listing(tmp_path) == [layout.temporary_name("1", ATTEMPT)]
        finally:
            writer.kill()
    assert [p.name for p in remove_abandoned(tmp_path)] == [layout.temporary_name("1", ATTEMPT)]
    assert listing(tmp_path) == []


def test_only_the_directories_of_one_checkpoint_are_removed(tmp_path):
    mine, other = (tmp_path / layout.temporary_name(name, ATTEMPT) for name in ("a", "b"))
    mine.mkdir()
    other.mkdir()
    assert remove_abandoned(tmp_path, "a") == [mine]
    assert listing(tmp_path) == [other.name]


@pytest.mark.parametrize(("age", "removed"), [(-60, False), (0, False), (60, True)])
def test_the_directory_of_another_host_is_removed_after_a_day(tmp_path, age, removed):
    path = tmp_path / f"1.flaxckpt-tmp-otherhost-{ATTEMPT}"
    path.mkdir()
    if age:
        then = time.time() - ABANDONED_SECS - age
        os.utime(path, (then, then))
    assert remove_abandoned(tmp_path) == ([path] if removed else [])
    assert path.exists() is not removed


def test_what_flaxckpt_did_not_write_is_left_alone(tmp_path):
    for name in ("1", "2.orbax-checkpoint-tmp-1", "3.flaxckpt-tmp-host", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    before = listing(tmp_path)
    assert remove_abandoned(tmp_path) == []
    assert listing(tmp_path) == before


def test_a_file_or_a_link_of_a_temporary_name_is_left_alone(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / layout.temporary_name("1", "0" * 12)).write_text("mine")
    (tmp_path / layout.temporary_name("2", "0" * 12)).symlink_to(tmp_path / "data")
    before = listing(tmp_path)
    assert remove_abandoned(tmp_path) == []
    assert listing(tmp_path) == before
