"""The key-value store of a checkpoint: one OCDBT database, written and read in batches.

Values up to `INLINE_BYTES` lie in the nodes of its B-tree, larger ones in data files. Small leaves
are two values each and cost no file and no array driver.
"""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tensorstore as ts

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.storage.layout import MANIFEST

INLINE_BYTES = 1024
DATA_FILE_BYTES = 256 << 20
NODE_BYTES = 100_000_000

Items = Iterable[tuple[str, bytes | bytearray]]


def open_store(directory: Path, *, create: bool = False, fsync: bool = True) -> ts.KvStore:
    """The OCDBT database in `directory`.

    Args:
      directory: an existing directory.
      create: whether it is to be written, and known to be new; then the manifest is written once,
        by the first commit.
      fsync: whether commits wait for the disk.
    """
    base = {"driver": "file", "path": f"{directory}/", "file_io_sync": fsync}
    spec: dict[str, object] = {"driver": "ocdbt", "base": base}
    if create:
        spec |= {
            "assume_config": True,
            "target_data_file_size": DATA_FILE_BYTES,
            "config": {
                "max_inline_value_bytes": INLINE_BYTES,
                "max_decoded_node_bytes": NODE_BYTES,
                "manifest_kind": "single",
            },
        }
    # Nodes are cached for as long as the store is open, so that each is read once.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 4 * NODE_BYTES}})
    return ts.KvStore.open(spec, context=context).result()


def write_all(store: ts.KvStore, items: Items, buffer_bytes: int) -> int:
    """Writes `items` in transactions of about half of `buffer_bytes`; returns the bytes written.

    While one transaction is written to disk, the next is filled.

    Raises:
      OSError: when the disk is full or fails.
    """
    written = 0
    committing: ts.Future[None] | None = None
    for batch, size in _batches(items, buffer_bytes // 2):
        transaction = ts.Transaction(atomic=True)
        target = store.with_transaction(transaction)
        for key, value in batch:
            target.write(key, value)  # type: ignore[arg-type]  # takes any buffer
        if committing is not None:
            _finish(committing)
        committing = transaction.commit_async()
        written += size
    if committing is not None:
        _finish(committing)
    return written


def _finish(committing: ts.Future[None]) -> None:
    """Waits for a transaction; what the system reported is raised as it would be elsewhere."""
    try:
        committing.result()
    except ValueError as error:
        if found := re.search(r"os_error_code='(\d+)'", str(error)):
            code = int(found[1])
            raise OSError(code, f"{os.strerror(code)} ({error})") from error
        raise


def _batches(items: Items, limit: int) -> Iterator[tuple[list[tuple[str, bytes | bytearray]], int]]:
    """`items` in lists of at least `limit` bytes each, but the last."""
    batch: list[tuple[str, bytes | bytearray]] = []
    size = 0
    for key, value in items:
        batch.append((key, value))
        size += len(value)
        if size >= limit:
            yield batch, size
            batch, size = [], 0
    if batch:
        yield batch, size


def read_all(
    store: ts.KvStore, requests: Iterable[tuple[str, int]], buffer_bytes: int
) -> Iterator[bytes | CorruptCheckpointError | None]:
    """The values of `requests`, in their order: `None` where there is none, or an error.

    One value that cannot be read does not keep the others from being read.

    Args:
      store: from `open_store`.
      requests: keys, each with the bytes that its value will have.
      buffer_bytes: how many bytes are read ahead.
    """
    waiting: collections.deque[tuple[ts.Future[ts.KvStore.ReadResult], int]] = collections.deque()
    ahead = 0
    for key, size in requests:
        while waiting and ahead + size > buffer_bytes:
            future, done = waiting.popleft()
            ahead -= done
            yield _value(future)
        waiting.append((store.read(key), size))
        ahead += size
    for future, _ in waiting:
        yield _value(future)


def locate(directory: Path, key: str) -> str:
    """The file in `directory`, and the place in it, where the value of `key` lies; for errors."""
    try:
        base = ts.KvStore.open({"driver": "file", "path": f"{directory}/"}).result()
        root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]
        entries = ts.ocdbt.dump(base, root).result()["entries"]
        place = next(e.get("indirect_value", root) for e in entries if e["key"] == key.encode())
        _, folder, file, offset, length = place.split(":")
    except (ValueError, KeyError, IndexError, StopIteration):
        return MANIFEST  # no value of that key, or a tree of several levels
    return f"{folder}{file}, {length} bytes at {offset}"


def check_versions(directory: Path) -> None:
    """Reads what only older versions of the database have, which are those of its transactions.

    No value is read from there, so damage to it is harmless; but a disk that damages one file
    will damage another.

    Raises:
      CorruptCheckpointError: when a node of one is damaged.
    """
    base = {"driver": "file", "path": f"{directory}/"}
    try:
        dumped = ts.ocdbt.dump(ts.KvStore.open(base).result()).result()
        for version in dumped["versions"][:-1]:
            spec = {"driver": "ocdbt", "base": base, "version": version["generation_number"]}
            ts.KvStore.open(spec).result().list().result()
    except ValueError as error:
        raise _corrupt(error) from None


def list_keys(store: ts.KvStore) -> list[str]:
    """Every key of the database, in order."""
    try:
        return [key.decode() for key in store.list().result()]
    except ValueError as error:
        raise _corrupt(error) from None


def _value(future: ts.Future[ts.KvStore.ReadResult]) -> bytes | CorruptCheckpointError | None:
    """The value of a read, or why there is none."""
    try:
        result = future.result()
    except ValueError as error:
        return _corrupt(error)
    return result.value if result.state == "value" else None


def _corrupt(error: Exception) -> CorruptCheckpointError:
    """What TensorStore says of a damaged database."""
    return CorruptCheckpointError(f"the arrays are damaged: {error}. Restore another step.")
