"""Arrays that are made of others, and read no more of them than they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.lazy import LazyArray
from flaxckpt.sharding.chunks import Region, Shape


@dataclasses.dataclass(frozen=True, eq=False)
class Derived:
    """A `LazyArray` whose `read` makes the elements of regions of what it reads of other arrays.

    Nobody sharded it, unless `sharding` says so.
    """

    dtype: str
    shape: Shape
    chunks: Shape
    read: Callable[[Sequence[Region]], Sequence[np.ndarray]]
    sharding: Any = None


def stacked(parts: Sequence[LazyArray], axis: int) -> Derived:
    """Arrays of one type along a new axis; only the parts that a region touches are read."""
    dtype, shape = parts[0].dtype, _insert(parts[0].shape, axis, len(parts))

    def read_one(region: Region) -> np.ndarray:
        inner = Region(_without(region.start, axis), _without(region.shape, axis))
        first, count = region.start[axis], region.shape[axis]
        if not count:
            return np.zeros(region.shape, parse_dtype(dtype))
        found = [part.read([inner])[0] for part in parts[first : first + count]]
        return np.stack(found, axis)

    def read(regions: Sequence[Region]) -> Sequence[np.ndarray]:
        return [read_one(region) for region in regions]

    return Derived(dtype, shape, _insert(parts[0].chunks, axis, 1), read)


def layer(whole: LazyArray, axis: int, index: int) -> Derived:
    """One index of an axis of an array."""

    def read(regions: Sequence[Region]) -> Sequence[np.ndarray]:
        outer = [Region(_insert(r.start, axis, index), _insert(r.shape, axis, 1)) for r in regions]
        return [values.squeeze(axis) for values in whole.read(outer)]

    return Derived(whole.dtype, _without(whole.shape, axis), _without(whole.chunks, axis), read)


def recast(array: LazyArray, dtype: str) -> Derived:
    """An array in another dtype."""

    def read(regions: Sequence[Region]) -> Sequence[np.ndarray]:
        return [values.astype(parse_dtype(dtype)) for values in array.read(regions)]

    return Derived(dtype, array.shape, array.chunks, read, array.sharding)


def resized(array: LazyArray, shape: Shape, pad: float) -> Derived:
    """An array with other sizes along its axes: what both have in common, and padding."""

    def read_one(region: Region) -> np.ndarray:
        values = np.full(region.shape, pad, parse_dtype(array.dtype))
        ends = zip(region.start, region.shape, array.shape, strict=True)
        there = tuple(max(0, min(start + size, end) - start) for start, size, end in ends)
        if 0 not in there:
            part = Region(region.start, there)
            values[tuple(slice(size) for size in there)] = array.read([part])[0]
        return values

    def read(regions: Sequence[Region]) -> Sequence[np.ndarray]:
        return [read_one(region) for region in regions]

    return Derived(array.dtype, shape, array.chunks, read)


def _insert(shape: Shape, axis: int, size: int) -> Shape:
    """`shape` with one more axis."""
    return (*shape[:axis], size, *shape[axis:])


def _without(shape: Shape, axis: int) -> Shape:
    """`shape` without an axis."""
    return (*shape[:axis], *shape[axis + 1 :])
