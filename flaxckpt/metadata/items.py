"""What `_CHECKPOINT_METADATA` says of the items that a checkpoint has beside its state."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from flaxckpt.metadata.files import SavedFile
from flaxckpt.storage import layout


@dataclasses.dataclass(frozen=True)
class ItemRecord:
    """One item.

    Attributes:
      kind: which handler reads it.
      files: its files, by their names in its directory; those of its tree are in the tree's own
        metadata.
      tree: the directory of its tree within its own, which may be that itself (empty); `None` for
        an item without one.
      details: what else its handler needs.
      orbax: the name of the handler by which Orbax finds its own reader.
    """

    kind: str
    files: Mapping[str, SavedFile]
    tree: str | None
    details: Mapping[str, Any]
    orbax: str


def encode_items(items: Mapping[str, ItemRecord]) -> dict[str, Any]:
    """`items` as JSON; what is empty is left out."""
    return {name: _encode(record) for name, record in items.items()}


def _encode(record: ItemRecord) -> dict[str, Any]:
    """One record as JSON."""
    data: dict[str, Any] = {"kind": record.kind}
    if record.tree is not None:
        data["tree"] = record.tree
    if record.details:
        data["details"] = dict(record.details)
    return data | {"files": [[name, *file] for name, file in record.files.items()]}


def decode_items(data: Mapping[str, Any], orbax: Mapping[str, Any]) -> dict[str, ItemRecord]:
    """The items that `encode_items` wrote; `orbax` names Orbax's readers.

    Raises:
      ValueError: when it is not what that writes, or leads to files elsewhere.
    """
    for name in data:
        if not layout.may_be_item(name) or name == layout.ITEM:
            raise ValueError(f"{name!r} is no name of an item")
    return {name: _decode(item, str(orbax.get(name, ""))) for name, item in data.items()}


def _decode(data: Any, orbax: str) -> ItemRecord:
    """The record that `_encode` wrote."""
    tree = data.get("tree")
    if tree not in (None, "", layout.JAX_KEY, layout.NUMPY_KEY):
        raise ValueError(f"{tree!r} is no directory of a tree")
    files = {name: _file(name, size, crc) for name, size, crc in data["files"]}
    return ItemRecord(str(data["kind"]), files, tree, dict(data.get("details", {})), orbax)


def _file(name: Any, size: Any, crc: Any) -> SavedFile:
    """The size and the checksum of a file."""
    if not (is_file_name(name) and type(size) is int and type(crc) is int and size >= 0):
        raise ValueError(f"no file of an item: {name!r:.80}, {size!r:.80}, {crc!r:.80}")
    return SavedFile(size, crc)


def is_file_name(name: Any) -> bool:
    """Whether `name` is a relative path that stays where it begins."""
    parts = name.split("/") if isinstance(name, str) else [""]
    return all(re.fullmatch(r"(?!\.{1,2}$)[^/\\\0]{1,255}", part) for part in parts)
