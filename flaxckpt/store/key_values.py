"""A key-value store in the storage of the run: slower than a service, but needs none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from flaxckpt.store import layout
from flaxckpt.store.bucket import MISSING
from flaxckpt.store.store import Location

if TYPE_CHECKING:
    import tensorstore as ts


FIRST_POLL_SECS, LONGEST_POLL_SECS = 0.01, 0.5


def storage_key_values(parent: Location, name: str) -> StorageKeyValueStore:
    """The key-value store called `name`, for a job without a coordination service."""
    directory = parent / layout.temporary_name(layout.KEY_VALUES, name[:12], layout.ALL_HOSTS)
    return StorageKeyValueStore(parent.store.kvstore(directory))


class StorageKeyValueStore:
    """A `KeyValueStore` whose values are small files or objects."""

    def __init__(self, kvstore: ts.KvStore):
        """Keeps the values in `kvstore`, which holds nothing else."""
        self._kvstore = kvstore

    def set(self, key: str, value: str) -> None:
        """See `KeyValueStore`."""
        self._kvstore.write(key, value, if_equal=MISSING).result()

    def get(self, key: str, timeout_secs: float) -> str | None:
        """See `KeyValueStore`."""
        end, pause = time.monotonic() + timeout_secs, FIRST_POLL_SECS
        while (found := self._kvstore.read(key).result()).state == "missing":
            if time.monotonic() >= end:
                return None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECS)
        return found.value.decode()

    def get_prefix(self, prefix: str) -> dict[str, str]:
        """See `KeyValueStore`."""
        keys = self._kvstore.list(_key_range(prefix)).result()
        reads = {key: self._kvstore.read(key) for key in keys}
        found = {key: read.result() for key, read in reads.items()}
        return {
            key[len(prefix) + 1 :].decode(): result.value.decode()
            for key, result in found.items()
            if result.state == "value"
        }

    def delete_prefix(self, prefix: str) -> None:
        """See `KeyValueStore`."""
        self._kvstore.delete_range(_key_range(prefix)).result()


def _key_range(prefix: str) -> ts.KvStore.KeyRange:
    """All keys that begin with `prefix` and a slash; the character after the slash is `0`."""
    import tensorstore as ts

    return ts.KvStore.KeyRange(f"{prefix}/", f"{prefix}0")
