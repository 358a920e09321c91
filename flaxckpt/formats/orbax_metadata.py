"""What Orbax writes down about a tree: `_METADATA`, strings, and the kinds of PRNG keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flaxckpt.formats import files
from flaxckpt.formats.json_files import Wrong, damaged, member, parse, read_json
from flaxckpt.storage.location import Location

TREE, STRINGS, ARRAYS = "_METADATA", "_strings.json", "array_metadatas"
_INDEX, _NAME = 1, 2
# Deeper than any state; recursion over what is restored must not end in a RecursionError.
_MAX_DEPTH = 128

# Containers without children have no data, only a type.
EMPTY: Mapping[str, Any] = {
    "None": None, "Unknown": None, "NamedTuple": None, "Dict": {}, "List": [], "Tuple": (),
}  # fmt: skip

KeyPath = tuple[int | str, ...]


class Entry(NamedTuple):
    """One leaf, or one container without children.

    Attributes:
      keys: its key path; indices are ints.
      value_type: what it was: `jax.Array`, `np.ndarray`, `scalar`, `string`, or one of `EMPTY`.
      inline: whether its value is in the msgpack file of the tree, and not an array.
    """

    keys: KeyPath
    value_type: str
    inline: bool

    @property
    def name(self) -> str:
        """What its array is called. Keys are not escaped, so two leaves may share one."""
        return ".".join(map(str, self.keys))


class TreeMetadata(NamedTuple):
    """What `_METADATA` says.

    Attributes:
      entries: the leaves.
      ocdbt: whether the arrays are in a database; `None` in files that do not say.
      zarr3: whether the arrays are zarr v3.
      missing_as_zero: whether chunks of zeros were left out.
      rich: the tree with the types of its containers; `None` in files that do not say.
    """

    entries: Sequence[Entry]
    ocdbt: bool | None
    zarr3: bool
    missing_as_zero: bool
    rich: Any


def read_tree_metadata(directory: Location) -> TreeMetadata:
    """What `_METADATA` in `directory` says.

    Raises:
      FileNotFoundError: when there is none.
      CorruptCheckpointError: when it is not what Orbax writes.
    """
    path = directory / TREE
    data = read_json(path)
    try:
        entries = [_entry(value) for value in member(data, "tree_metadata", dict).values()]
        if not entries:
            raise Wrong("'tree_metadata' has no leaves")
        rich = member(data, "value_metadata_tree", str, "")
        return TreeMetadata(
            entries,
            None if data.get("use_ocdbt") is None else member(data, "use_ocdbt", bool),
            member(data, "use_zarr3", bool, False),
            not member(data, "store_array_data_equal_to_fill_value", bool, False),
            parse(rich) if rich else None,
        )
    except Wrong as error:
        raise damaged(path, error) from None


def _entry(value: Any) -> Entry:
    """One value of `tree_metadata`."""
    keys = tuple(_key(key) for key in member(value, "key_metadata", list))
    if len(keys) > _MAX_DEPTH:
        raise Wrong(f"a leaf is {len(keys)} levels deep")
    described = member(value, "value_metadata", dict)
    value_type = member(described, "value_type", str)
    skip = member(described, "skip_deserialize", bool, False)
    return Entry(keys, value_type, skip and value_type not in EMPTY)


def _key(key: Any) -> int | str:
    """One part of a key path."""
    name, kind = member(key, "key", str), member(key, "key_type", int)
    if kind == _NAME:
        return name
    if kind != _INDEX or not (name.isascii() and name.isdecimal() and len(name) < 10):
        raise Wrong(f"the key {name!r} of type {kind} is neither an index nor a name")
    return int(name)


def read_strings(directory: Location) -> Any:
    """All strings of a tree, as `string_at` takes them."""
    return read_json(directory / STRINGS)


def string_at(strings: Any, name: str, path: Location) -> str:
    """The string called `name`, to which TensorStore has a JSON pointer: its `/` nest.

    Raises:
      CorruptCheckpointError: when there is none; `path` is named.
    """
    found = strings
    for part in name.split("/"):
        found = found if isinstance(found, dict) else {}
        unescaped = part.replace("~1", "/").replace("~0", "~")
        found = found.get(unescaped, found.get(part))
    if not isinstance(found, str):
        raise damaged(path, f"it has no string {name!r}")
    return found


def read_key_impls(directory: Location, children: Sequence[str]) -> Mapping[str, str]:
    """The implementations of the PRNG keys in a tree, by name; each process wrote its share.

    Raises:
      CorruptCheckpointError: when a file is not what Orbax writes.
    """
    impls: dict[str, str] = {}
    for child in files.children(directory / ARRAYS) if ARRAYS in children else []:
        path = directory / ARRAYS / child
        try:
            impls |= _key_impls(read_json(path))
        except Wrong as error:
            raise damaged(path, error) from None
    return impls


def _key_impls(data: Any) -> dict[str, str]:
    """What the file of one process says."""
    impls = {}
    for wrapped in member(data, "array_metadatas", list):
        array = member(wrapped, "array_metadata", dict)
        if impl := member(member(array, "ext_metadata", dict, {}), "random_key_impl", str, ""):
            impls[member(array, "param_name", str)] = impl
    return impls
