"""Orbax, 0.2.7 to today."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats import flax_msgpack, zarr
from flaxckpt.formats.reading import MAX_TREE_DEPTH, Wrong, damaged, member, parse, read_json
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.lazy_array import LazyArray, in_memory
from flaxckpt.leaves.spec import LeafSpec
from flaxckpt.source.leaf import Leaf, array_leaf
from flaxckpt.store.store import Location

# Checkpoints that Orbax wrote, 0.2.7 to 0.12: a tree, or a directory of several items.
#
# An item that only the class which wrote it can read (`StatefulCheckpointable`) is left out.


NAME = "Orbax"
LOOKS_FOR = (
    "a directory with _METADATA or a msgpack file `checkpoint`, or with _CHECKPOINT_METADATA or "
    "the number of a step and such directories in it"
)

_CHECKPOINT, _INDICATOR = "_CHECKPOINT_METADATA", "orbax.checkpoint"
_DELETION = "_CHECKPOINT_DELETION"
_COMMITTED = "commit_success.txt"
# In the names of what is being written, and of parts that were not joined yet.
_UNFINISHED = (".orbax-checkpoint-tmp", ".partial_save.pending_")
_STEP = re.compile(r"(.*_)?\d+")
# What a manager of one item calls it.
_ONLY = {"default", "state"}
_METRICS = "metrics"
# The files of items that are no trees; the older name of a JSON file last.
_JSON = ("data.json", "metadata")
_PROTO = "proto.pbtxt"
_KEY, _NUMPY_KEY, _KEY_METADATA = "jax_random_key", "np_random_key", "_metadata"
# What `ArrayHandler` calls its array; its items are trees of nothing else.
_ARRAY, _ARRAY_HANDLER = "checkpoint", "ArrayCheckpointHandler"
_OURS = "flaxckpt"


def detect(path: Location) -> bool:
    """Whether `path` is a finished checkpoint of Orbax, or one item of it."""
    children = path.children()
    if not children or not _is_finished(path, children) or _is_ours(path, children):
        return False
    if is_tree(path, children):
        return True
    if _INDICATOR not in children and _CHECKPOINT not in children:
        return _STEP.fullmatch(path.name) is not None and _has_tree(path)
    return bool(_items(path))


def _is_finished(path: Location, children: Sequence[str]) -> bool:
    """Whether the save was committed: its name says so, or on GCS the file that Orbax adds."""
    if any(word in name for word in _UNFINISHED for name in (path.name, path.parent.name)):
        return False
    return not path.store.can.orbax_marker or _COMMITTED in children


def _is_ours(path: Location, children: Sequence[str]) -> bool:
    """Whether flaxckpt wrote it, whose files Orbax can read too."""
    tree = [path / TREE] if TREE in children else [path / "state" / TREE]
    return any(_names_us(file) for file in (path / _CHECKPOINT, *tree))


def _names_us(file: Location) -> bool:
    """Whether a file of metadata has flaxckpt's own member, or had before it was damaged."""
    try:
        data = file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    if f'"{_OURS}":'.encode() not in data:
        return False
    try:
        return _OURS in parse(data)
    except Wrong:
        return True


def _has_tree(path: Location) -> bool:
    """Whether an item of `path` is a tree."""
    return any(is_tree(path / name, (path / name).children()) for name in _items(path))


def _items(path: Location) -> list[str]:
    """The directories in `path` that are items and finished."""
    found = [name for name in path.store.directories(path) if not name.startswith(".")]
    return [name for name in found if not any(word in name for word in _UNFINISHED)]


def read(path: Location) -> Any:
    """The tree, or a dict of the items when there are several.

    Raises:
      CorruptCheckpointError: when it is damaged.
    """
    children = path.children()
    if is_tree(path, children):
        return read_tree(path)
    handlers = _handlers(path / _CHECKPOINT) if _CHECKPOINT in children else {}
    deleted = _deleted(path / _DELETION) if _DELETION in children else None
    names = [name for name in _items(path) if name != deleted]
    items = {name: _read_item(path / name, handlers.get(name, "")) for name in names}
    return _result(path, {name: found[0] for name, found in items.items() if found}, names)


def _handlers(file: Location) -> Mapping[str, str]:
    """The classes that wrote the items; old files do not say."""
    try:
        found = read_json(file)
        handlers = found.get("item_handlers") if isinstance(found, dict) else None
        if not isinstance(found, dict):
            raise Wrong("it is not a JSON object")
    except Wrong as error:
        raise damaged(file, error) from None
    known = handlers.items() if isinstance(handlers, dict) else ()
    return {name: handler for name, handler in known if type(handler) is str}


