"""The values of what is exported, in blocks of which only a few are on the host at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxckpt.exporting.tensors import Tensor
from flaxckpt.formats import row_major
from flaxckpt.options import Options
from flaxckpt.restoring.chunk_reads import ArrayRead
from flaxckpt.restoring.lazy_reads import read_each
from flaxckpt.restoring.source import Source
from flaxckpt.saving import snapshot
from flaxckpt.sharding.chunks import (
    Region,
    Shape,
    chunk_region,
    chunks_of,
    region_of,
    whole,
)

# Of the memory that there is, so many blocks are there: being read, waiting, and being written.
PARTS = 4


class Block(NamedTuple):
    """A part of a tensor, and its values."""

    tensor: Tensor
    region: Region
    values: np.ndarray


def blocks(source: Source | None, tensors: Sequence[Tensor], options: Options) -> Iterator[Block]:
    """All of `tensors`, in order, as they have to be written.

    Args:
      source: what their arrays are in; `None` when they are in memory.
      tensors: what is wanted.
      options: how much may be on the host.
    """
    limit = options.buffer_bytes // PARTS
    if source is not None:
        yield from _read(source, tensors, limit)
        return
    for tensor in tensors:
        shape, itemsize = tensor.array.shape, np.dtype(tensor.array.dtype).itemsize
        rows = row_major.leading_rows(shape, itemsize, limit)
        for _, region in chunks_of(whole(shape), rows):
            values = _in_memory(tensor.array, region, limit)  # type: ignore[arg-type]
            yield Block(tensor, region, values.astype(tensor.dtype, copy=False))


def _read(source: Source, tensors: Sequence[Tensor], limit: int) -> Iterator[Block]:
    """As `blocks`, of a checkpoint."""
    wanted = [
        (tensor, region)
        for tensor in tensors
        for _, region in chunks_of(whole(tensor.array.shape), _block(tensor, limit))
    ]
    reads = [ArrayRead(t.leaf, t.array, [region], t.dtype) for t, region in wanted]  # type: ignore[arg-type]
    values = read_each(source, reads, (PARTS - 2) * limit)
    yield from (Block(*block, found) for block, found in zip(wanted, values, strict=True))


def _block(tensor: Tensor, limit: int) -> Shape:
    """The shape of the blocks of a saved array."""
    array: Any = tensor.array
    return row_major.block_shape(array.shape, array.chunks, tensor.dtype.itemsize, limit)


def _in_memory(array: jax.Array | np.ndarray, region: Region, limit: int) -> np.ndarray:
    """A part of an array on the host."""
    if isinstance(array, np.ndarray):
        return array[region.slices]
    shard: Shape = array.sharding.shard_shape(array.shape)
    if shard == array.shape:
        with jax.transfer_guard("allow"):
            return _part(array.addressable_data(0), region.slices[:-1], limit)
    positions = {
        region_of(found.index, array.shape).start: i
        for i, found in enumerate(array.addressable_shards)
    }
    memory = np.empty(region.shape, array.dtype)
    with jax.transfer_guard("allow"):  # which is against transfers that nobody asked for
        for grid, part in chunks_of(region, shard):
            outer = chunk_region(grid, shard)
            # Of a new array each time: jax keeps the host's copy with the array it was asked for.
            data = array.addressable_data(positions[outer.start])
            memory[part.within(region)] = _part(data, part.within(outer)[: array.ndim], limit)
    return memory


def _part(data: jax.Array, index: tuple[slice, ...], limit: int) -> np.ndarray:
    """A part of what is on one device."""
    is_remote = any(device.platform != "cpu" for device in data.devices())
    if is_remote and data.nbytes > limit:
        return snapshot.part_of_device(data, index)
    return np.asarray(data)[index]
