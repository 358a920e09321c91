"""Copying one file, between disks and buckets, and making sure that the copy is one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import crc32c

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.storage.location import Location, write_file

BLOCK_BYTES = 8 << 20


def copy_file(source: Location, target: Location, *, fsync: bool) -> int:
    """Copies a file to where there is none, and reads the copy; returns its size.

    An object is on the host as a whole. (Those of flaxckpt have some 256 MiB at the most.)

    Raises:
      FileNotFoundError: when there is no such file.
      CorruptCheckpointError: when what is read from the copy is something else.
    """
    if isinstance(target, Path):
        nbytes, checksum = _to_disk(source, target, fsync)
    else:
        nbytes, checksum = _to_bucket(source, target)
    found = 0
    for block in _blocks(target):
        found = crc32c.crc32c(block, found)
    if found != checksum:
        raise CorruptCheckpointError(
            f"what is read from the copy {target} is not what was written. Try again."
        )
    return nbytes


def _to_disk(source: Location, target: Path, fsync: bool) -> tuple[int, int]:
    """Writes a file; returns its size and its checksum."""
    target.parent.mkdir(parents=True, exist_ok=True)
    nbytes = checksum = 0
    with open(target, "xb") as file:
        for block in _blocks(source):
            file.write(block)
            nbytes, checksum = nbytes + len(block), crc32c.crc32c(block, checksum)
        if fsync:
            file.flush()
            os.fsync(file.fileno())
    return nbytes, checksum


def _to_bucket(source: Location, target: Location) -> tuple[int, int]:
    """Writes an object; returns its size and its checksum."""
    data = b"".join(_blocks(source))
    write_file(target, data, fsync=True)
    return len(data), crc32c.crc32c(data)


def _blocks(path: Location) -> Iterator[bytes]:
    """The bytes of a file."""
    if not isinstance(path, Path):
        data = path.read()
        if data is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield data
        return
    # A checkpoint has no links, and what one leads to is none of it.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block
