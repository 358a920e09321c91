"""Reading the arrays of leaves: many at a time, in batches where their format has small chunks."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.leaves.dtypes import Storage, from_stored, parse_dtype, storage_of
from flaxckpt.leaves.lazy_array import LazyArray, nbytes_of
from flaxckpt.leaves.spec import StoredArray
from flaxckpt.sharding.chunks import Region, Shape, chunk_region, chunks_of
from flaxckpt.store import ocdbt, zarr3
from flaxckpt.store.ocdbt import ValueIndex, ValueRef, empty
from flaxckpt.store.store import Location

# The values of one array that a read has, by their regions.
RegionValues = Mapping[Region, np.ndarray]


class Database(Protocol):
    """The database that has the chunks of the arrays of one tree. (A `Checkpoint` is one.)"""

    @property
    def item(self) -> Location:
        """Its directory."""

    @property
    def index(self) -> ValueIndex:
        """Its keys, each with its value or where that lies."""


class ChunkedArray:
    """An array of flaxckpt's own format; a `LazyArray`. Many of them are read in one batch."""

    __slots__ = ("chunks", "database", "dtype", "name", "shape", "sharding", "store")

    def __init__(self, name: str, stored: StoredArray, database: Database):
        """The array of the leaf `name`, whose record is `stored`."""
        self.name, self.database = name, database
        self.store, self.dtype, self.shape, self.chunks, self.sharding = stored

    def read(self, regions: Sequence[Region]) -> Sequence[np.ndarray]:
        """The elements of each of `regions`."""
        wanted = list(dict.fromkeys(regions))
        ((values,),) = read_arrays([ArrayRead(self.name, self, wanted)], GROUP_BYTES)
        return [values[region] for region in regions]


class ArrayRead(NamedTuple):
    """What is wanted of one array.

    Attributes:
      name: the leaf, for errors about an array that does not know it.
      array: the array.
      regions: of it.
      dtype: what its elements become as they are read; the array's own, if it is not given.
    """

    name: str
    array: LazyArray
    regions: Sequence[Region]
    dtype: np.dtype | None = None

    @property
    def database(self) -> Database | None:
        """The database of an array whose chunks are read in batches; `None` for other formats."""
        return self.array.database if isinstance(self.array, ChunkedArray) else None

    @property
    def memory_dtype(self) -> np.dtype:
        """The dtype of the memory that chunks are read into."""
        storage = storage_of(self.array.dtype)
        # What is stored as bytes must be whole before it can become anything else.
        return self.dtype if self.dtype is not None and storage.is_native else storage.dtype

    def from_memory(self, memory: np.ndarray) -> np.ndarray:
        """The elements, once all of them were read into `memory`."""
        if memory.dtype == self.dtype:
            return memory
        return from_stored(memory, self.array.dtype)


# Reading regions of arrays: every chunk once, checked, straight to where it belongs.
#
# The arrays are read in groups, each of one database or of arrays that read themselves. Several
# threads read; the system calls and the checksums run outside of Python's lock.


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
    reads: Sequence[ArrayRead], ahead: int, held: list[CorruptCheckpointError] | None = None
) -> Iterator[list[RegionValues]]:
    """The values of `reads`, in their order, several at a time.

    Args:
      reads: what is wanted.
      ahead: how many bytes are read ahead of what the caller has taken.
      held: collects the errors instead of raising them; values that could not be read are
        unspecified.

    Raises:
      CorruptCheckpointError: when something is missing or damaged; the leaf is named.
    """
    for plans, damages in _read(reads, ahead, keep=True):
        errors = [CorruptCheckpointError(damage.message) for damage in damages]
        if errors and held is None:
            raise errors[0]
        if held is not None:
            held += errors
        yield [one.values() for one in plans]


def read_each(
    reads: Sequence[ArrayRead], ahead: int, held: list[CorruptCheckpointError] | None = None
) -> Iterator[np.ndarray]:
    """As `read_arrays`, for reads of one region each: the values of one after the other."""
    for group in read_arrays(reads, ahead, held):
        for found in group:
            (values,) = found.values()
            yield values


