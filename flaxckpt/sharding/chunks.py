"""How an array is cut into chunks, and which chunks a region of it touches. Pure arithmetic.

A chunk never crosses the border of a shard, so every chunk has one writer. On disk an array is a
regular grid of chunks; those at its end are padded to full size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

Shape = tuple[int, ...]

# How many times as many parts as needed an axis may be cut into before another one is tried.
MAX_EXCESS = 4
# The share of an axis that the last chunk may have too much, which is zeros on the disk.
MAX_PADDING = 1 / 16


class Region(NamedTuple):
    """A box of an array: where it starts and how large it is, per axis, in elements."""

    start: Shape
    shape: Shape

    @property
    def slices(self) -> tuple[Any, ...]:
        """As an index of the whole array; it never gives a scalar."""
        return (*(slice(s, s + n) for s, n in zip(self.start, self.shape, strict=True)), ...)

    def within(self, outer: Region) -> tuple[Any, ...]:
        """As an index of the region `outer`, which contains it; it never gives a scalar."""
        pairs = zip(self.start, self.shape, outer.start, strict=True)
        return (*(slice(s - o, s - o + n) for s, n, o in pairs), ...)


def region_of(index: tuple[slice, ...], shape: Shape) -> Region:
    """The region that `index` (as of a jax shard) takes out of an array of `shape`."""
    bounds = [s.indices(n) for s, n in zip(index, shape, strict=True)]
    return Region(tuple(b[0] for b in bounds), tuple(b[1] - b[0] for b in bounds))


def whole(shape: Shape) -> Region:
    """All of an array of `shape`."""
    return Region((0,) * len(shape), shape)


def chunk_shape(shape: Shape, shard: Shape, itemsize: int, chunk_bytes: int) -> Shape:
    """The chunks of an array: its shards, cut along their first axes until they are small enough.

    A chunk is then one piece of a shard in memory, as it is on disk. An axis that is sharded is
    cut into equal parts, so that chunks stay within shards; one that is not may leave a slightly
    smaller chunk at its end.

    Args:
      shape: of the array.
      shard: of the part that each device holds; divides `shape`.
      itemsize: bytes of an element.
      chunk_bytes: the most that a chunk may have, where it has more than one element.

    Example:
      >>> chunk_shape((1024, 1024), (256, 1024), 4, 512 * 1024)
      (128, 1024)
    """
    chunk = [max(1, n) for n in shard]
    while (size := math.prod(chunk) * itemsize) > chunk_bytes and max(chunk, default=1) > 1:
        parts = math.ceil(size / chunk_bytes)
        sharded = [n != whole for n, whole in zip(shard, shape, strict=True)]
        cuts = [_cut(n, min(parts, n), equal=s) for n, s in zip(chunk, sharded, strict=True)]
        # A sharded axis of prime length could only be cut into single elements.
        long = [axis for axis, length in enumerate(chunk) if length > 1]
        well = [axis for axis in long if chunk[axis] <= MAX_EXCESS * cuts[axis] * parts]
        axis = well[0] if well else max(long, key=lambda axis: chunk[axis])
        chunk[axis] = cuts[axis]
    return tuple(chunk)


def _cut(length: int, parts: int, *, equal: bool) -> int:
    """The length of one of at least `parts` parts of `length`, which is at least `parts`."""
    size = math.ceil(length / parts)
    if equal or -length % size > MAX_PADDING * length:
        size = length // next(p for p in range(parts, length + 1) if length % p == 0)
    return size


def chunks_of(region: Region, chunk: Shape) -> Iterator[tuple[Shape, Region]]:
    """The chunks that `region` touches: position in the grid, and the region they have in common.

    Example:
      >>> [grid for grid, _ in chunks_of(Region((0, 3), (2, 3)), (2, 4))]
      [(0, 0), (0, 1)]
    """
    if 0 in region.shape:
        return
    ranges = [
        range(start // size, (start + length - 1) // size + 1)
        for start, length, size in zip(region.start, region.shape, chunk, strict=True)
    ]
    for grid in itertools.product(*ranges):
        yield grid, _common(region, chunk_region(grid, chunk))


def chunk_region(grid: Shape, chunk: Shape) -> Region:
    """The full region of the chunk at `grid`, which may reach over the end of the array."""
    return Region(tuple(g * c for g, c in zip(grid, chunk, strict=True)), chunk)


def _common(a: Region, b: Region) -> Region:
    """The region that `a` and `b` have in common."""
    start = tuple(map(max, a.start, b.start))
    ends = zip(a.start, a.shape, b.start, b.shape, start, strict=True)
    return Region(start, tuple(min(s + n, t + m) - o for s, n, t, m, o in ends))
