"""Databases of arrays: TensorStore's OCDBT."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from flaxckpt.errors import CorruptCheckpointError, StoreError
from flaxckpt.store.store import Location

# Host memory for arrays that are read.


# A CPU device adopts memory of this alignment as it is; what is less aligned it copies.
ALIGNMENT = 64
# Below this size a copy is cheaper than the alignment.
MIN_BYTES = 1 << 15


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory for an array of `shape`, not set to anything; aligned for jax when it is large."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < MIN_BYTES:
        return np.empty(shape, dtype)
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)


# Where each value of a database lies, so that its bytes can be read straight to where they belong.
#
# Values up to `INLINE_BYTES` are in the nodes of the B-tree, which TensorStore reads
# and checks; of a larger one the node has the file, the offset and the length.
# https://google.github.io/tensorstore/kvstore/ocdbt/index.html


# `value:<directory>:<file>:<offset>:<length>`; the pattern lets no path lead out of the database.
_PLACE = re.compile(r"value:((?:\w[\w.-]*/)*):(d/[0-9a-f]+):([0-9]{1,18}):([0-9]{1,18})")


class ValueRef(NamedTuple):
    """Some bytes of a file: its path within the database, the offset and the length in bytes."""

    file: str
    offset: int
    length: int

    def __str__(self) -> str:
        """As errors show it."""
        return f"{self.file}, {self.length} bytes at {self.offset}"


ValueIndex = Mapping[str, ValueRef | bytes]


def read_index(directory: Location) -> ValueIndex:
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


class _DatabaseFiles(NamedTuple):
    """The files of a database, and how long one of them is waited for."""

    base: ts.KvStore
    timeout_secs: float | None

    def dump(self, node: str | None = None) -> dict[str, Any]:
        """What the manifest, or a node, says."""
        found: dict[str, Any] = ts.ocdbt.dump(self.base, node).result(timeout=self.timeout_secs)
        return found


@contextlib.contextmanager
def _opened(directory: Location) -> Iterator[_DatabaseFiles]:
    """The files of the database in `directory`; what is wrong with its nodes is damage."""
    try:
        with directory.store.reached():
            yield _DatabaseFiles(directory.store.kvstore(directory), directory.store.timeout_secs)
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptCheckpointError(
            f"the arrays at {directory} are damaged: {error}. Restore another step."
        ) from None


def _entries(
    base: _DatabaseFiles, node: str, height: int, seen: set[str], prefix: bytes = b""
) -> Iterator[tuple[str, ValueRef | bytes]]:
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


def _value(entry: dict[str, Any]) -> ValueRef | bytes:
    """The value of a leaf node's entry, or where it lies."""
    if (inline := entry.get("inline_value")) is not None:
        return bytes(inline)
    found = _PLACE.fullmatch(entry["indirect_value"])
    if found is None:
        raise ValueError(f"{entry['indirect_value']!r} is no place in it")
    return ValueRef(found[1] + found[2], int(found[3]), int(found[4]))


def _nodes(dumped: Any) -> list[str]:
    """The nodes that the manifest, or a node of the tree of versions or of keys, leads to."""
    lists = (dumped.get(name, ()) for name in ("entries", "versions", "version_tree_nodes"))
    entries = [entry.get("root", entry) for found in lists for entry in found]
    return [entry["location"] for entry in entries if "location" in entry]


# Reading bytes of the data files of a database into memory that is there already.


def read(directory: Location, place: ValueRef) -> memoryview:
    """The bytes of `place`; see `read_into`."""
    # Not from the heap: each thread that reads would keep some of its own.
    memory = memoryview(mmap.mmap(-1, max(1, place.length)))[: place.length]
    read_into(directory, place, [memory])
    return memory


def read_into(directory: Location, place: ValueRef, buffers: Sequence[memoryview]) -> None:
    """Fills `buffers`, one after the other, with the bytes of `place`.

    Args:
      directory: of the database.
      place: as many bytes as `buffers` have.
      buffers: writable memory.

    Raises:
      CorruptCheckpointError: when the file is missing, too short, or cannot be read.
    """
    try:
        missing = directory.store.fill(directory / place.file, place.offset, buffers)
    except StoreError:
        raise
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError(f"it cannot be read: {error}") from None
    if missing:
        raise CorruptCheckpointError(f"its last {missing} bytes are missing")


