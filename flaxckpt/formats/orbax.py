"""Checkpoints that Orbax wrote, 0.2.7 to 0.12: a tree, or a directory of several items.

An item that only the class which wrote it can read (`StatefulCheckpointable`) is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats import files
from flaxckpt.formats.json_files import Wrong, damaged, member, parse, read_json
from flaxckpt.formats.orbax_metadata import TREE
from flaxckpt.formats.orbax_tree import is_tree, key_leaf, read_tree
from flaxckpt.leaves.lazy import LazyLeaf
from flaxckpt.storage.location import Location

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
    children = files.children(path)
    if not children or not _is_finished(path, children) or _is_ours(path, children):
        return False
    if is_tree(path, children):
        return True
    if _INDICATOR not in children and _CHECKPOINT not in children:
        return _STEP.fullmatch(path.name) is not None and _has_tree(path)
    return bool(_items(path))


def _is_finished(path: Location, children: Sequence[str]) -> bool:
    """Whether the save came to its end: by the name, or on GCS by a file."""
    if any(word in name for word in _UNFINISHED for name in (path.name, path.parent.name)):
        return False
    in_place = not isinstance(path, Path) and path.bucket.url.startswith("gs://")
    return not in_place or _COMMITTED in children


def _is_ours(path: Location, children: Sequence[str]) -> bool:
    """Whether flaxckpt wrote it, whose files Orbax can read too."""
    tree = [path / TREE] if TREE in children else [path / "state" / TREE]
    return any(_names_us(file) for file in (path / _CHECKPOINT, *tree))


def _names_us(file: Location) -> bool:
    """Whether a file of metadata has flaxckpt's own member, or had before it was damaged."""
    try:
        data = files.read(file)
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
    return any(is_tree(path / name, files.children(path / name)) for name in _items(path))


def _items(path: Location) -> list[str]:
    """The directories in `path` that are items and finished."""
    found = [name for name in files.directories(path) if not name.startswith(".")]
    return [name for name in found if not any(word in name for word in _UNFINISHED)]


def read(path: Location) -> Any:
    """The tree, or a dict of the items when there are several.

    Raises:
      CorruptCheckpointError: when it is damaged.
    """
    children = files.children(path)
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
            raise Wrong("it is no JSON object")
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
    children = files.children(path)
    if is_tree(path, children):
        tree = read_tree(path)
        return [_only_array(tree) if _is_array(tree, handler, children) else tree]
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


def _only_array(tree: Mapping[str, Any]) -> Any:
    """The array of an item that is one array."""
    return tree[_ARRAY]


def _text(file: Location) -> str:
    """A message in text form, as text: which type it has is not known."""
    try:
        return files.read(file).decode()
    except UnicodeDecodeError as error:
        raise damaged(file, f"it is not text: {error}") from None


def _random_key(path: Location) -> Any:
    """A key of jax. Of a typed one the implementation is not stored.

    Only `threefry2x32` has keys of two words. `rbg` and `unsafe_rbg` both have four, so these are
    given as words: `jax.random.wrap_key_data` makes keys of them.
    """
    array = _only_array(_as_dict(read_tree(path / _KEY), path / _KEY))
    typed = _flag(path / (_KEY + _KEY_METADATA), "typed")
    if not typed or not isinstance(array, LazyLeaf) or array.spec.shape[-1:] != (2,):
        return array
    return key_leaf(array.array, "threefry2x32", str(path))


def _numpy_key(path: Location) -> Any:
    """The state of numpy's global generator: a tuple in its older form, a dict in the newer."""
    tree = read_tree(path / _NUMPY_KEY)
    legacy = _flag(path / (_NUMPY_KEY + _KEY_METADATA), "legacy")
    return tuple(tree) if legacy and isinstance(tree, list) else tree


def _as_dict(tree: Any, path: Location) -> Mapping[str, Any]:
    """`tree`, when it has an array as `ArrayHandler` names it."""
    if not isinstance(tree, dict) or _ARRAY not in tree:
        raise damaged(path, f"it has no array {_ARRAY!r}")
    return tree


def _flag(path: Location, name: str) -> bool:
    """What the JSON item at `path` says about a random key."""
    file = path / "metadata"
    try:
        value: bool = member(read_json(file), name, bool)
    except Wrong as error:
        raise damaged(file, error) from None
    return value
