"""Arrays whose elements are read when they are needed, whatever format they are stored in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from flaxckpt.leaves.dtypes import dtype_name, parse_dtype
from flaxckpt.sharding.chunks import Region, Shape


class LazyArray(Protocol):
    """An array whose type is known and whose elements have not been read."""

    @property
    def dtype(self) -> str:
        """The name of its dtype, as in `leaves.dtypes`."""

    @property
    def shape(self) -> Shape:
        """Its shape."""

    @property
    def chunks(self) -> Shape:
        """The shape of the smallest part that is worth reading alone."""

    @property
    def sharding(self) -> Any:
        """How it was sharded when it was saved, as `StoredArray.sharding`; `None` if unknown."""

    def read(self, regions: Sequence[Region]) -> Sequence[np.ndarray]:
        """The elements of each of `regions`, in C order, with the dtype.

        Raises:
          CorruptCheckpointError: when bytes of it are missing or damaged.
        """


def nbytes_of(array: LazyArray) -> int:
    """The size of an array in bytes."""
    return math.prod(array.shape) * parse_dtype(array.dtype).itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class DerivedArray:
    """A `LazyArray` whose elements a function makes, as a rule from those of other arrays."""

    dtype: str
    shape: Shape
    chunks: Shape
    read: Callable[[Sequence[Region]], Sequence[np.ndarray]]
    sharding: Any = None


def in_memory(values: np.ndarray) -> DerivedArray:
    """An array that has been read already; its dtype has a name in `leaves.dtypes`.

    It is read as copies: several leaves may be made of it, and each owns its values.
    """

    def read(regions: Sequence[Region]) -> Sequence[np.ndarray]:
        return [np.array(values[region.slices], order="C") for region in regions]

    name = dtype_name(values.dtype)
    assert name is not None, values.dtype
    return DerivedArray(name, values.shape, values.shape, read)


def stacked(parts: Sequence[LazyArray], axis: int) -> DerivedArray:
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

    return DerivedArray(dtype, shape, _insert(parts[0].chunks, axis, 1), read)


def layer(whole: LazyArray, axis: int, index: int) -> DerivedArray:
    """One index of an axis of an array."""

    def read(regions: Sequence[Region]) -> Sequence[np.ndarray]:
        outer = [Region(_insert(r.start, axis, index), _insert(r.shape, axis, 1)) for r in regions]
        return [values.squeeze(axis) for values in whole.read(outer)]

    return DerivedArray(
        whole.dtype, _without(whole.shape, axis), _without(whole.chunks, axis), read
    )


def recast(array: LazyArray, dtype: str) -> DerivedArray:
    """An array in another dtype."""

    def read(regions: Sequence[Region]) -> Sequence[np.ndarray]:
        return [values.astype(parse_dtype(dtype)) for values in array.read(regions)]

    return DerivedArray(dtype, array.shape, array.chunks, read, array.sharding)


def resized(array: LazyArray, shape: Shape, pad: float) -> DerivedArray:
    """An array with other sizes along its axes: the part that both have, and padding."""

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

    return DerivedArray(array.dtype, shape, array.chunks, read)


def _insert(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis:])


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])
