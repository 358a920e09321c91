"""Where each value of a database lies, so that its bytes can be read straight to where they belong.

Values up to `tensorstore_io.INLINE_BYTES` are in the nodes of the B-tree, which TensorStore reads
and checks; of a larger one the node has the file, the offset and the length.
https://google.github.io/tensorstore/kvstore/ocdbt/index.html
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tensorstore as ts

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.storage.location import Location, kvstore, reached, timeout_of

# `value:<directory>:<file>:<offset>:<length>`; the pattern lets no path lead out of the database.
_PLACE = re.compile(r"value:((?:\w[\w.-]*/)*):(d/[0-9a-f]+):([0-9]{1,18}):([0-9]{1,18})")


class Place(NamedTuple):
    """Some bytes of a file: its path within the database, the offset and the length in bytes."""

    file: str
    offset: int
    length: int

    def __str__(self) -> str:
        """As errors show it."""
        return f"{self.file}, {self.length} bytes at {self.offset}"


Index = Mapping[str, Place | bytes]


def read_index(directory: Location) -> Index:
    """Every key of the database in `directory`, with its value or where that lies.

    Raises:
      CorruptCheckpointError: when a node is missing or damaged.
    """
    with _opened(directory) as base:
        newest = base.dump()["versions"][-1]
        root = newest["root"].get("location")
        return dict(_entries(base, root, newest["root_height"], set())) if root else {}


def check_versions(directory: Location) -> None:
    """Reads every node of the database, also those that only older versions of it have.

    Those are the versions of its transactions. No value is read from there, so damage to it is
    harmless; but a disk that damages one file will damage another.

    Raises:
      CorruptCheckpointError: when a node is damaged.
    """
    checked: set[str] = set()
    with _opened(directory) as base:
        pending = _nodes(base.dump())
        while pending:
            node = pending.pop()
            if node not in checked:
                checked.add(node)
                pending += _nodes(base.dump(node))


class _Files(NamedTuple):
    """The files of a database, and how long one of them is waited for."""

    base: ts.KvStore
    timeout_secs: float | None

    def dump(self, node: str | None = None) -> dict[str, Any]:
        """What the manifest, or a node, says."""
        found: dict[str, Any] = ts.ocdbt.dump(self.base, node).result(timeout=self.timeout_secs)
        return found


@contextlib.contextmanager
def _opened(directory: Location) -> Iterator[_Files]:
    """The files of the database in `directory`; what is wrong with its nodes is damage."""
    try:
        with reached(directory):
            yield _Files(kvstore(directory), timeout_of(directory))
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptCheckpointError(
            f"the arrays at {directory} are damaged: {error}. Restore another step."
        ) from None


def _entries(
    base: _Files, node: str, height: int, seen: set[str], prefix: bytes = b""
) -> Iterator[tuple[str, Place | bytes]]:
    """The entries below `node`, whose keys lack `prefix`. No node is below itself, or in two."""
    if node in seen:
        raise ValueError(f"the node {node} is there twice")
    seen.add(node)
    dumped = base.dump(node)
    if dumped["height"] != height:
        raise ValueError(f"the node {node} has the height {dumped['height']} instead of {height}")
    for entry in dumped["entries"]:
        if height == 0:
            yield (prefix + entry["key"]).decode(), _value(entry)
        else:
            inner = prefix + entry["subtree_common_prefix"]
            yield from _entries(base, entry["location"], height - 1, seen, inner)


def _value(entry: dict[str, Any]) -> Place | bytes:
    """The value of a leaf node's entry, or where it lies."""
    if (inline := entry.get("inline_value")) is not None:
        return bytes(inline)
    found = _PLACE.fullmatch(entry["indirect_value"])
    if found is None:
        raise ValueError(f"{entry['indirect_value']!r} is no place in it")
    return Place(found[1] + found[2], int(found[3]), int(found[4]))


def _nodes(dumped: Any) -> list[str]:
    """The nodes that the manifest, or a node of the tree of versions or of keys, leads to."""
    lists = (dumped.get(name, ()) for name in ("entries", "versions", "version_tree_nodes"))
    entries = [entry.get("root", entry) for found in lists for entry in found]
    return [entry["location"] for entry in entries if "location" in entry]