def _deleted(file: Location) -> str:
    """The item whose deletion was begun: some of its files may be gone."""
    try:
        name: str = member(read_json(file), "checkpointable_name", str)
    except Wrong as error:
        raise damaged(file, error) from None
    return name


def _result(path: Location, items: Mapping[str, Any], names: Sequence[str]) -> Any:
    """What a restore without any names gives."""
    if not items:
        found = f"only {', '.join(names)}" if names else "none"
        raise CorruptCheckpointError(
            f"the Orbax checkpoint at {path} has no item that can be read ({found}). "
            "Restore another step."
        )
    if (only := items.keys() - {_METRICS}) and only <= _ONLY and len(only) == 1:
        return items[only.pop()]
    return dict(items)


# Items


def _read_item(path: Location, handler: str) -> list[Any]:
    """The item at `path`, as the only element; nothing when it is in a form of its own."""
    children = path.children()
    if is_tree(path, children):
        tree = read_tree(path)
        return [tree[_ARRAY] if _is_array(tree, handler, children) else tree]
    if _PROTO in children:
        return [_text(path / _PROTO)]
    for name in (*_JSON, *([_METRICS] if path.name == _METRICS else [])):
        if name in children:
            return [read_json(path / name)]
    if _KEY in children:
        return [_random_key(path)]
    return [_numpy_key(path)] if _NUMPY_KEY in children else []


def _is_array(tree: Any, handler: str, children: Sequence[str]) -> bool:
    """Whether the item is one array and no tree; files before 2024 do not say."""
    if not isinstance(tree, dict) or tree.keys() != {_ARRAY}:
        return False
    return handler.endswith(_ARRAY_HANDLER) if handler else _ARRAY in children


def _text(file: Location) -> str:
    """A message in text form, as text: which type it has is not known."""
    try:
        return file.read().decode()
    except UnicodeDecodeError as error:
        raise damaged(file, f"it is not text: {error}") from None


def _random_key(path: Location) -> Any:
    """A key of jax. Of a typed one the implementation is not stored.

    Only `threefry2x32` has keys of two words. `rbg` and `unsafe_rbg` both have four, so these are
    given as words: `jax.random.wrap_key_data` makes keys of them.
    """
    tree = read_tree(path / _KEY)
    if not isinstance(tree, dict) or _ARRAY not in tree:
        raise damaged(path / _KEY, f"it has no array {_ARRAY!r}")
    array = tree[_ARRAY]
    typed = _flag(path / (_KEY + _KEY_METADATA), "typed")
    if not typed or not isinstance(array, Leaf) or array.array is None:
        return array
    is_threefry = array.shape[-1:] == (2,)
    return key_leaf(array.array, "threefry2x32", str(path)) if is_threefry else array


def _numpy_key(path: Location) -> Any:
    """The state of numpy's global generator: a tuple in its older form, a dict in the newer."""
    tree = read_tree(path / _NUMPY_KEY)
    legacy = _flag(path / (_NUMPY_KEY + _KEY_METADATA), "legacy")
    return tuple(tree) if legacy and isinstance(tree, list) else tree


def _flag(path: Location, name: str) -> bool:
    """What the JSON item at `path` says about a random key."""
    file = path / "metadata"
    try:
        value: bool = member(read_json(file), name, bool)
    except Wrong as error:
        raise damaged(file, error) from None
    return value


# What Orbax writes down about a tree: `_METADATA`, strings, and the kinds of PRNG keys.


TREE, STRINGS, ARRAYS = "_METADATA", "_strings.json", "array_metadatas"
_INDEX, _NAME = 1, 2

# Containers without children have no data, only a type.
EMPTY: Mapping[str, Any] = {
    "None": None, "Unknown": None, "NamedTuple": None, "Dict": {}, "List": [], "Tuple": (),
}  # fmt: skip

OrbaxPath = tuple[int | str, ...]


class TreeEntry(NamedTuple):
    """One leaf, or one container without children.

    Attributes:
      keys: its key path; indices are ints.
      value_type: what it was: `jax.Array`, `np.ndarray`, `scalar`, `string`, or one of `EMPTY`.
      inline: whether its value is in the msgpack file of the tree, and not an array.
    """

    keys: OrbaxPath
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

    entries: Sequence[TreeEntry]
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


