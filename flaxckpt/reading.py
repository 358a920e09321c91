"""Reading regions of arrays: every chunk once, checked, with a bounded number of bytes ahead."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.leaves.dtypes import Storage, from_stored, storage_of
from flaxckpt.leaves.record import StoredArray
from flaxckpt.sharding.chunks import Region, Shape, chunk_region, chunks_of
from flaxckpt.storage import tensorstore_io, zarr3

Parts = Mapping[Region, np.ndarray]
Value = bytes | CorruptCheckpointError | None
Values = Iterator[Value]


class ArrayRead(NamedTuple):
    """The regions that are wanted of one array, for the leaf `name`."""

    name: str
    array: StoredArray
    regions: Sequence[Region]


def read_arrays(directory: Path, reads: Sequence[ArrayRead], buffer_bytes: int) -> Iterator[Parts]:
    """The values of `reads`, in their order.

    Args:
      directory: of the tree, in a checkpoint.
      reads: what is wanted.
      buffer_bytes: how many bytes of chunks are read ahead.

    Raises:
      CorruptCheckpointError: when a chunk is missing or damaged; the leaf and the chunk are named.
    """
    for plan, values in _requested(directory, reads, buffer_bytes):
        yield plan.collect(values, directory)


def check_arrays(directory: Path, arrays: Sequence[ArrayRead], buffer_bytes: int) -> Iterator[str]:
    """What is wrong with each of `arrays`; nothing is kept of a chunk once it is checked.

    Args:
      directory: of the tree, in a checkpoint.
      arrays: what is to be checked.
      buffer_bytes: how many bytes of chunks are read ahead.

    Raises:
      CorruptCheckpointError: when the database itself cannot be read.
    """
    for plan, values in _requested(directory, arrays, buffer_bytes):
        yield plan.check(values, directory)


def _requested(
    directory: Path, reads: Sequence[ArrayRead], buffer_bytes: int
) -> Iterator[tuple[_Plan, Values]]:
    """The plan of each read, with the iterator that gives the values of its chunks next."""
    if not reads:
        return
    plans = [_Plan(read) for read in reads]
    requests = (request for plan in plans for request in plan.requests())
    try:
        store = tensorstore_io.open_store(directory)
    except ValueError as error:
        raise CorruptCheckpointError(
            f"the arrays at {directory} cannot be opened: {error}. Restore another step."
        ) from None
    values = tensorstore_io.read_all(store, requests, buffer_bytes)
    for plan in plans:
        yield plan, values


class _Plan:
    """Which chunks the regions of one array need, and where their elements go."""

    def __init__(self, read: ArrayRead):
        """Groups the regions of `read` by chunk."""
        self._read = read
        self._storage: Storage = storage_of(read.array.dtype)
        self._chunk = zarr3.stored_shape(read.array.chunks, self._storage)
        self._uses: dict[Shape, list[tuple[Region, Region]]] = collections.defaultdict(list)
        for region in dict.fromkeys(read.regions):
            stored = zarr3.stored_region(region, self._storage)
            for grid, part in chunks_of(stored, self._chunk):
                self._uses[grid].append((region, part))

    def requests(self) -> Iterator[tuple[str, int]]:
        """The key and the size of each chunk."""
        size = math.prod(self._chunk) * self._storage.dtype.itemsize + zarr3.CHECKSUM_BYTES
        for grid in self._uses:
            yield zarr3.chunk_key(self._read.array.store, grid), size

    def check(self, values: Values, directory: Path) -> str:
        """What is wrong with the next `values`, the first thing; `""` when all is well."""
        problems = []
        for grid in self._uses:
            try:
                self._decode(next(values), grid, directory)
            except CorruptCheckpointError as error:
                problems.append(str(error))
        return problems[0] if problems else ""

    def collect(self, values: Values, directory: Path) -> Parts:
        """The regions, put together from the next `values`."""
        parts: dict[Region, np.ndarray] = {}
        for grid, uses in self._uses.items():
            elements = self._decode(next(values), grid, directory)
            outer = chunk_region(grid, self._chunk)
            for region, part in uses:
                stored = zarr3.stored_region(region, self._storage)
                if stored.shape == part.shape:
                    parts[region] = elements[part.within(outer)]
                    continue
                if region not in parts:
                    parts[region] = np.empty(stored.shape, self._storage.dtype)
                parts[region][part.within(stored)] = elements[part.within(outer)]
        return {
            region: from_stored(self._part(parts, region), self._read.array.dtype)
            for region in self._read.regions
        }

    def _part(self, parts: Parts, region: Region) -> np.ndarray:
        """The elements of `region`; a region without elements has no chunk."""
        if region in parts:
            return parts[region]
        return np.empty(zarr3.stored_region(region, self._storage).shape, self._storage.dtype)

    def _decode(self, value: Value, grid: Shape, directory: Path) -> np.ndarray:
        """The elements of the chunk at `grid`."""
        try:
            if value is None:
                raise zarr3.ChunkError("it is missing")
            if isinstance(value, CorruptCheckpointError):
                raise value
            return zarr3.decode_chunk(value, self._chunk, self._storage)
        except (zarr3.ChunkError, CorruptCheckpointError) as error:
            key = zarr3.chunk_key(self._read.array.store, grid)
            raise CorruptCheckpointError(
                f"the leaf {self._read.name} is damaged: {error} (chunk {key}, in "
                f"{directory}/{tensorstore_io.locate(directory, key)}). Restore another step."
            ) from None
