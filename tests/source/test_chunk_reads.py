"""Which chunks a region needs, and where their elements go."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flaxckpt.leaves.dtypes import from_stored, parse_dtype, storage_of, to_stored
from flaxckpt.leaves.spec import StoredArray
from flaxckpt.sharding.chunks import Region, chunks_of, whole
from flaxckpt.source.chunk_reads import ArrayRead, ChunkedArray, plan_read
from flaxckpt.store import zarr3

DTYPES = ["int16", "bfloat16", "bool", "uint4", ">i4", "<U3", "<M8[s]"]


def read_of(dtype, shape, chunks, regions):
    """A read of an array that is stored in such chunks."""
    return ArrayRead(
        "leaf", ChunkedArray("leaf", StoredArray("a", dtype, shape, chunks), None), regions
    )


def elements(shape, name):
    """An array of `name`, every element another one as far as that can be."""
    dtype = parse_dtype(name)
    count = np.arange(math.prod(shape))
    values = (
        np.array([f"{n % 999}" for n in count], dtype) if name == "<U3" else count.astype(dtype)
    )
    return values.reshape(shape)


def encoded(array, read):
    """The chunks of `array` as they are stored, by key."""
    storage, stored = storage_of(read.dtype), to_stored(array, read.dtype)
    chunk, all_of_it = zarr3.stored_shape(read.chunks, storage), whole(stored.shape)
    return {
        zarr3.chunk_key(read.store, grid): zarr3.encode_chunk(
            stored[part.within(all_of_it)], chunk, storage
        )
        for grid, part in chunks_of(all_of_it, chunk)
    }


@st.composite
def reads(draw):
    """An array, the way it is stored, and regions of it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    chunk = tuple(draw(st.integers(1, n + 1)) for n in shape)
    if draw(st.booleans()):  # most arrays are one chunk
        chunk = shape
    name = draw(st.sampled_from(DTYPES))
    regions = [whole(shape)] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 3))):
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        size = tuple(draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True))
        regions.append(Region(start, size))
    regions = list(dict.fromkeys(regions))
    return elements(shape, name), read_of(name, shape, chunk, regions)


def check(array, read, parts):
    """Checks that `parts` are the regions of `array`."""
    assert list(parts) == list(read.regions)
    for region, values in parts.items():
        expected = array[region.within(whole(array.shape))]
        assert (values.dtype, values.shape) == (expected.dtype, expected.shape)
        assert values.tobytes() == expected.tobytes()


@settings(max_examples=300)
@given(reads())
def test_distributing_every_chunk_gives_exactly_the_regions(case):
    array, read = case
    values, planned = encoded(array, read.array), plan_read(read, keep=True)
    for chunk in planned.chunks:
        chunk.distribute(zarr3.decode_chunk(values[chunk.key], chunk.shape, chunk.storage))
    check(array, read, planned.values())


@settings(max_examples=300)
@given(reads())
def test_a_chunk_with_memory_fills_it_with_its_first_bytes(case):
    array, read = case
    values, planned = encoded(array, read.array), plan_read(read, keep=True)
    for chunk in planned.chunks:
        memory = chunk.memory()
        if memory is None:
            chunk.distribute(zarr3.decode_chunk(values[chunk.key], chunk.shape, chunk.storage))
            continue
        body = zarr3.as_bytes(memory)
        assert len(body) <= len(values[chunk.key]) - zarr3.CHECKSUM_BYTES
        body[:] = values[chunk.key][: len(body)]
    check(array, read, planned.values())


@given(reads())
def test_each_chunk_is_there_once_and_none_that_no_region_needs(case):
    array, read = case
    storage = storage_of(read.array.dtype)
    chunk = zarr3.stored_shape(read.array.chunks, storage)
    needed = {
        zarr3.chunk_key("a", grid)
        for region in read.regions
        for grid, _ in chunks_of(zarr3.stored_region(region, storage), chunk)
    }
    for keep in (True, False):
        planned = plan_read(read, keep=keep)
        keys = [one.key for one in planned.chunks]
        assert sorted(keys) == sorted(needed)
        sizes = [math.prod(region.shape) for region in read.regions]
        assert planned.nbytes == sum(sizes) * array.dtype.itemsize


@given(reads())
def test_what_is_only_checked_has_no_memory(case):
    array, read = case
    values, planned = encoded(array, read.array), plan_read(read, keep=False)
    for chunk in planned.chunks:
        assert chunk.memory() is None
        chunk.distribute(zarr3.decode_chunk(values[chunk.key], chunk.shape, chunk.storage))
    assert planned.values() == {}


@pytest.mark.parametrize(
    ("shape", "chunk", "region", "direct"),
    [
        ((8, 4), (8, 4), Region((0, 0), (8, 4)), True),
        ((8, 4), (2, 4), Region((0, 0), (8, 4)), True),
        ((7, 4), (2, 4), Region((0, 0), (7, 4)), True),  # the last one is padded at its end
        ((8, 4), (2, 2), Region((0, 0), (8, 4)), False),  # lines of it lie apart
        ((8, 4), (2, 4), Region((1, 0), (1, 4)), False),
        ((8, 4), (4, 4), Region((0, 0), (3, 4)), True),
        ((8, 4), (4, 4), Region((0, 0), (4, 3)), False),
        ((1, 8), (1, 4), Region((0, 0), (1, 8)), True),
        ((8, 3), (8, 4), Region((0, 0), (8, 3)), False),  # its lines are padded
        ((), (), Region((), ()), True),
    ],
)
def test_chunks_in_one_piece_go_straight_to_their_memory(shape, chunk, region, direct):
    read = read_of("int8", shape, chunk, [region])
    assert {one.memory() is not None for one in plan_read(read, keep=True).chunks} == {direct}


def test_a_chunk_that_two_regions_need_has_no_memory():
    regions = [Region((0,), (4,)), Region((2,), (2,))]
    read = read_of("int8", (4,), (4,), regions)
    (chunk,) = plan_read(read, keep=True).chunks
    assert chunk.memory() is None


def test_an_array_without_elements_has_no_chunks():
    read = read_of("int8", (0, 3), (1, 3), [whole((0, 3))])
    planned = plan_read(read, keep=True)
    assert (list(planned.chunks), planned.nbytes) == ([], 0)
    assert planned.values()[whole((0, 3))].shape == (0, 3)


def test_the_elements_given_are_copied():
    array = np.arange(4, dtype=np.int8)
    read = read_of("int8", (4,), (4,), [whole((4,))])
    planned = plan_read(read, keep=True)
    planned.chunks[0].distribute(array)
    array[:] = 9
    (values,) = planned.values().values()
    assert from_stored(values, "int8").tolist() == [0, 1, 2, 3]