def check_arrays(
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
    for plans, damages in _read(reads, ahead, keep=False):
        progress(sum(one.nbytes for one in plans))
        for damage in damages:
            lines.setdefault(damage.leaf, damage.message)
    return list(lines.values())


class _Damage(NamedTuple):
    """What is wrong with a leaf."""

    leaf: str
    message: str


class _ReadGroup(NamedTuple):
    """Arrays that are read together: of one database, or of other formats."""

    database: Database | None
    plans: Sequence[ReadPlan]
    nbytes: int

    def start(self, pool: concurrent.futures.Executor) -> _Started:
        """Begins to read the group."""
        futures: list[concurrent.futures.Future[Any]]
        if self.database is None:
            futures = [pool.submit(one.read) for one in self.plans if isinstance(one, _ByItself)]
        else:
            chunks = (chunk for one in self.plans for chunk in one.chunks)
            read = functools.partial(read_span, self.database.item)
            # `database.index` reads the B-tree on first use.
            futures = [pool.submit(read, span) for span in spans(chunks, self.database.index)]
        return _Started(self, futures)


class _Started(NamedTuple):
    """A group that is being read."""

    group: _ReadGroup
    futures: Sequence[concurrent.futures.Future[Any]]

    def finish(self) -> tuple[Sequence[ReadPlan], list[_Damage]]:
        """The plans of the group once it is read, and what was wrong with it."""
        found = (future.result() for future in self.futures)
        if (database := self.group.database) is None:
            return self.group.plans, [damage for damage in found if damage is not None]
        problems = (p for read in found for p in finish_span(database.item, read))
        return self.group.plans, [_damage(database, problem) for problem in problems]


def _read(
    reads: Sequence[ArrayRead], ahead: int, *, keep: bool
) -> Iterator[tuple[Sequence[ReadPlan], list[_Damage]]]:
    """The plans of `reads` in groups, each once it is carried out, with what was wrong with it."""
    if not reads:
        return
    waiting: collections.deque[_Started] = collections.deque()
    with _executor(reads) as pool:
        try:
            for group in _groups(reads, min(GROUP_BYTES, ahead), keep=keep):
                while waiting and sum(s.group.nbytes for s in waiting) + group.nbytes > ahead:
                    yield waiting.popleft().finish()
                waiting.append(group.start(pool))
            while waiting:
                yield waiting.popleft().finish()
        finally:
            pool.shutdown(cancel_futures=True)


def _groups(reads: Iterable[ArrayRead], limit: int, *, keep: bool) -> Iterator[_ReadGroup]:
    """`reads` in groups of at most `limit` bytes, or of one."""
    group: list[ReadPlan] = []
    database, size = None, 0
    for read in reads:
        found = plan_read(read, keep=keep)
        is_full = size + found.nbytes > limit or len(group) == GROUP_ARRAYS
        if group and (is_full or read.database is not database):
            yield _ReadGroup(database, group, size)
            group, size = [], 0
        group.append(found)
        database, size = read.database, size + found.nbytes
    if group:
        yield _ReadGroup(database, group, size)


class _Inline(concurrent.futures.Executor):
    """Does at once what it is given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The result of `fn`, as a future."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _executor(reads: Sequence[ArrayRead]) -> concurrent.futures.Executor:
    """What reads `reads`."""
    databases = {id(database): database for read in reads if (database := read.database)}
    if any(database.item.store.can.latency for database in databases.values()):
        return concurrent.futures.ThreadPoolExecutor(BUCKET_THREADS, "flaxckpt-read")
    is_own = all(read.database is not None for read in reads)
    if is_own and sum(nbytes_of(read.array) for read in reads) <= INLINE_BYTES:
        return _Inline()
    return concurrent.futures.ThreadPoolExecutor(THREADS, "flaxckpt-read")


def _damage(database: Database, problem: Problem) -> _Damage:
    """What is wrong with the leaf of a chunk."""
    (chunk, place), error = problem
    where = f"{database.item}/{place}" if isinstance(place, ValueRef) else str(database.item)
    return _Damage(
        chunk.name,
        f"the leaf {chunk.name} is damaged: {error} (chunk {chunk.key}, in {where}). "
        "Restore another step.",
    )


# Which chunks the regions of an array need, and where their elements go.


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


class ReadPlan(Protocol):
    """How one array is read; `nbytes` is the size of what is wanted of it."""

    nbytes: int

    @property
    def chunks(self) -> Sequence[ChunkRead]:
        """The chunks of a database that have to be read."""

    def values(self) -> RegionValues:
        """The regions, once all was read."""


def plan_read(read: ArrayRead, *, keep: bool) -> ReadPlan:
    """The plan of `read`; without `keep` every chunk is only to be checked."""
    array = read.array
    if not isinstance(array, ChunkedArray):
        return _ByItself(read)
    if keep and [region.shape for region in read.regions] == [array.shape] == [array.chunks]:
        return _OneChunk(read, array)
    return _Regions(read, array, keep=keep)


class _ByItself:
    """An array of another format, which reads itself."""

    chunks: Sequence[ChunkRead] = ()

    def __init__(self, read: ArrayRead):
        self._wanted = read
        self._dtype = parse_dtype(read.array.dtype)
        elements = sum(math.prod(region.shape) for region in read.regions)
        self.nbytes = elements * self._dtype.itemsize
        self._values: Sequence[np.ndarray] = ()

    def read(self) -> _Damage | None:
        """Reads all regions at once."""
        name, array, regions, dtype = self._wanted
        dtype = self._dtype if dtype is None else dtype
        try:
            found = array.read(regions)
        except CorruptCheckpointError as error:
            self._values = [np.zeros(region.shape, dtype) for region in regions]
            return _Damage(name, f"the leaf {name} is damaged: {error}")
        self._values = [part.astype(dtype, copy=False) for part in found]
        return None

    def values(self) -> RegionValues:
        """The regions."""
        return dict(zip(self._wanted.regions, self._values, strict=True))


class _OneChunk:
    """An array that is one chunk and wanted whole. Most are, and there may be very many."""

    __slots__ = ("_memory", "_read", "key", "name", "nbytes", "shape", "storage")

    def __init__(self, read: ArrayRead, array: ChunkedArray):
        self._read, self.name = read, array.name
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

    def values(self) -> RegionValues:
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

    def __init__(self, read: ArrayRead, array: ChunkedArray, *, keep: bool):
        self._read, storage = read, storage_of(array.dtype)
        stored = {region: zarr3.stored_region(region, storage) for region in read.regions}
        self.nbytes = sum(math.prod(s.shape) for s in stored.values()) * storage.dtype.itemsize
        self._memory: dict[Region, np.ndarray] = {}
        if keep:
            dtype = read.memory_dtype
            self._memory = {region: empty(s.shape, dtype) for region, s in stored.items()}
        chunk = zarr3.stored_shape(array.chunks, storage)
        self.chunks: Sequence[ChunkRead] = [
            _Chunk(array.name, zarr3.chunk_key(array.store, grid), chunk, storage, uses)
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

    def values(self) -> RegionValues:
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
    place: ValueRef | bytes | None

    @property
    def is_direct(self) -> bool:
        """Whether it is read by itself."""
        return isinstance(self.place, ValueRef) and self.place.length >= DIRECT_BYTES


class Problem(NamedTuple):
    """Why a chunk could not be read."""

    located: Located
    error: Exception


Span = Sequence[Located]


def spans(chunks: Iterable[ChunkRead], index: ValueIndex) -> Iterator[Span]:
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
    return (place.file, place.offset) if isinstance(place, ValueRef) else ("", 0)


def _adjoins(span: Span, item: Located) -> bool:
    """Whether `item` is read together with `span`."""
    first, last = span[0].place, span[-1].place
    if not isinstance(first, ValueRef) or not isinstance(last, ValueRef):
        return not isinstance(item.place, ValueRef)
    if not isinstance(item.place, ValueRef) or item.is_direct or span[0].is_direct:
        return False
    start, end = item.place.offset, item.place.offset + item.place.length
    near = 0 <= start - (last.offset + last.length) <= GAP_BYTES
    return item.place.file == first.file and near and end - first.offset <= SPAN_BYTES


class SpanRead(NamedTuple):
    """A span whose bytes were read: them, or of a chunk that was read by itself, what was wrong."""

    span: Span
    data: _FileBytes | None
    problems: list[Problem]


class _FileBytes(NamedTuple):
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


def _read_together(directory: Location, span: Span) -> _FileBytes | None:
    """All of `span`; `None` when it is to be read chunk by chunk, so that each error is its own."""
    first, last = span[0].place, span[-1].place
    if not isinstance(first, ValueRef) or not isinstance(last, ValueRef):
        return None
    whole = ValueRef(first.file, first.offset, last.offset + last.length - first.offset)
    try:
        return _FileBytes(first.offset, ocdbt.read(directory, whole))
    except CorruptCheckpointError:
        return None


def _chunk_problems(
    directory: Location, located: Located, data: _FileBytes | None
) -> list[Problem]:
    """What is wrong with one chunk, after it was put where it belongs."""
    try:
        _read_chunk(directory, located, data)
    except (zarr3.ChunkError, CorruptCheckpointError) as error:
        return [Problem(located, error)]
    return []


def _read_chunk(directory: Location, located: Located, together: _FileBytes | None) -> None:
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


def _read_into(directory: Location, place: ValueRef, memory: np.ndarray) -> None:
    """Reads a chunk whose first bytes are those of `memory`; its padding is only checked."""
    body = zarr3.as_bytes(memory)
    padding = memoryview(bytearray(place.length - len(body) - zarr3.CHECKSUM_BYTES))
    checksum = memoryview(bytearray(zarr3.CHECKSUM_BYTES))
    ocdbt.read_into(directory, place, [body, padding, checksum])
    zarr3.check_sum([body, padding], checksum)