def _entry(value: Any) -> TreeEntry:
    """One value of `tree_metadata`."""
    keys = tuple(_key(key) for key in member(value, "key_metadata", list))
    if len(keys) > MAX_TREE_DEPTH:
        raise Wrong(f"a leaf is {len(keys)} levels deep")
    described = member(value, "value_metadata", dict)
    value_type = member(described, "value_type", str)
    skip = member(described, "skip_deserialize", bool, False)
    return TreeEntry(keys, value_type, skip and value_type not in EMPTY)


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
    for child in (directory / ARRAYS).children() if ARRAYS in children else []:
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


# The containers of a tree that Orbax wrote, from the key paths of its leaves.


class _Inner(dict[int | str, Any]):
    """A container that is being filled, by index or by name."""


def assemble(leaves: Mapping[OrbaxPath, Any], file: Location) -> Any:
    """The tree with `leaves` at their key paths: lists where these are indices, else dicts.

    Raises:
      CorruptCheckpointError: when there is none; `file` is named.
    """
    root = _Inner()
    for keys, leaf in leaves.items():
        node = root
        # A path starts at the root, which is given one child so that it may be a leaf itself.
        for key in ("", *keys)[:-1]:
            node = node.setdefault(key, _Inner())
            if not isinstance(node, _Inner):
                raise damaged(file, f"{_name(keys)} is within another leaf")
        key = ("", *keys)[-1]
        if key in node:
            raise damaged(file, f"{_name(keys)} is a leaf and a container")
        node[key] = leaf
    return _finished(root[""], file)


def _finished(node: Any, file: Location) -> Any:
    """`node` as the container that its keys tell."""
    if not isinstance(node, _Inner):
        return node
    indices = {key for key in node if isinstance(key, int)}
    if indices and len(indices) != len(node):
        raise damaged(file, "a container has indices and names")
    if indices == set(range(len(node))):
        return [_finished(node[i], file) for i in range(len(node))]
    # A list of which only some elements were saved keeps their names.
    return {str(key): _finished(child, file) for key, child in node.items()}


def _name(keys: OrbaxPath) -> str:
    """A key path, as errors show it."""
    return repr(".".join(map(str, keys)))


def with_types(tree: Any, rich: Any) -> Any:
    """`tree` with the tuples that `value_metadata_tree` knows; NamedTuples become their fields.

    What it does not know, or what is not as it says, stays as it is.
    """
    category = rich.get("category") if isinstance(rich, dict) else None
    if category == "namedtuple" and isinstance(tree, dict):
        return _with_field_types(tree, rich)
    if category == "custom" and rich.get("clazz") == "tuple":
        return _as_tuple(tree, rich.get("entries"))
    if category == "custom":
        is_empty = tree is None and _value_type(rich) == "NamedTuple"
        return {} if is_empty else tree
    if isinstance(rich, dict) and isinstance(tree, dict):
        return {k: with_types(v, rich[k]) if k in rich else v for k, v in tree.items()}
    if isinstance(rich, list) and isinstance(tree, list) and len(rich) == len(tree):
        return [with_types(*pair) for pair in zip(tree, rich, strict=True)]
    return tree


def _with_field_types(tree: dict[str, Any], rich: Any) -> Any:
    """The fields of a NamedTuple."""
    entries = rich.get("entries")
    known = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
    fields = {e.get("key"): e.get("value") for e in known if type(e.get("key")) is str}
    return {k: with_types(v, fields[k]) if k in fields else v for k, v in tree.items()}


def _as_tuple(tree: Any, entries: Any) -> Any:
    """A list that was a tuple."""
    if not isinstance(tree, list) or not isinstance(entries, list) or len(tree) != len(entries):
        return tree
    return tuple(with_types(*pair) for pair in zip(tree, entries, strict=True))


def _value_type(rich: Any) -> Any:
    """What a leaf of `value_metadata_tree` says that it was."""
    data = rich.get("data")
    return data.get("value_type") if isinstance(data, dict) else None


# One tree that Orbax wrote: a directory with `_METADATA`, or before 2024 with `checkpoint`.


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
        start = (path / AGGREGATE).read(0, 32)
    except (FileNotFoundError, IsADirectoryError):  # an array of that name
        return False
    return bool(start) and start[0] in _MSGPACK and not start.startswith(_T5X)


def read_tree(path: Location) -> Any:
    """The tree in the directory `path`.

    Raises:
      CorruptCheckpointError: when it is damaged.
    """
    children = path.children()
    if TREE in children:
        return _read_described(path, children, read_tree_metadata(path))
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
    tree = _filled(tree, _TreeValues(path, children, metadata))
    return tree if metadata.rich is None else with_types(tree, metadata.rich)


