"""Checkpoints of other libraries in the directory of a run. It needs no jax."""

from __future__ import annotations

import concurrent.futures
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from flaxckpt.cli.work.steps import THREADS, bytes_on_disk
from flaxckpt.errors import CheckpointNotFoundError
from flaxckpt.formats.reader import find_reader
from flaxckpt.storage.location import Location


class Other(NamedTuple):
    """A checkpoint of another library.

    Attributes:
      name: of its file or directory.
      format: what its format is called.
      seconds: when it was last changed, since 1970; `None` in a bucket.
      nbytes: the size of its files; `None` in a bucket.
    """

    name: str
    format: str
    seconds: float | None
    nbytes: int | None


def others(directory: Location, names: Iterable[str]) -> list[Other]:
    """Those of `names` in `directory` that a reader knows, in the order of the numbers in them.

    Raises:
      CheckpointNotFoundError: when `directory` itself is a checkpoint.
    """
    if (reader := find_reader(directory)) is not None:
        raise CheckpointNotFoundError(
            f"{directory} is one checkpoint of {reader.NAME}, and no run. Use flaxckpt show "
            f"{directory}."
        )
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(functools.partial(_look, directory), sorted(names, key=_numbers))
        return [other for other in found if other is not None]


def _look(directory: Location, name: str) -> Other | None:
    """What is at `name`, if that is a checkpoint."""
    path = directory / name
    if (reader := find_reader(path)) is None:
        return None
    if not isinstance(path, Path):
        return Other(name, reader.NAME, None, None)
    about = path.stat()
    nbytes = bytes_on_disk(path) if path.is_dir() else about.st_size
    return Other(name, reader.NAME, about.st_mtime, nbytes)


def _numbers(name: str) -> list[str | int]:
    """A key to sort by that puts `step_9` before `step_10`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]
