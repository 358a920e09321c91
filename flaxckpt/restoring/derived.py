"""Arrays that are made of others, and read no more of them than they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.lazy import LazyArray
from flaxckpt.sharding.chunks import Region, Shape


@dataclasses.dataclass(frozen=True, eq=False)
class Stacked:
    """Arrays of one type along a new axis."""

    parts: Sequence[LazyArray]
    axis: int

    @property
    def dtype(self) -> str:
        """That of the parts."""
        return self.parts[0].dtype

    @property
    def shape(self) -> Shape:
        """That of the parts, and the new axis."""
        return _insert(self.parts[0].shape, self.axis, len(self.parts))

    @property
    def chunks(self) -> Shape:
        """A chunk of one part."""
        return _insert(self.parts[0].chunks, self.axis, 1)

    @property
    def sharding(self) -> Any:
        """Nobody sharded it."""
        return None

    def read(self, regions: Sequence[Region]) -> Sequence[np.ndarray]:
        """Reads the parts that the regions touch."""
        return [self._read(region) for region in regions]

    def _read(self, region: Region) -> np.ndarray:
        """The elements of one region."""
        inner = Region(_without(region.start, self.axis), _without(region.shape, self.axis))
        first, count = region.start[self.axis], region.shape[self.axis]
        if not count:
            return np.zeros(region.shape, parse_dtype(self.dtype))
        found = [part.read([inner])[0] for part in self.parts[first : first + count]]
        return np.stack(found, self.axis)


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """One index of an axis of an array."""

    whole: LazyArray
    axis: int
    index: int

    @property
    def dtype(self) -> str:
        """That of the whole."""
        return self.whole.dtype

    @property
    def shape(self) -> Shape:
        """That of the whole without the axis."""
        return _without(self.whole.shape, self.axis)

    @property
    def chunks(self) -> Shape:
        """Those of the whole without the axis."""
        return _without(self.whole.chunks, self.axis)

    @property
    def sharding(self) -> Any:
        """Nobody sharded it."""
        return None

    def read(self, regions: Sequence[Region]) -> Sequence[np.ndarray]:
        """Reads the regions of the one index."""
        outer = [
            Region(_insert(r.start, self.axis, self.index), _insert(r.shape, self.axis, 1))
            for r in regions
        ]
        return [values.squeeze(self.axis) for values in self.whole.read(outer)]


@dataclasses.dataclass(frozen=True, eq=False)
class Recast:
    """An array in another dtype."""

    array: LazyArray
    dtype: str

    @property
    def shape(self) -> Shape:
        """As it is."""
        return self.array.shape

    @property
    def chunks(self) -> Shape:
        """As they are."""
        return self.array.chunks

    @property
    def sharding(self) -> Any:
        """As it is."""
        return self.array.sharding

    def read(self, regions: Sequence[Region]) -> Sequence[np.ndarray]:
        """Reads the regions and converts them."""
        return [values.astype(parse_dtype(self.dtype)) for values in self.array.read(regions)]


@dataclasses.dataclass(frozen=True, eq=False)
class Resized:
    """An array with other sizes along its axes."""

    array: LazyArray
    shape: Shape
    pad: float

    @property
    def dtype(self) -> str:
        """As it is."""
        return self.array.dtype

    @property
    def chunks(self) -> Shape:
        """As they are."""
        return self.array.chunks

    @property
    def sharding(self) -> Any:
        """Nobody sharded it like this."""
        return None

    def read(self, regions: Sequence[Region]) -> Sequence[np.ndarray]:
        """Reads what there is of the regions."""
        return [self._read(region) for region in regions]

    def _read(self, region: Region) -> np.ndarray:
        """One region: what the array has of it, and the padding."""
        values = np.full(region.shape, self.pad, parse_dtype(self.dtype))
        ends = zip(region.start, region.shape, self.array.shape, strict=True)
        there = tuple(max(0, min(start + size, end) - start) for start, size, end in ends)
        if 0 not in there:
            part = Region(region.start, there)
            values[tuple(slice(size) for size in there)] = self.array.read([part])[0]
        return values


def _insert(shape: Shape, axis: int, size: int) -> Shape:
    """`shape` with one more axis."""
    return (*shape[:axis], size, *shape[axis:])


def _without(shape: Shape, axis: int) -> Shape:
    """`shape` without an axis."""
    return (*shape[:axis], *shape[axis + 1 :])
