"""The values of a checkpoint in blocks, of which only a few are in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxckpt.formats import row_major
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.restoring.chunk_reads import ArrayRead
from flaxckpt.restoring.lazy_reads import read_each
from flaxckpt.restoring.source import SavedLeaf, Source
from flaxckpt.sharding.chunks import Region, Shape, chunks_of, whole

BLOCK_BYTES = 4 << 20
# So much is read ahead of what is done with it.
AHEAD_BYTES = 8 * BLOCK_BYTES


class Block(NamedTuple):
    """A part of the array of a leaf, and its values."""

    leaf: SavedLeaf
    region: Region
    values: np.ndarray


def wanted(leaves: Iterable[SavedLeaf]) -> list[tuple[SavedLeaf, Region]]:
    """All blocks of the arrays of `leaves`, in order."""
    return [
        (leaf, region)
        for leaf in leaves
        if leaf.array is not None
        for _, region in chunks_of(whole(leaf.array.shape), _block(leaf.array))
    ]


def read(source: Source, regions: Sequence[tuple[SavedLeaf, Region]]) -> Iterator[Block]:
    """The values of blocks of `source`, in their order.

    Raises:
      CorruptCheckpointError: when something is missing or damaged; the leaf is named.
    """
    values = read_each(source, reads(regions), AHEAD_BYTES)
    yield from (Block(*block, found) for block, found in zip(regions, values, strict=True))


def reads(regions: Sequence[tuple[SavedLeaf, Region]]) -> list[ArrayRead]:
    """What is to be read for blocks."""
    return [
        ArrayRead(leaf.name, leaf.array, [region])
        for leaf, region in regions
        if leaf.array is not None
    ]


def is_number(dtype: np.dtype) -> bool:
    """Whether one can count with values of a dtype."""
    return dtype.kind in "biufc" or dtype.type.__module__ == "ml_dtypes"


def _block(array: Any) -> Shape:
    """The shape of the blocks of an array."""
    itemsize = parse_dtype(array.dtype).itemsize
    return row_major.block_shape(array.shape, array.chunks, itemsize, BLOCK_BYTES)
