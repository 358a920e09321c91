from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt.sharding.chunks import Region, chunk_region, chunk_shape, chunks_of, region_of, whole


@st.composite
def _sharded(draw):
    """The shape of an array, of its shards, the size of an element, and of a chunk."""
    axes = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 8)), max_size=4))
    shape = tuple(n * parts for n, parts in axes)
    shard = tuple(n for n, _ in axes)
    return shape, shard, draw(st.sampled_from((1, 2, 4, 8, 20))), draw(st.integers(1, 5000))


@st.composite
def _region_and_chunk(draw):
    """A region of an array, and the shape of a chunk."""
    axes = draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6), st.integers(1, 5)), max_size=3)
    )
    start, shape, chunk = (tuple(axis[i] for axis in axes) for i in range(3))
    return Region(start, shape), chunk


@given(_sharded())
def test_a_chunk_never_crosses_the_border_of_a_shard(case):
    shape, shard, _, _ = case
    chunk = chunk_shape(*case)
    for n, s, c in zip(shape, shard, chunk, strict=True):
        # Within an axis that is not cut up by shards, chunks may end anywhere.
        assert s == n or s == 0 or s % c == 0


@given(_sharded())
def test_a_chunk_has_at_most_the_bytes_that_were_asked_for(case):
    _, _, itemsize, chunk_bytes = case
    chunk = chunk_shape(*case)
    assert math.prod(chunk) * itemsize <= chunk_bytes or math.prod(chunk) == 1


@given(_sharded())
def test_a_chunk_has_elements_and_is_no_larger_than_a_shard(case):
    shard = case[1]
    chunk = chunk_shape(*case)
    assert len(chunk) == len(shard)
    assert all(1 <= c <= max(1, s) for c, s in zip(chunk, shard, strict=True))


@given(_sharded())
def test_a_shard_that_is_small_enough_is_one_chunk(case):
    shape, shard, itemsize, _ = case
    enough = max(1, math.prod(shard)) * itemsize
    assert 0 in shard or chunk_shape(shape, shard, itemsize, enough) == shard


@pytest.mark.parametrize(
    ("shape", "shard", "chunk_bytes", "chunk"),
    [
        ((), (), 1, ()),
        ((0, 3), (0, 3), 100, (1, 3)),
        ((1000,), (1000,), 400, (100,)),
        ((1001,), (1001,), 400, (91,)),
        ((14,), (7,), 16, (1,)),  # equal parts of 7 are 7 or 1
        ((8, 1000), (4, 1000), 4000, (1, 1000)),
        ((8, 1000), (4, 1000), 400, (1, 100)),
        ((1000, 10), (1000, 10), 4000, (100, 10)),
        ((22, 1000), (11, 1000), 22000, (11, 500)),  # 2 are wanted; 11 would become 11
        ((3, 100), (3, 100), 800, (1, 100)),  # two of three would be padded with one
    ],
)
def test_an_array_is_cut_like_this(shape, shard, chunk_bytes, chunk):
    assert chunk_shape(shape, shard, 4, chunk_bytes) == chunk


@given(_sharded())
def test_little_of_the_last_chunk_is_padding(case):
    shape, shard, _, _ = case
    for n, s, c in zip(shape, shard, chunk_shape(*case), strict=True):
        assert s == 0 or -n % c <= n / 16


@given(_region_and_chunk())
def test_the_chunks_of_a_region_cover_each_element_once(case):
    region, chunk = case
    count = np.zeros([s + n + 5 for s, n in zip(*region, strict=True)], int)
    inside = np.zeros_like(count)
    inside[tuple(slice(s, s + n) for s, n in zip(*region, strict=True))] = 1
    for _, part in chunks_of(region, chunk):
        count[tuple(slice(s, s + n) for s, n in zip(*part, strict=True))] += 1
    assert (count == inside).all()


@given(_region_and_chunk())
def test_each_part_lies_in_its_chunk_and_is_not_empty(case):
    region, chunk = case
    for grid, part in chunks_of(region, chunk):
        outer = chunk_region(grid, chunk)
        assert 0 not in part.shape
        for s, n, o, m in zip(*part, *outer, strict=True):
            assert o <= s < s + n <= o + m


@given(_region_and_chunk())
def test_each_chunk_is_given_once(case):
    grids = [grid for grid, _ in chunks_of(*case)]
    assert len(set(grids)) == len(grids)


@given(_sharded())
def test_two_shards_write_no_chunk_both(case):
    shape, shard, _, _ = case
    chunk = chunk_shape(*case)
    if 0 in shard or math.prod(shape) // math.prod(chunk) > 2000:
        return
    parts = [range(0, n, s) for n, s in zip(shape, shard, strict=True)]
    written = [
        g for start in itertools.product(*parts) for g, _ in chunks_of(Region(start, shard), chunk)
    ]
    assert len(set(written)) == len(written)


def test_an_array_without_axes_is_one_chunk():
    assert list(chunks_of(whole(()), ())) == [((), Region((), ()))]


def test_an_array_without_elements_has_no_chunks():
    assert list(chunks_of(whole((3, 0)), (1, 1))) == []


def test_a_region_is_an_index_of_the_one_around_it():
    array = np.arange(24).reshape(4, 6)
    outer, inner = Region((1, 2), (3, 4)), Region((2, 3), (1, 2))
    taken = array[outer.within(whole((4, 6)))]
    assert (taken[inner.within(outer)] == array[2:3, 3:5]).all()


def test_an_index_never_gives_a_scalar():
    assert isinstance(np.array(1)[whole(()).within(whole(()))], np.ndarray)


@pytest.mark.parametrize(
    ("index", "region"),
    [
        ((slice(None), slice(2, 4)), Region((0, 2), (3, 2))),
        ((slice(0, 3, None), slice(None, 2)), Region((0, 0), (3, 2))),
    ],
)
def test_the_index_of_a_shard_is_a_region(index, region):
    assert region_of(index, (3, 6)) == region


def test_a_sharded_axis_of_prime_length_is_not_cut_into_single_elements():
    assert chunk_shape((50296, 4096), (6287, 4096), 4, 64 << 20) == (6287, 2048)
