"""Checkpoints that levanter wrote: a directory of zarr arrays by key path, and `metadata.json`.

All containers come back as dicts; the elements of lists and the like have the names '0', '1', ...
"""

from __future__ import annotations

from typing import Any

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats.reading import Wrong, damaged, member, read_json
from flaxckpt.formats.zarr import array_names, nested, read_arrays
from flaxckpt.store.store import Location

NAME = "levanter"
LOOKS_FOR = "a directory with a metadata.json that has a step and a timestamp, as step-1000/"

# Written last: its being there is the commit.
_METADATA = "metadata.json"
_FIRST_BYTES = 4096


def detect(path: Location) -> bool:
    """Whether there is a finished checkpoint of levanter at `path`."""
    try:
        start = (path / _METADATA).read(0, _FIRST_BYTES)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    return b'"step"' in start and b'"timestamp"' in start


def read(path: Location) -> Any:
    """The tree: dicts over arrays.

    Raises:
      CorruptCheckpointError: when it is damaged.
    """
    _check(path / _METADATA)
    names = array_names(path)
    if not names:
        raise CorruptCheckpointError(
            f"the levanter checkpoint at {path} has no arrays. Restore another step."
        )
    return nested(read_arrays(path, names), "/", path)


def _check(file: Location) -> None:
    """Checks that the metadata say which step it is."""
    try:
        member(read_json(file), "step", int)
    except Wrong as error:
        raise damaged(file, error) from None
