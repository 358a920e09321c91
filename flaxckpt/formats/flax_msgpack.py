"""flax's msgpack files."""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import msgpack
import numpy as np

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats.reading import check_depth
from flaxckpt.formats.zarr import ZarrArray, open_all
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.lazy_array import LazyArray
from flaxckpt.source.leaf import array_leaf
from flaxckpt.store.store import Location

# Files of `flax.serialization.to_bytes`, and of `flax.training.checkpoints` before Orbax.


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
        start = path.read(0, _START) if path.is_file() else b""
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
    tree = decode(path.read(), str(path))
    opener = functools.partial(_open_all, path)
    return with_arrays(tree, _is_reference, opener)


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
    if path.store.can.orbax_marker and not (directory / _COMMITTED).is_file():
        raise CorruptCheckpointError(
            f"the arrays at {directory} were not written to the end. Restore another step."
        )
    return open_all(directory, [reference.removeprefix(_REFERENCE) for reference in references])


# Trees as flax and Orbax write them with msgpack: flax state dicts and Orbax's aggregate files.


# What msgpack's extension types hold.
_NDARRAY, _COMPLEX, _NUMPY_SCALAR, _TUPLE = 1, 2, 3, 4
# What a msgpack leaf can be.
_LEAVES = (str, bytes, bool, int, float, complex, np.ndarray, np.generic, type(None))
# Each tuple in a tuple is a call of msgpack within a call, which takes 50 kB of the C stack.
_MAX_TUPLES = 32
# How `numpy.dtype.name` calls dtypes that numpy does not know by that name, or flaxckpt by another.
_TEXT = re.compile(r"(str|bytes)([1-9]\d{0,9})")
_TIME = re.compile(r"(datetime|timedelta)64(.*)")
_CHUNKED = "__msgpack_chunked_array__"


def decode(data: bytes, path: str) -> Any:
    """The tree in `data`: dicts, lists and tuples over arrays, numbers, strings, bytes and `None`.

    Arrays that flax wrote in pieces are whole again. Arrays may be read-only.

    Args:
      data: all bytes of a file.
      path: where they are from, for errors.

    Raises:
      CorruptCheckpointError: when they are not what flax or Orbax writes.
    """
    try:
        tree = _unpack(data, _MAX_TUPLES)
        check_depth(tree, _children)
    except (ValueError, TypeError, OverflowError, LookupError) as error:
        raise CorruptCheckpointError(
            f"the msgpack file {path} is damaged: {str(error).rstrip('.') or type(error).__name__}"
            ". Restore another step."
        ) from error
    return tree


