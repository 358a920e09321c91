"""Reads of chunks."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.leaves.dtypes import Storage, from_stored, storage_of
from flaxckpt.leaves.spec import LazyArray, StoredArray, nbytes_of
from flaxckpt.sharding.chunks import Region, Shape, chunk_region, chunks_of
from flaxckpt.source.checkpoint import Checkpoint
from flaxckpt.store import ocdbt, zarr3
from flaxckpt.store.ocdbt import Index, Place, empty
from flaxckpt.store.store import Location

# Which chunks the regions of an array need, and where their elements go. No I/O.


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


# Reading and checking chunks: those that lie side by side at once, large ones into place.


# What is read at once; in between, what lies between two chunks may be read too.
SPAN_BYTES = 8 << 20
GAP_BYTES = 1 << 12
# From this size on a chunk is read by itself, straight into the memory where it belongs.
DIRECT_BYTES = 1 << 18


class Located(NamedTuple):
    """A chunk to read, and where it lies, or its bytes; `None` when it is missing."""

    chunk: ChunkRead
    place: Place | bytes | None

    @property
    def is_direct(self) -> bool:
        """Whether it is read by itself."""
        return isinstance(self.place, Place) and self.place.length >= DIRECT_BYTES


class Problem(NamedTuple):
    """Why a chunk could not be read."""

    located: Located
    error: Exception


Span = Sequence[Located]


def spans(chunks: Iterable[ChunkRead], index: Index) -> Iterator[Span]:
    """`chunks` in lists of what is read at once, in the order in which they lie on the disk."""
    located = sorted((Located(c, index.get(c.key)) for c in chunks), key=_order)
    span: list[Located] = []
    for item in located:
        if span and not _adjoins(span, item):
            yield span
            span = []
        span.append(item)
    if span:
        yield span


def _order(located: Located) -> tuple[str, int]:
    """What lies in no file comes first."""
    place = located.place
    return (place.file, place.offset) if isinstance(place, Place) else ("", 0)


def _adjoins(span: Span, item: Located) -> bool:
    """Whether `item` is read together with `span`."""
    first, last = span[0].place, span[-1].place
    if not isinstance(first, Place) or not isinstance(last, Place):
        return not isinstance(item.place, Place)
    if not isinstance(item.place, Place) or item.is_direct or span[0].is_direct:
        return False
    start, end = item.place.offset, item.place.offset + item.place.length
    near = 0 <= start - (last.offset + last.length) <= GAP_BYTES
    return item.place.file == first.file and near and end - first.offset <= SPAN_BYTES


class SpanRead(NamedTuple):
    """A span whose bytes were read: them, or of a chunk that was read by itself, what was wrong."""

    span: Span
    data: _Bytes | None
    problems: list[Problem]


class _Bytes(NamedTuple):
    """Some bytes of a file, from `offset` on."""

    offset: int
    data: memoryview


def read_span(directory: Location, span: Span) -> SpanRead:
    """Reads the bytes of `span`; for `finish_span`, or all there is to do for a large chunk.

    This runs in threads, so it does little that holds Python's lock: with many small chunks, the
    threads would wait for one another more than for the disk.
    """
    if span[0].is_direct:
        return SpanRead(span, None, _chunk_problems(directory, span[0], None))
    return SpanRead(span, _read_together(directory, span), [])


def finish_span(directory: Location, read: SpanRead) -> list[Problem]:
    """Checks and distributes the chunks of a span; returns what was wrong with any of them."""
    if read.span[0].is_direct:
        return read.problems
    return [p for located in read.span for p in _chunk_problems(directory, located, read.data)]


def _read_together(directory: Location, span: Span) -> _Bytes | None:
    """All of `span`; `None` when it is to be read chunk by chunk, so that each error is its own."""
    first, last = span[0].place, span[-1].place
    if not isinstance(first, Place) or not isinstance(last, Place):
        return None
    whole = Place(first.file, first.offset, last.offset + last.length - first.offset)
    try:
        return _Bytes(first.offset, ocdbt.read(directory, whole))
    except CorruptCheckpointError:
        return None


def _chunk_problems(directory: Location, located: Located, data: _Bytes | None) -> list[Problem]:
    """What is wrong with one chunk, after it was put where it belongs."""
    try:
        _read_chunk(directory, located, data)
    except (zarr3.ChunkError, CorruptCheckpointError) as error:
        return [Problem(located, error)]
    return []


def _read_chunk(directory: Location, located: Located, together: _Bytes | None) -> None:
    """Reads one chunk, unless it was read with others, checks it and puts it where it belongs.

    Raises:
      ChunkError: when it is missing or does not match its checksum.
      CorruptCheckpointError: when its file cannot be read.
    """
    chunk, place = located
    if place is None:
        raise zarr3.ChunkError("it is missing")
    encoded: zarr3.Bytes
    if isinstance(place, bytes):
        encoded = place
    elif together is not None:
        start = place.offset - together.offset
        encoded = together.data[start : start + place.length]
    else:
        zarr3.check_size(place.length, chunk.shape, chunk.storage)
        if located.is_direct and (memory := chunk.memory()) is not None:
            _read_into(directory, place, memory)
            return
        encoded = ocdbt.read(directory, place)
    chunk.distribute(zarr3.decode_chunk(encoded, chunk.shape, chunk.storage))


def _read_into(directory: Location, place: Place, memory: np.ndarray) -> None:
    """Reads a chunk whose first bytes are those of `memory`; its padding is only checked."""
    body = zarr3.as_bytes(memory)
    padding = memoryview(bytearray(place.length - len(body) - zarr3.CHECKSUM_BYTES))
    checksum = memoryview(bytearray(zarr3.CHECKSUM_BYTES))
    ocdbt.read_into(directory, place, [body, padding, checksum])
    zarr3.check_sum([body, padding], checksum)


# Reading regions of arrays: every chunk once, checked, straight to where it belongs.
#
# Several threads read; the system calls and the checksums run outside of Python's lock.


# Disks want several requests at a time; more threads than this gain nothing.
THREADS = max(4, min(16, os.cpu_count() or 1))
# A bucket takes its time to answer, and answers many at once.
BUCKET_THREADS = 32
# So little is read without other threads, which would take longer to start.
INLINE_BYTES = 4 << 20
# What is read, and then put on its devices, together.
GROUP_BYTES = 32 << 20
GROUP_ARRAYS = 1024


def read_arrays(
    checkpoint: Checkpoint,
    reads: Sequence[ArrayRead],
    ahead: int,
    held: list[CorruptCheckpointError] | None = None,
) -> Iterator[list[Parts]]:
    """The values of `reads`, in their order, several at a time.

    Args:
      checkpoint: where they lie.
      reads: what is wanted.
      ahead: how many bytes are read ahead of what the caller has taken.
      held: takes the errors, if they are not to be raised; what could not be read is anything.

    Raises:
      CorruptCheckpointError: when a chunk is missing or damaged; the leaf and the chunk are named.
    """
    for plans, problems in _read(checkpoint, reads, ahead, keep=True):
        errors = [CorruptCheckpointError(_describe(checkpoint, p)) for p in problems]
        if errors and held is None:
            raise errors[0]
        if held is not None:
            held += errors
        yield [one.parts() for one in plans]


def check_arrays(
    checkpoint: Checkpoint,
    reads: Sequence[ArrayRead],
    ahead: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> list[str]:
    """What is wrong with `reads`: a line for each that is damaged; nothing of them is kept.

    How many bytes were read since the last time is told to `progress`.

    Raises:
      CorruptCheckpointError: when the database itself cannot be read.
    """
    lines: dict[str, str] = {}
    for plans, problems in _read(checkpoint, reads, ahead, keep=False):
        progress(sum(one.nbytes for one in plans))
        for problem in problems:
            lines.setdefault(problem.located.chunk.name, _describe(checkpoint, problem))
    return list(lines.values())


class _Group(NamedTuple):
    """Arrays that are read together."""

    plans: Sequence[Plan]
    nbytes: int


class _Started(NamedTuple):
    """A group that is being read."""

    group: _Group
    futures: Sequence[concurrent.futures.Future[SpanRead]]

    def finish(self, directory: Location) -> tuple[Sequence[Plan], list[Problem]]:
        """The group once it is read, with what was wrong with it."""
        problems = [p for f in self.futures for p in finish_span(directory, f.result())]
        return self.group.plans, problems


def _groups(reads: Iterable[ArrayRead], limit: int, *, keep: bool) -> Iterator[_Group]:
    """`reads` in groups of at most `limit` bytes, or of one."""
    group: list[Plan] = []
    size = 0
    for found in (plan(read, keep=keep) for read in reads):
        if group and (size + found.nbytes > limit or len(group) == GROUP_ARRAYS):
            yield _Group(group, size)
            group, size = [], 0
        group.append(found)
        size += found.nbytes
    if group:
        yield _Group(group, size)


def _read(
    checkpoint: Checkpoint, reads: Sequence[ArrayRead], ahead: int, *, keep: bool
) -> Iterator[tuple[Sequence[Plan], list[Problem]]]:
    """The plans of `reads` in groups, each once it is carried out, with what was wrong with it."""
    if not reads:
        return
    index = checkpoint.index
    waiting: collections.deque[_Started] = collections.deque()
    with _executor(checkpoint, sum(nbytes_of(read.array) for read in reads)) as pool:
        try:
            for group in _groups(reads, min(GROUP_BYTES, ahead), keep=keep):
                while waiting and sum(s.group.nbytes for s in waiting) + group.nbytes > ahead:
                    yield waiting.popleft().finish(checkpoint.item)
                chunks = (chunk for one in group.plans for chunk in one.chunks)
                read = functools.partial(read_span, checkpoint.item)
                futures = [pool.submit(read, span) for span in spans(chunks, index)]
                waiting.append(_Started(group, futures))
            while waiting:
                yield waiting.popleft().finish(checkpoint.item)
        finally:
            pool.shutdown(cancel_futures=True)


class _Inline(concurrent.futures.Executor):
    """Does at once what it is given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The result of `fn`, as a future."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _executor(checkpoint: Checkpoint, nbytes: int) -> concurrent.futures.Executor:
    """What reads `nbytes`."""
    if not isinstance(checkpoint.path, Path):
        return concurrent.futures.ThreadPoolExecutor(BUCKET_THREADS, "flaxckpt-read")
    if nbytes <= INLINE_BYTES:
        return _Inline()
    return concurrent.futures.ThreadPoolExecutor(THREADS, "flaxckpt-read")


def _describe(checkpoint: Checkpoint, problem: Problem) -> str:
    """The error of a damaged leaf."""
    (chunk, place), error = problem
    where = f"{checkpoint.item}/{place}" if isinstance(place, Place) else str(checkpoint.item)
    return (
        f"the leaf {chunk.name} is damaged: {error} (chunk {chunk.key}, in {where}). "
        "Restore another step."
    )