def _is_of_nnx(entry: TreeEntry) -> bool:
    """Whether it is what nnx has in its objects beside their attributes, which holds nothing."""
    return entry.value_type in EMPTY and bool(entry.keys) and entry.keys[-1] == _NNX_STATE


def _filled(node: Any, source: _TreeValues) -> Any:
    """`node` with its leaves instead of what is known of them."""
    if isinstance(node, TreeEntry):
        return source.leaf(node)
    if isinstance(node, list):
        return [_filled(child, source) for child in node]
    return {key: _filled(child, source) for key, child in node.items()}


class _TreeValues:
    """Where the values of a tree come from."""

    def __init__(self, path: Location, children: Sequence[str], metadata: TreeMetadata) -> None:
        """Reads what is small and opens all arrays."""
        self._path = path
        types = {entry.value_type for entry in metadata.entries}
        self._strings = read_strings(path) if "string" in types else None
        inline = any(entry.inline for entry in metadata.entries)
        self._inline: Any = _decode_aggregate(path) if inline else None
        self._arrays = _open_arrays(path, children, metadata)
        keys = "jax.Array" in types and read_key_impls(path, children)
        self._impls = keys or {}

    def leaf(self, entry: TreeEntry) -> Any:
        """The leaf of `entry`."""
        if entry.value_type in EMPTY:
            return EMPTY[entry.value_type]
        if entry.inline:
            return self._inline_leaf(entry)
        if entry.value_type == "string":
            return string_at(self._strings, entry.name, self._path / STRINGS)
        array = self._arrays[entry.name]
        if entry.name in self._impls:
            return key_leaf(array, self._impls[entry.name], f"{self._path}/{entry.name}")
        return _leaf(array, entry.value_type)

    def _inline_leaf(self, entry: TreeEntry) -> Any:
        """A value that is in the msgpack file."""
        found: Any = self._inline
        for key in entry.keys:
            try:
                found = found[key]
            except (TypeError, LookupError):
                file = self._path / AGGREGATE
                raise damaged(file, f"it has no value {entry.name!r}") from None
        if isinstance(found, np.ndarray):
            return _leaf(in_memory(found), entry.value_type)
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
    found: dict[str, Any] = {a.name: array_leaf(a) for a in arrays} | strings
    leaves = placed.values | {keys: found[name] for keys, name in placed.names.items()}
    return _replace(tree, (), leaves)


class _Placed(NamedTuple):
    """The leaves of a msgpack tree: those that are values, and the names of those that are not."""

    values: dict[OrbaxPath, Any]
    names: dict[OrbaxPath, str]


def _collect(node: Any, keys: OrbaxPath, placed: _Placed) -> None:
    """Puts the leaves of `node`, which is at `keys`, into `placed`."""
    if isinstance(node, dict | list | tuple):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in items:
            _collect(child, (*keys, key), placed)
    elif isinstance(node, str) and node.startswith(_ELSEWHERE):
        placed.names[keys] = node.partition("://")[2]
    else:
        placed.values[keys] = node


def _replace(node: Any, keys: OrbaxPath, leaves: Mapping[OrbaxPath, Any]) -> Any:
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
        if not file.is_file():
            continue
        found = read_json(file)
        if not isinstance(found, dict) or not all(type(s) is str for s in found.values()):
            raise damaged(file, "it is not an object of strings")
        strings |= found
    return {name: strings[name] for name in names if name in strings}


def _decode_aggregate(path: Location) -> Any:
    """What is in the msgpack file."""
    file = path / AGGREGATE
    return flax_msgpack.decode(file.read(), str(file))


# Leaves


def _leaf(array: LazyArray, value_type: str) -> Leaf:
    """The leaf that `array` is, if it was a `value_type`."""
    if value_type == "scalar" and array.shape == ():
        # ml_dtypes' own have the kind "V"; a bfloat16 number was given back as a float.
        return Leaf("", LeafSpec(_KINDS.get(parse_dtype(array.dtype).kind, "float")), array)
    return array_leaf(array, "jax" if value_type == "jax.Array" else "numpy")


def key_leaf(array: LazyArray, impl: str, where: str) -> Leaf:
    """The PRNG keys whose words are in `array`; `where` is named when they are none."""
    if array.dtype != "uint32" or not array.shape:
        raise CorruptCheckpointError(
            f"{where} is said to be a PRNG key, but is {array.dtype}{list(array.shape)}. "
            "Restore another step."
        )
    return Leaf("", LeafSpec("prng_key", shape=array.shape[:-1], impl=impl), array)
