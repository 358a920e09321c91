"""Reading regions of arrays: every chunk once, checked, with a bounded number of bytes ahead."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flaxckpt.checkpoint import Checkpoint
from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.leaves.dtypes import Storage, from_stored, storage_of
from flaxckpt.leaves.record import StoredArray
from flaxckpt.sharding.chunks import Region, Shape, chunk_region, chunks_of
from flaxckpt.storage import layout, tensorstore_io, zarr3

Parts = Mapping[Region, np.ndarray]
Value = bytes | CorruptCheckpointError | None
Values = Iterator[Value]


class ArrayRead(NamedTuple):
    """The regions that are wanted of one array, for the leaf `name`."""

    name: str
    array: StoredArray
    regions: Sequence[Region]


def read_arrays(checkpoint: Checkpoint, reads: Sequence[ArrayRead], ahead: int) -> Iterator[Parts]:
    """The values of `reads`, in their order.

    Args:
      checkpoint: where they lie.
      reads: what is wanted.
      ahead: how many bytes of chunks are read ahead.

    Raises:
      CorruptCheckpointError: when a chunk is missing or damaged; the leaf and the chunk are named.
    """
    for plan, values in _requested(checkpoint, reads, ahead):
        yield plan.collect(values, checkpoint.item)


def check_arrays(checkpoint: Checkpoint, reads: Sequence[ArrayRead], ahead: int) -> Iterator[str]:
    """What is wrong with each of `reads`; nothing is kept of a chunk once it is checked.

    Args:
      checkpoint: where they lie.
      reads: what is to be checked.
      ahead: how many bytes of chunks are read ahead.

    Raises:
      CorruptCheckpointError: when the database itself cannot be read.
    """
    for plan, values in _requested(checkpoint, reads, ahead):
        yield plan.check(values, checkpoint.item)


def _requested(
    checkpoint: Checkpoint, reads: Sequence[ArrayRead], ahead: int
) -> Iterator[tuple[_Plan, Values]]:
    """The plan of each read, with the iterator that gives the values of its chunks next."""
    if not reads:
        return
    plans = [_Plan(read) for read in reads]
    attempt = (layout.ATTEMPT_KEY, len(checkpoint.tree.attempt))
    requests = itertools.chain([attempt], *(plan.requests() for plan in plans))
    try:
        store = tensorstore_io.open_store(checkpoint.item)
    except ValueError as error:
        raise CorruptCheckpointError(
            f"the arrays at {checkpoint.item} cannot be opened: {error}. Restore another step."
        ) from None
    values = tensorstore_io.read_all(store, requests, ahead)
    _check_attempt(next(values), checkpoint)
    for plan in plans:
        yield plan, values


def _check_attempt(value: Value, checkpoint: Checkpoint) -> None:
    """Checks that the arrays were written by the save that wrote the metadata.

    Raises:
      CorruptCheckpointError: when they were not.
    """
    if isinstance(value, CorruptCheckpointError):
        raise value
    if value != checkpoint.tree.attempt.encode():
        what = "missing" if value is None else f"not those of its metadata ({value!r})"
        raise CorruptCheckpointError(
            f"the arrays at {checkpoint.item} are {what}. Restore another step."
        )


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
