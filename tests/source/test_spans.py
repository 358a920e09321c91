"""Chunks that lie side by side are read at once; what is wrong with one is said of it alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flaxckpt.leaves.dtypes import storage_of
from flaxckpt.leaves.spec import StoredArray
from flaxckpt.sharding.chunks import whole
from flaxckpt.source.chunk_reads import (
    DIRECT_BYTES,
    GAP_BYTES,
    SPAN_BYTES,
    ArrayRead,
    ChunkedArray,
    finish_span,
    plan_read,
    read_span,
    spans,
)
from flaxckpt.store import ocdbt, zarr3
from flaxckpt.store.ocdbt import ValueRef
from tests import stores

SUM = zarr3.CHECKSUM_BYTES


class Disk:
    """A data file, the index of what lies in it, and the arrays that do."""

    def __init__(self, path):
        self.path, self.index, self.plans, self.arrays = path, {}, {}, {}
        self.text = bytearray()
        (path / "d").mkdir()

    def add(self, name, size, *, gap=0, inline=False, seed=0):
        """An array of one chunk, after a gap of so many bytes."""
        array = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        value = zarr3.encode_chunk(array, (size,), storage_of("uint8"))
        self.text += bytes(gap)
        place = ValueRef("d/0", len(self.text), len(value))
        self.index[f"{name}/c/0"] = value if inline else place
        if not inline:
            self.text += value
        stored = StoredArray(name, "uint8", (size,), (size,))
        read = ArrayRead(name, ChunkedArray(name, stored, None), [whole((size,))])
        self.plans[name], self.arrays[name] = plan_read(read, keep=True), array

    def spans(self):
        """What is read at once, the names of the leaves of each."""
        return list(spans([c for p in self.plans.values() for c in p.chunks], self.index))

    def names(self):
        """The names of the leaves of each span."""
        return [[located.chunk.name for located in span] for span in self.spans()]

    def read(self):
        """Reads everything; what was wrong, by leaf."""
        (self.path / "d/0").write_bytes(self.text)
        problems = {}
        for span in self.spans():
            for problem in finish_span(stores.at(self.path), read_span(stores.at(self.path), span)):
                name = problem.located.chunk.name
                assert name not in problems
                problems[name] = str(problem.error)
        for name, planned in self.plans.items():
            if name not in problems:
                (values,) = planned.values().values()
                assert (values == self.arrays[name]).all()
        return problems


@pytest.fixture
def disk(tmp_path):
    return Disk(tmp_path)


def test_chunks_that_adjoin_are_read_at_once(disk, monkeypatch):
    for i in range(5):
        disk.add(str(i), 2000 + i)
    assert disk.names() == [["0", "1", "2", "3", "4"]]
    calls = []
    real = ocdbt.read_into
    monkeypatch.setattr(ocdbt, "read_into", lambda *args: calls.append(args) or real(*args))
    assert disk.read() == {}
    assert len(calls) == 1


def test_a_small_gap_is_read_too_and_a_large_one_is_not(disk):
    disk.add("a", 2000)
    disk.add("b", 2000, gap=GAP_BYTES)
    disk.add("c", 2000, gap=GAP_BYTES + 1)
    assert disk.names() == [["a", "b"], ["c"]]
    assert disk.read() == {}


def test_a_large_chunk_is_read_by_itself(disk):
    disk.add("a", 2000)
    disk.add("large", DIRECT_BYTES - SUM)
    disk.add("b", 2000)
    disk.add("smaller", DIRECT_BYTES - SUM - 1)
    assert disk.names() == [["a"], ["large"], ["b", "smaller"]]
    assert [span[0].is_direct for span in disk.spans()] == [False, True, False]
    assert disk.read() == {}


def test_a_span_has_a_largest_size(disk):
    size = DIRECT_BYTES - SUM - 1
    count = SPAN_BYTES // (size + SUM)
    for i in range(count + 1):
        disk.add(f"{i:03}", size)
    assert list(map(len, disk.names())) == [count, 1]
    assert disk.read() == {}


def test_what_lies_in_the_index_comes_first_and_together(disk):
    disk.add("a", 2000)
    disk.add("b", 10, inline=True)
    disk.add("c", 11, inline=True)
    assert disk.names() == [["b", "c"], ["a"]]
    assert disk.read() == {}


def test_chunks_of_different_files_are_not_read_at_once(disk):
    disk.add("a", 2000)
    disk.add("b", 2000)
    disk.index["b/c/0"] = disk.index["b/c/0"]._replace(file="d/1")
    assert disk.names() == [["a"], ["b"]]


def test_they_are_read_in_the_order_of_the_disk(disk):
    for i in range(3):
        disk.add(str(i), 2000)
    disk.plans = dict(reversed(disk.plans.items()))
    assert disk.names() == [["0", "1", "2"]]


def test_places_that_overlap_are_read_one_by_one(disk):
    disk.add("a", 2000)
    disk.add("b", 2000)
    disk.index["b/c/0"] = disk.index["a/c/0"]
    disk.arrays["b"] = disk.arrays["a"]
    assert len(disk.names()) == 2
    assert disk.read() == {}


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2000, 30_000, DIRECT_BYTES]),
            st.sampled_from([0, 1, GAP_BYTES, GAP_BYTES + 1]),
            st.booleans(),
            st.sampled_from(["", "damaged", "missing", "wrong length"]),
        ),
        max_size=12,
    )
)
def test_each_chunk_is_right_or_says_what_is_wrong_with_it(tmp_path_factory, chunks):
    disk, expected = Disk(tmp_path_factory.mktemp("d")), {}
    for i, (size, gap, inline, what) in enumerate(chunks):
        name = f"{i:02}"
        disk.add(name, size, gap=gap, inline=inline, seed=i)
        break_(disk, name, what)
        if what:
            expected[name] = what
    wrong = disk.read()
    assert {name: SAID[what] in wrong.get(name, "") for name, what in expected.items()} == (
        dict.fromkeys(expected, True)
    )
    assert wrong.keys() == expected.keys()


SAID = {"damaged": "its checksum is", "missing": "it is missing", "wrong length": "bytes instead"}


def break_(disk, name, what):
    """Damages the chunk of `name`."""
    key = f"{name}/c/0"
    place = disk.index[key]
    if what == "missing":
        del disk.index[key]
    elif isinstance(place, bytes):
        changed = {"damaged": bytes([place[0] ^ 1]) + place[1:], "wrong length": place[:-1]}
        disk.index[key] = changed.get(what, place)
    elif what == "damaged":
        disk.text[place.offset] ^= 1
    elif what == "wrong length":
        disk.index[key] = place._replace(length=place.length - 1)


@pytest.mark.parametrize("size", [2000, DIRECT_BYTES])
def test_one_damaged_chunk_among_many_names_only_itself(disk, size):
    for i in range(9):
        disk.add(str(i), size, seed=i)
    disk.text[disk.index["4/c/0"].offset + 77] ^= 1
    assert disk.read().keys() == {"4"}


def test_of_a_file_that_ends_early_only_what_lies_behind_its_end_is_missing(disk):
    for i in range(9):
        disk.add(str(i), 2000, seed=i)
    assert len(disk.spans()) == 1
    del disk.text[disk.index["7/c/0"].offset + 5 :]
    problems = disk.read()
    assert problems.keys() == {"7", "8"}
    assert problems["7"] == f"its last {2000 + SUM - 5} bytes are missing"


@pytest.mark.parametrize("at", [-1, -SUM - 1], ids=["the checksum", "the padding"])
def test_of_a_chunk_read_into_place_all_is_checked(disk, at):
    rows = DIRECT_BYTES // 4
    array = np.arange(rows * 3 // 2 * 4, dtype=np.int32).view(np.uint8)[: rows * 6].reshape(-1, 4)
    chunk = (rows, 4)  # the second one is half of padding
    stored = StoredArray("a", "uint8", array.shape, chunk)
    read = ArrayRead("a", ChunkedArray("a", stored, None), [whole(array.shape)])
    planned = plan_read(read, keep=True)
    values = [
        zarr3.encode_chunk(p, chunk, storage_of("uint8")) for p in (array[:rows], array[rows:])
    ]
    damaged = bytearray(values[1])
    damaged[at] ^= 1
    index = {
        f"a/c/{i}/0": ValueRef("d/0", i * len(values[0]), len(values[0]))
        for i in range(len(values))
    }
    for text, wrong in ((b"".join(values), 0), (values[0] + damaged, 1)):
        (disk.path / "d/0").write_bytes(text)
        found = list(spans(planned.chunks, index))
        assert all(span[0].is_direct and span[0].chunk.memory() is not None for span in found)
        problems = [
            p
            for s in found
            for p in finish_span(stores.at(disk.path), read_span(stores.at(disk.path), s))
        ]
        assert [p.located.chunk.key for p in problems] == ["a/c/1/0"] * wrong
        (restored,) = planned.values().values()
        assert (restored == array).all()


def test_a_hostile_length_reserves_no_memory(disk, monkeypatch):
    disk.add("a", 2000)
    disk.index["a/c/0"] = ValueRef("d/0", 0, 10**17)
    assert disk.read() == {"a": f"{10**17} bytes instead of {2000 + SUM}"}


def test_a_place_of_no_bytes_is_a_chunk_of_a_wrong_size(disk):
    disk.add("a", 2000)
    disk.add("b", 2000, gap=GAP_BYTES + 1)
    disk.index["a/c/0"] = ValueRef("d/0", 0, 0)
    assert disk.read() == {"a": f"0 bytes instead of {2000 + SUM}"}
