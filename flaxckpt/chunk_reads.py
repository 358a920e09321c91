"""Which chunks the regions of an array need, and where their elements go. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxckpt.leaves.dtypes import Storage, from_stored, storage_of
from flaxckpt.leaves.record import StoredArray
from flaxckpt.sharding.chunks import Region, Shape, chunk_region, chunks_of, whole
from flaxckpt.storage import zarr3
from flaxckpt.storage.buffers import empty

Parts = Mapping[Region, np.ndarray]


class ArrayRead(NamedTuple):
    """The regions that are wanted of one array, for the leaf `name`."""

    name: str
    array: StoredArray
    regions: Sequence[Region]


class Use(NamedTuple):
    """Where a part of a chunk goes: the memory, and the index of the part within the chunk."""

    memory: np.ndarray
    within: tuple[Any, ...]


class ChunkRead(NamedTuple):
    """One chunk to read.

    Attributes:
      name: the leaf.
      store: the name of its array in the key-value store.
      grid: the position of the chunk.
      shape: of the chunk.
      storage: how its elements are stored.
      uses: where they go; nowhere when the chunk is only to be checked.
    """

    name: str
    store: str
    grid: Shape
    shape: Shape
    storage: Storage
    uses: tuple[Use, ...]

    @property
    def key(self) -> str:
        """Where it lies in the key-value store."""
        return zarr3.chunk_key(self.store, self.grid)

    def memory(self) -> np.ndarray | None:
        """The one piece of memory that the chunk, up to its padding, fills in its own order."""
        if len(self.uses) != 1:
            return None
        memory, within = self.uses[0]
        starts = [s.start for s in within if s is not ...]
        inner = next((i for i, n in enumerate(self.shape) if n != 1), 0) + 1
        in_order = not any(starts) and memory.shape[inner:] == self.shape[inner:]
        return memory if in_order and memory.flags.c_contiguous else None

    def distribute(self, elements: np.ndarray) -> None:
        """Copies the elements of the chunk to where they go."""
        for memory, within in self.uses:
            memory[...] = elements[within]


class Plan:
    """The chunks of one read, and the memory for its regions."""

    def __init__(self, read: ArrayRead, *, keep: bool = True):
        """With `keep=False` every chunk is only to be checked."""
        self._array = read.array
        self._storage = storage_of(read.array.dtype)
        self._stored = {r: zarr3.stored_region(r, self._storage) for r in read.regions}
        self._memory: dict[Region, np.ndarray] = {}
        if keep:
            dtype = self._storage.dtype
            self._memory = {r: empty(s.shape, dtype) for r, s in self._stored.items()}
        chunk = zarr3.stored_shape(read.array.chunks, self._storage)
        self.chunks = [
            ChunkRead(read.name, read.array.store, grid, chunk, self._storage, tuple(uses))
            for grid, uses in self._uses(chunk).items()
        ]

    @property
    def nbytes(self) -> int:
        """The size of the regions in bytes."""
        elements = sum(math.prod(stored.shape) for stored in self._stored.values())
        return elements * self._storage.dtype.itemsize

    def parts(self) -> Parts:
        """The regions, once all chunks were distributed."""
        return {r: from_stored(m, self._array.dtype) for r, m in self._memory.items()}

    def _uses(self, chunk: Shape) -> Mapping[Shape, list[Use]]:
        """The chunks that the regions touch, by their position in the grid, each with its uses."""
        if list(self._stored) == [whole(self._array.chunks)]:  # most arrays are one chunk
            return {(0,) * len(chunk): [Use(memory, (...,)) for memory in self._memory.values()]}
        uses: dict[Shape, list[Use]] = {}
        for region, stored in self._stored.items():
            for grid, part in chunks_of(stored, chunk):
                found = uses.setdefault(grid, [])
                if region in self._memory:
                    memory = self._memory[region][part.within(stored)]
                    found.append(Use(memory, part.within(chunk_region(grid, chunk))))
        return uses
