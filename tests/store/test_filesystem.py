from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from etils import epath

from flaxckpt.errors import DirectoryError
from flaxckpt.store.local import (
    check_writable,
    is_locked,
    local_path,
    lock,
    make_directory,
    remove_tree,
    write_file,
)


@pytest.mark.parametrize("cls", [str, pathlib.Path, epath.Path])
def test_every_kind_of_path_is_accepted(tmp_path, cls):
    assert local_path(cls(tmp_path / "a")) == tmp_path / "a"


def test_a_relative_path_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert local_path("runs/../a") == tmp_path / "a"


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~/a") == tmp_path / "a"


@pytest.mark.parametrize("url", ["hdfs://host/run", "http://host/run"])
def test_a_url_is_refused(url):
    with pytest.raises(DirectoryError, match="is neither on a local or mounted file system"):
        local_path(url)


@pytest.mark.parametrize("fsync", [False, True])
def test_a_directory_is_made_with_its_parents(tmp_path, fsync):
    make_directory(tmp_path / "a" / "b", fsync=fsync)
    make_directory(tmp_path / "a" / "b", fsync=fsync)
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_in_the_way_of_a_directory_is_named(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryError, match=f"cannot create the directory .*{name}"):
        make_directory(tmp_path / name, fsync=True)


def test_a_directory_that_can_be_written_is_accepted(tmp_path):
    check_writable(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(DirectoryError, match="may not be written by this user"):
        check_writable(tmp_path)


def test_a_directory_that_is_gone_is_refused(tmp_path):
    with pytest.raises(DirectoryError):
        check_writable(tmp_path / "gone")


@pytest.mark.parametrize("fsync", [False, True])
def test_a_file_is_written(tmp_path, fsync):
    write_file(tmp_path / "a", b"\0bytes", fsync=fsync)
    assert (tmp_path / "a").read_bytes() == b"\0bytes"


def test_a_file_that_is_there_is_not_replaced(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a", b"new", fsync=False)
    assert (tmp_path / "a").read_text() == "old"


def test_a_tree_is_removed_and_twice_is_no_error(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    remove_tree(tmp_path / "a")
    remove_tree(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shared", [False, True])
def test_a_lock_is_held_during_the_block_only(tmp_path, shared):
    with lock(tmp_path, shared=shared):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_two_shared_locks_are_held_at_once(tmp_path):
    with lock(tmp_path, shared=True), lock(tmp_path, shared=True):
        pass
    assert not is_locked(tmp_path)


def test_to_ask_for_a_lock_takes_none(tmp_path):
    assert not is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_another_process_sees_the_lock(tmp_path):
    script = "import pathlib, sys; from flaxckpt.store.local import is_locked; "
    script += "sys.exit(is_locked(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", script, str(tmp_path)]
    with lock(tmp_path, shared=True):
        assert subprocess.run(command, check=False).returncode == 1
    assert subprocess.run(command, check=False).returncode == 0
