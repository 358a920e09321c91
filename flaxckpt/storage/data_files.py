"""Reading bytes of the data files of a database into memory that is there already."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.storage.bucket import BucketPath
from flaxckpt.storage.index import Place
from flaxckpt.storage.location import Location


def read(directory: Location, place: Place) -> memoryview:
    """The bytes of `place`; see `read_into`."""
    # Not from the heap: each thread that reads would keep some of its own.
    memory = memoryview(mmap.mmap(-1, max(1, place.length)))[: place.length]
    read_into(directory, place, [memory])
    return memory


def read_into(directory: Location, place: Place, buffers: Sequence[memoryview]) -> None:
    """Fills `buffers`, one after the other, with the bytes of `place`.

    Args:
      directory: of the database.
      place: as many bytes as `buffers` have.
      buffers: writable memory.

    Raises:
      CorruptCheckpointError: when the file is missing, too short, or cannot be read.
    """
    if not isinstance(directory, Path):
        _copy_into(directory / place.file, place, buffers)
        return
    # Opened each time: there may be more files than a process may have open.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(directory / place.file, flags)
        try:
            missing = _fill(fd, place.offset, list(buffers))
        finally:
            os.close(fd)
    except OSError as error:
        raise CorruptCheckpointError(f"it cannot be read: {error}") from None
    if missing:
        raise CorruptCheckpointError(f"its last {missing} bytes are missing")


def _copy_into(path: BucketPath, place: Place, buffers: Sequence[memoryview]) -> None:
    """As `read_into`, from an object."""
    try:
        found = path.read(place.offset, place.offset + place.length)
    except ValueError as error:
        raise CorruptCheckpointError(f"it cannot be read: {error}") from None
    if found is None:
        raise CorruptCheckpointError("it is missing")
    data = memoryview(found)
    for buffer in buffers:
        buffer[:] = data[: len(buffer)]
        data = data[len(buffer) :]


def _fill(fd: int, offset: int, buffers: list[memoryview]) -> int:
    """Fills `buffers` from `offset` of a file; returns how many bytes the file lacks."""
    while any(map(len, buffers)):
        count = os.preadv(fd, buffers, offset)
        if not count:
            break
        offset += count
        # A system call reads at most 2 GiB, and may read less.
        while count:
            taken = min(count, len(buffers[0]))
            buffers[0] = buffers[0][taken:]
            count -= taken
            if not buffers[0]:
                buffers.pop(0)
    return sum(map(len, buffers))
