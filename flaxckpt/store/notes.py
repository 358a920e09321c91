"""Notes between processes in the storage: slower than a service, and needs none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from flaxckpt.store.bucket import MISSING

if TYPE_CHECKING:
    import tensorstore as ts


FIRST_LOOK_SECS, LONGEST_LOOK_SECS = 0.01, 0.5


class StorageBoard:
    """A `Board` whose notes are small files, or objects."""

    def __init__(self, kvstore: ts.KvStore):
        """Notes in `kvstore`, which holds nothing else."""
        self._kvstore = kvstore

    def post(self, name: str, text: str) -> None:
        """See `Board`."""
        self._kvstore.write(name, text, if_equal=MISSING).result()

    def read(self, name: str, wait_secs: float) -> str | None:
        """See `Board`."""
        end, pause = time.monotonic() + wait_secs, FIRST_LOOK_SECS
        while (found := self._kvstore.read(name).result()).state == "missing":
            if time.monotonic() >= end:
                return None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK_SECS)
        return found.value.decode()

    def below(self, name: str) -> dict[str, str]:
        """See `Board`."""
        prefix = f"{name}/".encode()
        keys = self._kvstore.list(_below(name)).result()
        reads = {key: self._kvstore.read(key) for key in keys}
        found = {key: read.result() for key, read in reads.items()}
        return {
            key[len(prefix) :].decode(): result.value.decode()
            for key, result in found.items()
            if result.state == "value"
        }

    def remove(self, name: str) -> None:
        """See `Board`."""
        self._kvstore.delete_range(_below(name)).result()


def _below(name: str) -> ts.KvStore.KeyRange:
    """All names that begin with `name` and a slash; `0` comes after the slash."""
    import tensorstore as ts

    return ts.KvStore.KeyRange(f"{name}/", f"{name}0")
