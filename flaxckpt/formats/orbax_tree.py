"""One tree that Orbax wrote: a directory with `_METADATA`, or before 2024 with `checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats import files, msgpack_tree, orbax_metadata, zarr
from flaxckpt.formats.json_files import damaged, read_json
from flaxckpt.formats.orbax_metadata import EMPTY, STRINGS, TREE, Entry, KeyPath, TreeMetadata
from flaxckpt.formats.orbax_shape import assemble, with_types
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.lazy import InMemory, LazyArray, LazyLeaf
from flaxckpt.leaves.record import LeafSpec
from flaxckpt.storage.location import Location

AGGREGATE, DATABASE, _OF_PROCESS = "checkpoint", "manifest.ocdbt", "ocdbt.process_"
# What stands in the msgpack file for a value that is an array of its own.
_ELSEWHERE = ("PLACEHOLDER://", "AGGREGATED://")
# The first bytes of a msgpack map or list with children; text protos begin with a letter.
_MSGPACK = frozenset([*range(0x81, 0x90), *range(0x91, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
_T5X = b"\x82\xa7version"
_NNX_STATE = "_pytree__state"
_KINDS = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}


def is_tree(path: Location, children: Sequence[str]) -> bool:
    """Whether the directory `path`, with these `children`, holds one tree, or what is left of it.

    What each process wrote is a database too, but no tree.
    """
    merged = DATABASE in children and any(name.startswith(_OF_PROCESS) for name in children)
    return TREE in children or merged or _has_aggregate(path, children)


def _has_aggregate(path: Location, children: Sequence[str]) -> bool:
    """Whether there is a msgpack file of Orbax's; T5X and TensorFlow call theirs the same."""
    if AGGREGATE not in children:
        return False
    try:
        start = files.read_start(path / AGGREGATE, 32)
    except (FileNotFoundError, IsADirectoryError):  # an array of that name
        return False
    return bool(start) and start[0] in _MSGPACK and not start.startswith(_T5X)


def read_tree(path: Location) -> Any:
    """The tree in the directory `path`.

    Raises:
      CorruptCheckpointError: when it is damaged.
    """
    children = files.children(path)
    if TREE in children:
        return _read_described(path, children, orbax_metadata.read_tree_metadata(path))
    if AGGREGATE not in children:
        raise CorruptCheckpointError(
            f"the Orbax checkpoint at {path} is incomplete: {TREE} is missing. "
            "Restore another step."
        )
    return _read_aggregate(path, children)


# With `_METADATA`


def _read_described(path: Location, children: Sequence[str], metadata: TreeMetadata) -> Any:
    """The tree that `metadata` describes."""
    file = path / TREE
    entries = {entry.keys: entry for entry in metadata.entries}
    if len(entries) != len(metadata.entries):
        raise damaged(file, "it has two leaves of the same key path")
    tree = assemble({keys: e for keys, e in entries.items() if not _is_of_nnx(e)}, file)
    tree = _filled(tree, _Source(path, children, metadata))
    return tree if metadata.rich is None else with_types(tree, metadata.rich)


def _is_of_nnx(entry: Entry) -> bool:
    """Whether it is what nnx has in its objects beside their attributes, which holds nothing."""
    return entry.value_type in EMPTY and bool(entry.keys) and entry.keys[-1] == _NNX_STATE


def _filled(node: Any, source: _Source) -> Any:
    """`node` with its leaves instead of what is known of them."""
    if isinstance(node, Entry):
        return source.leaf(node)
    if isinstance(node, list):
        return [_filled(child, source) for child in node]
    return {key: _filled(child, source) for key, child in node.items()}


class _Source:
    """Where the values of a tree come from."""

    def __init__(self, path: Location, children: Sequence[str], metadata: TreeMetadata) -> None:
        """Reads what is small and opens all arrays."""
        self._path = path
        types = {entry.value_type for entry in metadata.entries}
        self._strings = orbax_metadata.read_strings(path) if "string" in types else None
        inline = any(entry.inline for entry in metadata.entries)
        self._inline: Any = _decode_aggregate(path) if inline else None
        self._arrays = _open_arrays(path, children, metadata)
        keys = "jax.Array" in types and orbax_metadata.read_key_impls(path, children)
        self._impls = keys or {}

    def leaf(self, entry: Entry) -> Any:
        """The leaf of `entry`."""
        if entry.value_type in EMPTY:
            return EMPTY[entry.value_type]
        if entry.inline:
            return self._inline_leaf(entry)
        if entry.value_type == "string":
            return orbax_metadata.string_at(self._strings, entry.name, self._path / STRINGS)
        array = self._arrays[entry.name]
        if entry.name in self._impls:
            return key_leaf(array, self._impls[entry.name], f"{self._path}/{entry.name}")
        return array_leaf(array, entry.value_type)

    def _inline_leaf(self, entry: Entry) -> Any:
        """A value that is in the msgpack file."""
        found: Any = self._inline
        for key in entry.keys:
            try:
                found = found[key]
            except (TypeError, LookupError):
                file = self._path / AGGREGATE
                raise damaged(file, f"it has no value {entry.name!r}") from None
        if isinstance(found, np.ndarray):
            return array_leaf(InMemory(found), entry.value_type)
        return found


