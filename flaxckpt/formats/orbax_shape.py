"""The containers of a tree that Orbax wrote, from the key paths of its leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flaxckpt.formats.json_files import damaged
from flaxckpt.formats.orbax_metadata import KeyPath
from flaxckpt.storage.location import Location


class _Inner(dict[int | str, Any]):
    """A container that is being filled, by index or by name."""


def assemble(leaves: Mapping[KeyPath, Any], file: Location) -> Any:
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


def _name(keys: KeyPath) -> str:
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