def with_arrays(
    tree: Any,
    is_reference: Callable[[Any], bool],
    open_all: Callable[[list[Any]], Sequence[LazyArray]],
) -> Any:
    """`tree` with the arrays in place of what refers to them.

    Args:
      tree: from `decode`.
      is_reference: whether a value of it stands for an array that lies elsewhere.
      open_all: opens the arrays that such values stand for.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_reference)
    places = [i for i, leaf in enumerate(leaves) if is_reference(leaf)]
    arrays = open_all([leaves[i] for i in places])
    for i, array in zip(places, arrays, strict=True):
        leaves[i] = array_leaf(array)
    return jax.tree.unflatten(structure, leaves)


def _unpack(data: bytes, tuples: int) -> Any:
    """The value in `data`, in which tuples lie in at most as many `tuples`."""
    hook = functools.partial(_extension, tuples=tuples)
    return msgpack.unpackb(
        data, raw=False, strict_map_key=False, ext_hook=hook, object_pairs_hook=_mapping
    )


def _extension(code: int, data: bytes, tuples: int) -> Any:
    """The value of an extension type."""
    if code == _NDARRAY:
        return _array(data)
    if code == _COMPLEX:
        return complex(*msgpack.unpackb(data))
    if code == _NUMPY_SCALAR:
        return _scalar(_array(data))
    if code != _TUPLE:
        raise ValueError(f"it holds the extension type {code}, which neither flax nor Orbax writes")
    if not tuples:
        raise ValueError(f"it has more than {_MAX_TUPLES} tuples in one another")
    return tuple(_unpack(data, tuples - 1))


def _array(data: bytes) -> np.ndarray:
    """The array whose shape, dtype and bytes are in `data`."""
    shape, name, buffer = msgpack.unpackb(data, raw=True)
    dtype = _parse_name(name.decode() if isinstance(name, bytes) else repr(name))
    _check_shape(shape)
    if not isinstance(buffer, bytes) or math.prod(shape) * dtype.itemsize != len(buffer):
        raise ValueError(f"an array of {dtype.name}{shape} does not fit its bytes")
    if dtype.kind == "U" and np.frombuffer(buffer, "<u4").max(initial=0) > sys.maxunicode:
        raise ValueError("a string has a code that is not a character")
    return np.ndarray(tuple(shape), dtype, buffer)


def _scalar(array: np.ndarray) -> Any:
    """The element of an array of no axes."""
    if array.shape:
        raise ValueError(f"a scalar has the shape {array.shape}")
    return array[()]


def _parse_name(name: str) -> np.dtype:
    """The dtype whose `numpy.dtype.name` is `name`."""
    if match := _TEXT.fullmatch(name):
        code, bits = ("<U", 32) if match[1] == "str" else ("|S", 8)
        return parse_dtype(f"{code}{int(match[2]) // bits}")
    if match := _TIME.fullmatch(name):
        return parse_dtype(f"<{'M' if match[1] == 'datetime' else 'm'}8{match[2]}")
    return parse_dtype(name)


def _check_shape(shape: Any) -> None:
    """Raises a `ValueError` when `shape` is not the shape of an array."""
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{shape!r} is not a shape")


def _mapping(pairs: list[tuple[Any, Any]]) -> Any:
    """What a msgpack map stands for: a dict, a chunked array or a NamedTuple of old."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a dict has the same key twice")
    if {type(key) for key in mapping} not in (set(), {str}, {int}):
        raise ValueError("a dict has keys that are neither all strings nor all numbers")
    if _CHUNKED in mapping:
        return _joined(mapping)
    if mapping.keys() == {"name", "fields", "values"} and isinstance(mapping["fields"], dict):
        return _named_tuple(mapping)
    return mapping


def _joined(mapping: dict[Any, Any]) -> np.ndarray:
    """An array that was too large for one msgpack value."""
    shape, chunks = _in_order(mapping["shape"]), _in_order(mapping["chunks"])
    _check_shape(shape)
    if not chunks or not all(isinstance(chunk, np.ndarray) for chunk in chunks):
        raise ValueError("a piece of a chunked array is not an array")
    if len({chunk.dtype for chunk in chunks}) > 1:
        raise ValueError("the pieces of a chunked array differ in their dtypes")
    return np.concatenate([chunk.reshape(-1) for chunk in chunks]).reshape(shape)


def _named_tuple(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """The fields of a NamedTuple in the form that flax wrote before 2022, as it writes them now."""
    fields, values = mapping["fields"], mapping["values"]
    if not isinstance(values, dict) or fields.keys() != values.keys():
        return mapping  # a dict of somebody's that happens to have these keys
    return dict(zip(_in_order(fields), _in_order(values), strict=True))


def _in_order(mapping: Any) -> list[Any]:
    """The values of a dict whose keys count from '0'."""
    return [mapping[str(i)] for i in range(len(mapping))]


def _children(node: Any) -> list[Any]:
    """The values in a container; none in a leaf, which must be a value of flax's."""
    if isinstance(node, dict):
        return list(node.values())
    if isinstance(node, list | tuple):
        return list(node)
    if not isinstance(node, _LEAVES):
        raise ValueError(f"it holds a {type(node).__name__}, which neither flax nor Orbax writes")
    return []
