"""Looking at files that another library wrote, in a directory or in a bucket."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from flaxckpt.storage.location import Location


def children(path: Location) -> list[str]:
    """The names of the files and directories in the directory `path`, sorted."""
    if isinstance(path, Path):
        return sorted(child.name for child in path.iterdir()) if path.is_dir() else []
    return sorted({name.partition("/")[0] for name in path.names()})


def directories(path: Location) -> list[str]:
    """The names of the directories in the directory `path`, sorted; a bucket has no empty ones."""
    if isinstance(path, Path):
        return [name for name in children(path) if (path / name).is_dir()]
    return sorted({name.partition("/")[0] for name in path.names() if "/" in name})


def is_file(path: Location) -> bool:
    """Whether there is a file at `path`."""
    return path.is_file() if isinstance(path, Path) else path.name in children(path.parent)


def read(path: Location) -> bytes:
    """All of a file.

    Raises:
      FileNotFoundError: when there is none.
    """
    if isinstance(path, Path):
        return path.read_bytes()
    return _there(path.read(), path)


def read_start(path: Location, length: int) -> bytes:
    """The first `length` bytes of a file, or all when it has fewer.

    Raises:
      FileNotFoundError: when there is none.
    """
    if not isinstance(path, Path):
        return _there(path.read(), path)[:length]  # a range must lie within the object
    with path.open("rb") as file:
        return file.read(length)


def read_range(path: Location, start: int, end: int) -> bytes:
    """The bytes of a file from `start` to `end`.

    Raises:
      FileNotFoundError: when there is none.
    """
    if not isinstance(path, Path):
        return _there(path.read(start, end), path)
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)


def _there(data: bytes | None, path: Location) -> bytes:
    """`data`, when there is any."""
    if data is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return data
