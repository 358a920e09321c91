"""Reading and checking chunks: those that lie side by side at once, large ones into place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.restoring.chunk_reads import ChunkRead
from flaxckpt.storage import data_files, zarr3
from flaxckpt.storage.index import Index, Place
from flaxckpt.storage.location import Location

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
        return _Bytes(first.offset, data_files.read(directory, whole))
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
        encoded = data_files.read(directory, place)
    chunk.distribute(zarr3.decode_chunk(encoded, chunk.shape, chunk.storage))


def _read_into(directory: Location, place: Place, memory: np.ndarray) -> None:
    """Reads a chunk whose first bytes are those of `memory`; its padding is only checked."""
    body = zarr3.as_bytes(memory)
    padding = memoryview(bytearray(place.length - len(body) - zarr3.CHECKSUM_BYTES))
    checksum = memoryview(bytearray(zarr3.CHECKSUM_BYTES))
    data_files.read_into(directory, place, [body, padding, checksum])
    zarr3.check_sum([body, padding], checksum)
