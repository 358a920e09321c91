"""Checkpoints that big_vision wrote: a zarr directory for each leaf, or one `.npz` file.

All containers come back as dicts: the elements of lists, tuples and NamedTuples are '0', '1', ...
"""

from __future__ import annotations

import re
from typing import Any

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats import files
from flaxckpt.formats.json_files import damaged
from flaxckpt.formats.npz import open_npz
from flaxckpt.formats.zarr_directories import METADATA, array_names, nested, read_arrays
from flaxckpt.leaves.lazy import LazyLeaf
from flaxckpt.leaves.record import LeafSpec
from flaxckpt.storage.location import Location

NAME = "big_vision"
LOOKS_FOR = (
    "a directory with zarr directories such as params~Dense_0~kernel, a name with a file of that "
    "name and -LAST beside it, or an .npz file"
)

_SEPARATOR, _LAST, _NPZ = "~", "-LAST", ".npz"
_ZIP = b"PK\x03\x04"
# `checkpoint.bv-000000010`, or `-tmp` after it for one that is not kept.
_SUFFIX = re.compile(r"\d{9}(-tmp)?")
_DIRECTORY = re.compile(rf".+-{_SUFFIX.pattern}")


def detect(path: Location) -> bool:
    """Whether `path` is a checkpoint of big_vision, or names the last of several."""
    if path.name.endswith(_NPZ):
        return _start(path, len(_ZIP)) == _ZIP
    return _is_directory(path) or bool(_start(path.parent / (path.name + _LAST), 1))


def _is_directory(path: Location) -> bool:
    """Whether `path` holds arrays by such names; one is looked into."""
    children = files.children(path)
    if _DIRECTORY.fullmatch(path.name) is None:
        children = [name for name in children if _SEPARATOR in name]
    return bool(children) and _start(path / children[0] / METADATA, 1) == b"{"


def _start(file: Location, length: int) -> bytes:
    """The first bytes of a file; none when there is no such file."""
    try:
        return files.read_start(file, length)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return b""


def read(path: Location) -> Any:
    """The tree: dicts over arrays.

    Raises:
      CorruptCheckpointError: when it is damaged.
    """
    if path.name.endswith(_NPZ):
        return _read_npz(path)
    directory = path if _is_directory(path) else _last(path)
    names = array_names(directory)
    if not names:
        raise CorruptCheckpointError(
            f"the big_vision checkpoint at {directory} has no arrays. Restore another step."
        )
    return nested(read_arrays(directory, names), _SEPARATOR, directory)


def _last(path: Location) -> Location:
    """The checkpoint that is the last of those called `path`."""
    file = path.parent / (path.name + _LAST)
    suffix = files.read(file).decode("utf-8", "replace").strip()
    if _SUFFIX.fullmatch(suffix) is None:
        raise damaged(file, f"{suffix[:50]!r} is no suffix of a checkpoint")
    return path.parent / f"{path.name}-{suffix}"


def _read_npz(path: Location) -> Any:
    """The tree in an `.npz` file."""
    arrays = open_npz(path)
    leaves = {n: LazyLeaf(LeafSpec("numpy", a.dtype, a.shape), a) for n, a in arrays.items()}
    return nested(leaves, "/", path)