# The key-value store of a checkpoint: one OCDBT database, written in batches.
#
# Values up to `INLINE_BYTES` lie in the nodes of its B-tree, larger ones in data files. Small
# leaves are two values each and cost no file and no array driver.


INLINE_BYTES = 1024
DATA_FILE_BYTES = 256 << 20
NODE_BYTES = 100_000_000


def create_store(
    directory: Location,
    context: ts.Context | None = None,
    *,
    numbered: bool = False,
) -> ts.KvStore:
    """A new OCDBT database in `directory`; the manifest is written by the first commit.

    Args:
      directory: an existing directory without one.
      context: what it needs to share with databases that are merged into it.
      numbered: whether each commit writes a manifest of its own, rather than the one anew. GCS
        lets an object be changed once in a second.
    """
    base = directory.store.kvstore(directory, context)
    return ts.KvStore.open(
        {
            "driver": "ocdbt",
            "base": base.spec().to_json(),
            "assume_config": True,
            "target_data_file_size": DATA_FILE_BYTES,
            "config": {
                "max_inline_value_bytes": INLINE_BYTES,
                "max_decoded_node_bytes": NODE_BYTES,
                "manifest_kind": "numbered" if numbered else "single",
            },
        },
        context=directory.store.context(context),
    ).result()


def open_store(directory: Location, context: ts.Context) -> ts.KvStore:
    """The database in `directory`, to be merged into another of the same `context`."""
    base = directory.store.kvstore(directory, context).spec().to_json()
    spec = {"driver": "ocdbt", "base": base}
    return ts.KvStore.open(spec, context=directory.store.context(context)).result()


def merge(
    store: ts.KvStore,
    children: Iterable[ts.KvStore],
    items: Iterable[tuple[str, bytes]],
    timeout_secs: float | None = None,
) -> None:
    """Makes what is in `children`, and `items`, appear in `store` by one write of its manifest.

    Only references to the nodes of their B-trees are copied: their files must stay where they are.
    Each of the two steps is waited for at most so long.

    Raises:
      OSError: when the disk is full or fails.
    """
    transaction = ts.Transaction(atomic=True)
    target = store.with_transaction(transaction)
    for copied in [child.experimental_copy_range_to(target) for child in children]:
        copied.result(timeout=timeout_secs)
    for key, value in items:
        target.write(key, value)
    _finish(transaction.commit_async(), timeout_secs)


def write_all(
    store: ts.KvStore,
    items: Iterable[tuple[str, bytes]],
    buffer_bytes: int,
    timeout_secs: float | None = None,
) -> None:
    """Writes `items` in transactions of at most half of `buffer_bytes`.

    While one transaction is written to disk, the next is filled. Each is waited for at most so
    long.

    Raises:
      OSError: when the disk is full or fails.
    """
    committing: ts.Future[None] | None = None
    try:
        for batch in _batches(store, items, buffer_bytes // 2):
            if committing is not None:
                _finish(committing, timeout_secs)
            committing = batch.commit_async()
        if committing is not None:
            _finish(committing, timeout_secs)
    except BaseException:
        if committing is not None:  # or it would still write where the caller cleans up
            with contextlib.suppress(TimeoutError):
                committing.exception(timeout=timeout_secs)
        raise


def _batches(
    store: ts.KvStore, items: Iterable[tuple[str, bytes]], limit: int
) -> Iterator[ts.Transaction]:
    """Transactions that write `items`, of at most `limit` bytes or of one item each."""
    transaction = ts.Transaction(atomic=True)
    target, size = store.with_transaction(transaction), 0
    for key, value in items:
        if size and size + len(value) > limit:
            yield transaction
            transaction = ts.Transaction(atomic=True)
            target, size = store.with_transaction(transaction), 0
        target.write(key, value)
        size += len(value)
    yield transaction


def _finish(committing: ts.Future[None], timeout_secs: float | None) -> None:
    """Waits for a transaction; what the system reported is raised as it would be elsewhere."""
    try:
        committing.result(timeout=timeout_secs)
    except ValueError as error:
        if found := re.search(r"os_error_code='(\d+)'", str(error)):
            code = int(found[1])
            raise OSError(code, f"{os.strerror(code)} ({error})") from error
        raise
