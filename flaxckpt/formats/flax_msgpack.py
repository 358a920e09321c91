"""Files of `flax.serialization.to_bytes`, and of `flax.training.checkpoints` before Orbax."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgpack

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats import files, msgpack_tree
from flaxckpt.formats.zarr import ZarrArray, open_all
from flaxckpt.storage.location import Location

NAME = "flax msgpack"
LOOKS_FOR = "a file of flax.serialization.to_bytes or flax.training.checkpoints (checkpoint_100)"

# Arrays that are sharded over processes lie in a directory of their own; this is in their place.
_REFERENCE = "//GDAPlaceholder:"
_ARRAYS = "_gda"
# On Google's storage that directory has its final name while it is written, and at last this file.
_COMMITTED = "commit_success.txt"
# What Orbax has in the place of arrays, in files that are otherwise like these.
_OF_ORBAX = "PLACEHOLDER://"
# Enough for the first key of a state.
_START = 1024


def detect(path: Location) -> bool:
    """Whether `path` is a file that begins like a dict of msgpack with a name as its first key."""
    return first_key(path) is not None


def first_key(path: Location) -> tuple[int, str, bytes] | None:
    """How a file of msgpack begins: how many keys its dict has, the first, and what follows.

    `None` when there is no such file. An empty dict has the first key ''.
    """
    try:
        start = files.read_start(path, _START) if files.is_file(path) else b""
    except FileNotFoundError:  # a directory, in a bucket
        return None
    if start == msgpack.packb({}):
        return 0, "", b""
    return _first_key(start)


def _first_key(start: bytes) -> tuple[int, str, bytes] | None:
    """As `first_key`, from the first bytes of a file."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(start)
    try:
        count = unpacker.read_map_header()
        key = unpacker.unpack() if count else None
    except (ValueError, msgpack.OutOfData):
        return None
    return (count, key, start[unpacker.tell() :]) if isinstance(key, str) else None


def read(path: Location) -> Any:
    """The state dict in the file `path`.

    Raises:
      CorruptCheckpointError: when it is damaged, or belongs to a checkpoint of Orbax.
    """
    tree = msgpack_tree.decode(files.read(path), str(path))
    opener = functools.partial(_open_all, path)
    return msgpack_tree.with_arrays(tree, _is_reference, opener)


def _is_reference(value: Any) -> bool:
    """Whether `value` stands for an array that is not in the file."""
    return isinstance(value, str) and value.startswith((_REFERENCE, _OF_ORBAX))


def _open_all(path: Location, references: list[str]) -> Sequence[ZarrArray]:
    """The arrays that `references` in the file `path` stand for."""
    if not references:
        return []
    if any(reference.startswith(_OF_ORBAX) for reference in references):
        raise CorruptCheckpointError(
            f"{path} is only a part of a checkpoint of Orbax. Restore {path.parent}."
        )
    directory = path.parent / f"{path.name}{_ARRAYS}"
    if str(path).startswith("gs://") and not files.is_file(directory / _COMMITTED):
        raise CorruptCheckpointError(
            f"the arrays at {directory} were not written to the end. Restore another step."
        )
    return open_all(directory, [reference.removeprefix(_REFERENCE) for reference in references])
