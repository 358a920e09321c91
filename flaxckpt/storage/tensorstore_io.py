"""The key-value store of a checkpoint: one OCDBT database, written in batches.

Values up to `INLINE_BYTES` lie in the nodes of its B-tree, larger ones in data files. Small leaves
are two values each and cost no file and no array driver.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tensorstore as ts

from flaxckpt.storage.location import Location, kvstore

INLINE_BYTES = 1024
DATA_FILE_BYTES = 256 << 20
NODE_BYTES = 100_000_000


def create_store(
    directory: Location,
    context: ts.Context | None = None,
    *,
    fsync: bool = True,
    numbered: bool = False,
) -> ts.KvStore:
    """A new OCDBT database in `directory`; the manifest is written by the first commit.

    Args:
      directory: an existing directory without one.
      context: what it needs to share with databases that are merged into it.
      fsync: whether commits wait for the disk.
      numbered: whether each commit writes a manifest of its own, rather than the one anew. GCS
        lets an object be changed once in a second.
    """
    base = kvstore(directory, context, fsync=fsync)
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
        context=_context(directory, context),
    ).result()


def open_store(directory: Location, context: ts.Context) -> ts.KvStore:
    """The database in `directory`, to be merged into another of the same `context`."""
    base = kvstore(directory, context).spec().to_json()
    spec = {"driver": "ocdbt", "base": base}
    return ts.KvStore.open(spec, context=_context(directory, context)).result()


def _context(directory: Location, context: ts.Context | None) -> ts.Context | None:
    """The context of a bucket is its own."""
    return context if isinstance(directory, Path) else directory.bucket.context


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