def _open_arrays(
    path: Location, children: Sequence[str], metadata: TreeMetadata
) -> Mapping[str, LazyArray]:
    """The arrays of a tree, by name."""
    names = list(
        {
            entry.name: None
            for entry in metadata.entries
            if not entry.inline and entry.value_type not in (*EMPTY, "string")
        }
    )
    # Files before 2025 do not say whether there is a database.
    ocdbt = DATABASE in children if metadata.ocdbt is None else metadata.ocdbt
    if ocdbt and names and DATABASE not in children:
        raise CorruptCheckpointError(
            f"the Orbax checkpoint at {path} is incomplete: {DATABASE} is missing, so its save "
            "was not finished. Restore another step."
        )
    settings = {"zarr3": metadata.zarr3, "missing_as_zero": metadata.missing_as_zero}
    opened = zarr.open_all(path, names, ocdbt=ocdbt, **settings)
    return dict(zip(names, opened, strict=True))


# Without


def _read_aggregate(path: Location, children: Sequence[str]) -> Any:
    """The tree of a msgpack file, as Orbax wrote it up to 0.3; it does not say what was what."""
    tree = _decode_aggregate(path)
    placed = _Placed({}, {})
    _collect(tree, (), placed)
    strings = _old_strings(path, list(placed.names.values()))
    names = [name for name in placed.names.values() if name not in strings]
    settings = {"ocdbt": DATABASE in children, "missing_as_zero": True}
    arrays = zarr.open_all(path, names, **settings)
    found: dict[str, Any] = {a.name: array_leaf(a, "np.ndarray") for a in arrays} | strings
    leaves = placed.values | {keys: found[name] for keys, name in placed.names.items()}
    return _replace(tree, (), leaves)


class _Placed(NamedTuple):
    """The leaves of a msgpack tree: those that are values, and the names of those that are not."""

    values: dict[KeyPath, Any]
    names: dict[KeyPath, str]


def _collect(node: Any, keys: KeyPath, placed: _Placed) -> None:
    """Puts the leaves of `node`, which is at `keys`, into `placed`."""
    if isinstance(node, dict | list | tuple):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in items:
            _collect(child, (*keys, key), placed)
    elif isinstance(node, str) and node.startswith(_ELSEWHERE):
        placed.names[keys] = node.partition("://")[2]
    else:
        placed.values[keys] = node


def _replace(node: Any, keys: KeyPath, leaves: Mapping[KeyPath, Any]) -> Any:
    """`node`, which is at `keys`, with `leaves` for its leaves; the keys of dicts are strings."""
    if isinstance(node, dict):
        return {str(key): _replace(child, (*keys, key), leaves) for key, child in node.items()}
    if isinstance(node, list | tuple):
        children = (_replace(child, (*keys, i), leaves) for i, child in enumerate(node))
        return tuple(children) if isinstance(node, tuple) else list(children)
    return leaves[keys]


def _old_strings(path: Location, names: Sequence[str]) -> dict[str, str]:
    """The strings of Orbax 0.3, which lie in the directory of the first of them."""
    strings: dict[str, str] = {}
    for name in names:
        zarr.check_inside(path, name)
        file = path / name / STRINGS
        if not (file.is_file() if isinstance(file, Path) else file.exists()):
            continue
        found = read_json(file)
        if not isinstance(found, dict) or not all(type(s) is str for s in found.values()):
            raise damaged(file, "it is no object of strings")
        strings |= found
    return {name: strings[name] for name in names if name in strings}


def _decode_aggregate(path: Location) -> Any:
    """What is in the msgpack file."""
    file = path / AGGREGATE
    return msgpack_tree.decode(files.read(file), str(file))


# Leaves


def array_leaf(array: LazyArray, value_type: str) -> LazyLeaf:
    """The leaf that `array` is, if it was a `value_type`."""
    dtype = parse_dtype(array.dtype)
    if value_type == "jax.Array":
        return LazyLeaf(LeafSpec("jax", array.dtype, array.shape), array)
    if value_type == "scalar" and array.shape == ():
        # ml_dtypes' own have the kind "V"; a bfloat16 number was given back as a float.
        return LazyLeaf(LeafSpec(_KINDS.get(dtype.kind, "float")), array)
    return LazyLeaf(LeafSpec("numpy", array.dtype, array.shape), array)


def key_leaf(array: LazyArray, impl: str, where: str) -> LazyLeaf:
    """The PRNG keys whose words are in `array`; `where` is named when they are none."""
    if array.dtype != "uint32" or not array.shape:
        raise CorruptCheckpointError(
            f"{where} is said to be a PRNG key, but is {array.dtype}{list(array.shape)}. "
            "Restore another step."
        )
    return LazyLeaf(LeafSpec("prng_key", shape=array.shape[:-1], impl=impl), array)
