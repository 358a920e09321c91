"""Bytes of files into memory that is there."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.store.ocdbt import ValueRef, read, read_into
from tests.stores import at

TEXT = bytes(range(256)) * 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """One with a data file of `TEXT`."""
    path = tmp_path_factory.mktemp("db")
    (path / "d").mkdir()
    (path / "d/0a").write_bytes(TEXT)
    return path


@pytest.mark.parametrize("few", [None, 1, 7], ids=["at once", "1 byte a call", "7 bytes a call"])
@given(offset=st.integers(0, 300), sizes=st.lists(st.integers(0, 40), max_size=6))
def test_buffers_are_filled_one_after_the_other(directory, few, offset, sizes):
    """However few bytes a system call reads, and also when some buffers are empty."""
    with pytest.MonkeyPatch.context() as patch:
        if few:
            patch.setattr(os, "preadv", lambda *args: preadv_few(*args, few))
        memory = [bytearray(size) for size in sizes]
        read_into(
            at(directory), ValueRef("d/0a", offset, sum(sizes)), list(map(memoryview, memory))
        )
    assert b"".join(memory) == TEXT[offset : offset + sum(sizes)]
    assert [len(buffer) for buffer in memory] == sizes


def preadv_few(fd, buffers, offset, few, preadv=os.preadv):
    """`os.preadv` that returns after so many bytes."""
    first = next(buffer for buffer in buffers if len(buffer))
    return preadv(fd, [first[:few]], offset)


def test_read_gives_the_bytes_of_a_place(directory):
    assert read(at(directory), ValueRef("d/0a", 3, 5)) == TEXT[3:8]
    assert read(at(directory), ValueRef("d/0a", 3, 0)) == b""


@pytest.mark.parametrize(
    ("offset", "length", "missing"), [(1020, 9, 5), (1024, 3, 3), (9999, 7, 7)]
)
def test_a_file_that_is_too_short(directory, offset, length, missing):
    with pytest.raises(CorruptCheckpointError, match=f"its last {missing} bytes are missing"):
        read(at(directory), ValueRef("d/0a", offset, length))


def test_a_file_that_is_not_there(directory):
    with pytest.raises(CorruptCheckpointError, match="it cannot be read: .*No such file"):
        read(at(directory), ValueRef("d/0b", 0, 1))


def test_what_is_no_file_is_refused_and_not_waited_for(directory, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/1").symlink_to(directory / "d/0a")
    (tmp_path / "d/2").mkdir()
    os.mkfifo(tmp_path / "d/3")
    for name in ("d/1", "d/2", "d/3"):
        with pytest.raises(CorruptCheckpointError, match="cannot be read"):
            read(at(tmp_path), ValueRef(name, 0, 1))


def test_no_file_stays_open(directory):
    before = len(os.listdir("/proc/self/fd"))
    for place in (ValueRef("d/0a", 0, 9), ValueRef("d/0a", 9999, 9)):
        for _ in range(5):
            try:
                read(at(directory), place)
            except CorruptCheckpointError:
                assert place.offset == 9999
    assert len(os.listdir("/proc/self/fd")) == before
