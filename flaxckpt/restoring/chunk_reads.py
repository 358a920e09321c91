"""Which chunks the regions of an array need, and where their elements go. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from flaxckpt.leaves.dtypes import Storage, from_stored, storage_of
from flaxckpt.leaves.lazy import LazyArray
from flaxckpt.leaves.record import StoredArray
from flaxckpt.sharding.chunks import Region, Shape, chunk_region, chunks_of
from flaxckpt.storage import zarr3
from flaxckpt.storage.buffers import empty

Parts = Mapping[Region, np.ndarray]


class ArrayRead(NamedTuple):
    """What is wanted of one array.

    Attributes:
      name: the leaf.
      array: where it lies.
      regions: of it.
      dtype: what its elements become as they are read; what the array has, if it is not given.
    """

    name: str
    array: StoredArray | LazyArray
    regions: Sequence[Region]
    dtype: np.dtype | None = None

    @property
    def memory_dtype(self) -> np.dtype:
        """The dtype of the memory that they are read into."""
        storage = storage_of(self.array.dtype)
        # What is stored as bytes must be whole before it can become anything else.
        return self.dtype if self.dtype is not None and storage.is_native else storage.dtype

    def from_memory(self, memory: np.ndarray) -> np.ndarray:
        """The elements, once all of them were read into `memory`."""
        if memory.dtype == self.dtype:
            return memory
        return from_stored(memory, self.array.dtype)


class ChunkRead(Protocol):
    """One chunk to read."""

    @property
    def name(self) -> str:
        """The leaf."""

    @property
    def key(self) -> str:
        """Where it lies in the key-value store."""

    @property
    def shape(self) -> Shape:
        """Its shape, which at the end of an array is more than the array has."""

    @property
    def storage(self) -> Storage:
        """How its elements are stored."""

    def memory(self) -> np.ndarray | None:
        """The one piece of memory that the chunk, up to its padding, fills in its own order."""

    def distribute(self, elements: np.ndarray) -> None:
        """Copies the elements of the chunk to where they go."""


class Plan(Protocol):
    """How one array is read; `nbytes` is the size of what is wanted of it."""

    nbytes: int

    @property
    def chunks(self) -> Sequence[ChunkRead]:
        """What has to be read."""

    def parts(self) -> Parts:
        """The regions, once all chunks were distributed."""


def plan(read: ArrayRead, *, keep: bool) -> Plan:
    """The plan of `read`; without `keep` every chunk is only to be checked."""
    array = read.array
    assert isinstance(array, StoredArray), "others read themselves"
    if keep and [region.shape for region in read.regions] == [array.shape] == [array.chunks]:
        return _OneChunk(read, array)
    return _Regions(read, array, keep=keep)


class _OneChunk:
    """An array that is one chunk and wanted whole. Most are, and there may be very many."""

    __slots__ = ("_memory", "_read", "key", "name", "nbytes", "shape", "storage")

    def __init__(self, read: ArrayRead, array: StoredArray):
        self._read, self.name = read, read.name
        self.storage = storage_of(array.dtype)
        self.shape = zarr3.stored_shape(array.shape, self.storage)
        self.key = zarr3.chunk_key(array.store, (0,) * len(self.shape))
        self.nbytes = math.prod(self.shape) * self.storage.dtype.itemsize
        self._memory: np.ndarray | None = None

    @property
    def chunks(self) -> Sequence[ChunkRead]:
        """The one."""
        return (self,)

    def memory(self) -> np.ndarray | None:
        """All of the array, unless its elements become something else."""
        if self._read.memory_dtype != self.storage.dtype:
            return None
        self._memory = empty(self.shape, self.storage.dtype)
        return self._memory

    def distribute(self, elements: np.ndarray) -> None:
        """Keeps a copy of `elements`."""
        self._memory = empty(self.shape, self._read.memory_dtype)
        self._memory[...] = elements

    def parts(self) -> Parts:
        """The array."""
        if self._memory is None:  # its chunk could not be read
            self._memory = np.zeros(self.shape, self._read.memory_dtype)
        return {self._read.regions[0]: self._read.from_memory(self._memory)}


class _Use(NamedTuple):
    """Where a part of a chunk goes: the memory, and the index of the part within the chunk."""

    memory: np.ndarray
    within: tuple[Any, ...]


class _Chunk(NamedTuple):
    """One chunk, and where its parts go; nowhere when it is only to be checked."""

    name: str
    key: str
    shape: Shape
    storage: Storage
    uses: Sequence[_Use]

    def memory(self) -> np.ndarray | None:
        """The memory of its only part, when that starts at its corner and is one piece of it."""
        if len(self.uses) != 1:
            return None
        memory, within = self.uses[0]
        starts = [s.start for s in within if s is not ...]
        inner = next((i for i, n in enumerate(self.shape) if n != 1), 0) + 1
        in_order = not any(starts) and memory.shape[inner:] == self.shape[inner:]
        same = memory.dtype == self.storage.dtype
        return memory if in_order and same and memory.flags.c_contiguous else None

    def distribute(self, elements: np.ndarray) -> None:
        """Copies the parts to where they go."""
        for memory, within in self.uses:
            memory[...] = elements[within]


class _Regions:
    """Some regions of an array, each in memory of its own."""

    def __init__(self, read: ArrayRead, array: StoredArray, *, keep: bool):
        self._read, storage = read, storage_of(array.dtype)
        stored = {region: zarr3.stored_region(region, storage) for region in read.regions}
        self.nbytes = sum(math.prod(s.shape) for s in stored.values()) * storage.dtype.itemsize
        self._memory: dict[Region, np.ndarray] = {}
        if keep:
            dtype = read.memory_dtype
            self._memory = {region: empty(s.shape, dtype) for region, s in stored.items()}
        chunk = zarr3.stored_shape(array.chunks, storage)
        self.chunks: Sequence[ChunkRead] = [
            _Chunk(read.name, zarr3.chunk_key(array.store, grid), chunk, storage, uses)
            for grid, uses in self._uses(stored, chunk).items()
        ]

    def _uses(self, stored: Mapping[Region, Region], chunk: Shape) -> Mapping[Shape, list[_Use]]:
        """The chunks that the regions touch, by their position in the grid, each with its uses."""
        uses: dict[Shape, list[_Use]] = {}
        for region, where in stored.items():
            for grid, part in chunks_of(where, chunk):
                found = uses.setdefault(grid, [])
                if region in self._memory:
                    memory = self._memory[region][part.within(where)]
                    found.append(_Use(memory, part.within(chunk_region(grid, chunk))))
        return uses

    def parts(self) -> Parts:
        """The regions."""
        return {r: self._read.from_memory(m) for r, m in self._memory.items()}
