"""The key-value store of a checkpoint: one OCDBT database, written in batches.

Values up to `INLINE_BYTES` lie in the nodes of its B-tree, larger ones in data files. Small leaves
are two values each and cost no file and no array driver.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tensorstore as ts

INLINE_BYTES = 1024
DATA_FILE_BYTES = 256 << 20
NODE_BYTES = 100_000_000


def create_store(directory: Path, *, fsync: bool = True) -> ts.KvStore:
    """A new OCDBT database in `directory`; the manifest is written by the first commit.

    Args:
      directory: an existing directory without one.
      fsync: whether commits wait for the disk.
    """
    return ts.KvStore.open(
        {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{directory}/", "file_io_sync": fsync},
            "assume_config": True,
            "target_data_file_size": DATA_FILE_BYTES,
            "config": {
                "max_inline_value_bytes": INLINE_BYTES,
                "max_decoded_node_bytes": NODE_BYTES,
                "manifest_kind": "single",
            },
        }
    ).result()


def write_all(store: ts.KvStore, items: Iterable[tuple[str, bytes]], buffer_bytes: int) -> None:
    """Writes `items` in transactions of at most half of `buffer_bytes`.

    While one transaction is written to disk, the next is filled.

    Raises:
      OSError: when the disk is full or fails.
    """
    committing: ts.Future[None] | None = None
    try:
        for batch in _batches(store, items, buffer_bytes // 2):
            if committing is not None:
                _finish(committing)
            committing = batch.commit_async()
        if committing is not None:
            _finish(committing)
    except BaseException:
        if committing is not None:
            committing.exception()  # or it would still write where the caller cleans up
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


def _finish(committing: ts.Future[None]) -> None:
    """Waits for a transaction; what the system reported is raised as it would be elsewhere."""
    try:
        committing.result()
    except ValueError as error:
        if found := re.search(r"os_error_code='(\d+)'", str(error)):
            code = int(found[1])
            raise OSError(code, f"{os.strerror(code)} ({error})") from error
        raise
