"""Reads arrays of any format, several at a time and not too far ahead. It needs no jax."""

from __future__ import annotations

import collections
import concurrent.futures
import math
from collections.abc import Iterator, Sequence

import numpy as np

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.spec import StoredArray
from flaxckpt.source.checkpoint import Checkpoint, Source
from flaxckpt.source.chunk_reads import THREADS, ArrayRead, Parts, read_arrays


def read_source(
    source: Source,
    reads: Sequence[ArrayRead],
    ahead: int,
    held: list[CorruptCheckpointError] | None = None,
) -> Iterator[list[Parts]]:
    """The values of `reads` of `source`, in their order, several at a time.

    Args:
      source: where they lie.
      reads: what is wanted: arrays of flaxckpt's own format only, or arrays that read themselves.
      ahead: how many bytes are read ahead of what the caller has taken.
      held: takes the errors, if they are not to be raised; what could not be read is anything.

    Raises:
      CorruptCheckpointError: when something is missing or damaged; the leaf is named.
    """
    if reads and isinstance(reads[0].array, StoredArray):
        assert isinstance(source, Checkpoint), "no other source has such arrays"
        yield from read_arrays(source, reads, ahead, held)
    else:
        yield from _read_lazily(reads, ahead, held)


def read_each(
    source: Source,
    reads: Sequence[ArrayRead],
    ahead: int,
    held: list[CorruptCheckpointError] | None = None,
) -> Iterator[np.ndarray]:
    """As `read_source`, for reads of one region each: the values of one after the other."""
    for group in read_source(source, reads, ahead, held):
        for parts in group:
            (values,) = parts.values()
            yield values


def _read_lazily(
    reads: Sequence[ArrayRead], ahead: int, held: list[CorruptCheckpointError] | None
) -> Iterator[list[Parts]]:
    """As `read_source`, for arrays that read themselves."""
    waiting: collections.deque[tuple[concurrent.futures.Future[Parts], int]] = collections.deque()
    size = 0
    with concurrent.futures.ThreadPoolExecutor(THREADS, "flaxckpt-read") as pool:
        try:
            for read in reads:
                wanted = _nbytes(read)
                while waiting and size + wanted > ahead:
                    future, nbytes = waiting.popleft()
                    size -= nbytes
                    yield [future.result()]
                waiting.append((pool.submit(_read, read, held), wanted))
                size += wanted
            while waiting:
                yield [waiting.popleft()[0].result()]
        finally:
            pool.shutdown(cancel_futures=True)


def _read(read: ArrayRead, held: list[CorruptCheckpointError] | None) -> Parts:
    """The values of one array."""
    assert not isinstance(read.array, StoredArray)
    dtype = parse_dtype(read.array.dtype) if read.dtype is None else read.dtype
    try:
        found = read.array.read(read.regions)
    except CorruptCheckpointError as error:
        named = CorruptCheckpointError(f"the leaf {read.name} is damaged: {error}")
        if held is None:
            raise named from error
        held.append(named)
        found = [np.zeros(region.shape, dtype) for region in read.regions]
    values = (part.astype(dtype, copy=False) for part in found)
    return dict(zip(read.regions, values, strict=True))


def _nbytes(read: ArrayRead) -> int:
    """The size of what is wanted, in bytes."""
    itemsize = parse_dtype(read.array.dtype).itemsize
    return sum(math.prod(region.shape) for region in read.regions) * itemsize
