from __future__ import annotations

import ctypes
import os
import threading

import pytest

from flaxckpt.errors import StepExistsError
from flaxckpt.store import layout
from flaxckpt.store import local as commit_module
from flaxckpt.store.local import commit_by_rename, remove, remove_abandoned

ATTEMPT = "0123456789ab"


def write(final, text="new", *, overwrite=False, fsync=False):
    """Commits a checkpoint of one file."""
    with commit_by_rename(final, layout.new_attempt(), overwrite=overwrite, fsync=fsync) as path:
        (path / "file").write_text(text)


def listing(directory) -> list[str]:
    """What lies in `directory`."""
    return sorted(p.name for p in directory.iterdir())


class _OldLibc:
    """A C library from before renameat2."""


@pytest.fixture(params=["renameat2", "two renames", "unsupported"])
def exchange(request, monkeypatch):
    """The ways in which two directories exchange their names."""
    if request.param == "two renames":
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: _OldLibc())
    if request.param == "unsupported":
        libc = _OldLibc()
        libc.renameat2 = lambda *_: ctypes.set_errno(22) or -1  # EINVAL, as NFS says
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: libc)


@pytest.mark.parametrize("fsync", [False, True])
def test_a_checkpoint_appears_when_the_block_ends(tmp_path, fsync):
    final = tmp_path / "1"
    with commit_by_rename(final, ATTEMPT, overwrite=False, fsync=fsync) as path:
        (path / "file").write_text("new")
        assert not final.exists()
    assert (final / "file").read_text() == "new"
    assert listing(tmp_path) == ["1"]


def test_what_is_being_written_has_a_temporary_name(tmp_path):
    with commit_by_rename(tmp_path / "1", ATTEMPT, overwrite=False, fsync=False) as path:
        assert path.name == layout.temporary_name("1", ATTEMPT)
        (path / "x").write_text("")


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_block_that_raises_leaves_nothing(tmp_path, error):
    with (
        pytest.raises(type(error)),
        commit_by_rename(tmp_path / "1", ATTEMPT, overwrite=False, fsync=False) as path,
    ):
        (path / "file").write_text("half")
        raise error
    assert listing(tmp_path) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_block_that_raises_leaves_the_old_checkpoint(tmp_path, overwrite):
    write(tmp_path / "1", "old")
    with (
        pytest.raises(OSError, match="disk full"),
        commit_by_rename(tmp_path / "1", ATTEMPT, overwrite=overwrite, fsync=False),
    ):
        raise OSError("disk full")
    assert (tmp_path / "1" / "file").read_text() == "old"
    assert listing(tmp_path) == ["1"]


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("fsync", [False, True])
def test_overwrite_replaces_and_leaves_nothing_else(tmp_path, fsync):
    write(tmp_path / "1", "old")
    write(tmp_path / "1", "new", overwrite=True, fsync=fsync)
    assert (tmp_path / "1" / "file").read_text() == "new"
    assert listing(tmp_path) == ["1"]


@pytest.mark.usefixtures("exchange")
def test_the_old_checkpoint_lives_until_the_new_one_is_whole(tmp_path):
    write(tmp_path / "1", "old")
    with commit_by_rename(tmp_path / "1", ATTEMPT, overwrite=True, fsync=False) as path:
        (path / "file").write_text("new")
        assert (tmp_path / "1" / "file").read_text() == "old"


def test_overwrite_of_nothing_is_a_commit(tmp_path):
    write(tmp_path / "1", overwrite=True)
    assert listing(tmp_path) == ["1"]


def test_the_old_checkpoint_comes_back_when_the_new_one_cannot_take_its_place(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: _OldLibc())
    write(tmp_path / "1", "old")
    with (
        pytest.raises(OSError, match="No such file"),
        commit_by_rename(tmp_path / "1", ATTEMPT, overwrite=True, fsync=False) as path,
    ):
        (path / "file").write_text("new")
        # Found out only by the second rename.
        original = os.rename

        def lose(a, b):
            if str(a) == str(tmp_path / "1"):
                original(path, tmp_path / "lost")
            original(a, b)

        monkeypatch.setattr(commit_module.os, "rename", lose)
    assert (tmp_path / "1" / "file").read_text() == "old"


def test_of_two_writers_the_second_gets_an_error_and_changes_nothing(tmp_path):
    final = tmp_path / "1"
    with (
        pytest.raises(StepExistsError, match="committed by another writer"),
        commit_by_rename(final, ATTEMPT, overwrite=False, fsync=False) as path,
    ):
        (path / "file").write_text("second")
        write(final, "first")
    assert (final / "file").read_text() == "first"
    assert listing(tmp_path) == ["1"]


def test_of_many_writers_one_wins_whole(tmp_path):
    barrier, lost = threading.Barrier(8), []

    def run(i):
        try:
            with commit_by_rename(
                tmp_path / "1", layout.new_attempt(), overwrite=False, fsync=False
            ) as path:
                for name in "ab":
                    (path / name).write_text(str(i))
                barrier.wait()
        except StepExistsError:
            lost.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lost) == 7
    assert (tmp_path / "1/a").read_text() == (tmp_path / "1/b").read_text()
    assert listing(tmp_path) == ["1"]


def test_a_file_in_the_way_is_never_replaced(tmp_path):
    (tmp_path / "1").write_text("mine")
    with pytest.raises(OSError, match="1"):
        write(tmp_path / "1", overwrite=True)
    assert (tmp_path / "1").read_text() == "mine"
    assert listing(tmp_path) == ["1"]


@pytest.mark.parametrize("fsync", [False, True])
def test_remove_deletes_one_checkpoint(tmp_path, fsync):
    write(tmp_path / "1")
    write(tmp_path / "2")
    remove(tmp_path / "1", fsync=fsync)
    assert listing(tmp_path) == ["2"]


def test_a_checkpoint_that_is_removed_loses_its_name_first(tmp_path, monkeypatch):
    write(tmp_path / "1")
    monkeypatch.setattr(commit_module, "remove_tree", lambda _: None)
    remove(tmp_path / "1", fsync=False)
    (left,) = listing(tmp_path)
    assert layout.parse_temporary(left)
    monkeypatch.undo()
    assert [p.name for p in remove_abandoned(tmp_path)] == [left]
