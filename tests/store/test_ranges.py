"""What opening a file in a bucket asks of the server: a few small ranges, and no list of others."""

from __future__ import annotations

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.store.locate import locate
from tests import stores

MIB = 1 << 20
VALUES = np.arange(MIB, dtype=np.float32)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A bucket with two large objects among many others."""
    file = tmp_path_factory.mktemp("made") / "m.safetensors"
    flaxckpt.export({"w": VALUES}, file)
    with stores.opened("s3", None) as store:
        store.write("data", "m.safetensors", file.read_bytes())
        store.write("data", "unknown.bin", b"\xc1" * (4 * MIB))
        store.write("data", "short", b"0123456789")
        store.write("data", "empty", b"")
        for i in range(50):
            store.write("data", f"other/{i}", b"x")
        yield store


@pytest.fixture
def asked(store):
    """Counts the bytes that are sent, and what is listed, from now on."""

    class Asked:
        """What the server was asked for."""

        def __init__(self):
            self._before = store.server.sent
            store.server.log.clear()

        @property
        def nbytes(self):
            """The bytes of all answers."""
            return store.server.sent - self._before

        @property
        def listed(self):
            """The prefixes of all lists."""
            return {r.query["prefix"] for r in store.server.log if "list-type" in r.query}

    return Asked()


def test_inspecting_a_safetensors_file_reads_its_header(store, asked):
    info = flaxckpt.inspect(store.url("data/m.safetensors"), options=store.options())
    assert info.tree["w"].shape == VALUES.shape
    assert asked.nbytes < 64 << 10
    assert asked.listed <= {"data/m.safetensors/", "data/_claims/", "data/m.safetensors/_claims/"}


def test_a_few_numbers_of_a_tensor_cost_no_more_than_their_surroundings(store, asked):
    leaves = flaxckpt.lazy(store.url("data/m.safetensors"), options=store.options())
    assert leaves["w"].read(np.s_[7:17]).tolist() == VALUES[7:17].tolist()
    assert asked.nbytes < 64 << 10


def test_an_object_of_no_format_is_not_fetched_to_say_so(store, asked):
    with pytest.raises(errors.CheckpointNotFoundError):
        flaxckpt.inspect(store.url("data/unknown.bin"), options=store.options())
    assert asked.nbytes < 64 << 10
    assert "data/" not in asked.listed


def test_what_is_not_there_lists_no_neighbours(store, asked):
    with pytest.raises(errors.CheckpointNotFoundError):
        flaxckpt.inspect(store.url("data/missing.safetensors"), options=store.options())
    assert "data/" not in asked.listed


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_a_range_gives_what_there_is_of_it(store, where, tmp_path):
    """Whatever of it lies behind the end, in a directory as in a bucket."""
    for name in ("short", "empty"):
        (tmp_path / name).write_bytes(store.read("data", name))
    url = store.url("data") if where == "bucket" else tmp_path
    directory = locate(url, store.options())
    ranges = [(0, 4), (3, None), (0, 40), (8, 12), (10, None), (10, 20), (99, 100), (0, None)]
    for start, stop in ranges:
        assert (directory / "short").read(start, stop) == b"0123456789"[start:stop]
        assert (directory / "empty").read(start, stop) == b""
    memory = [bytearray(4), bytearray(0), bytearray(4)]
    found = directory / "short"
    assert found.store.fill(found, 5, list(map(memoryview, memory))) == 3
    assert b"".join(memory) == b"56789\0\0\0"
    assert [(directory / name).is_file() for name in ("short", "empty", "none")] == [1, 1, 0]
    with pytest.raises(FileNotFoundError):
        (directory / "none").read(0, 1)
