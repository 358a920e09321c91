"""Buckets of object stores, used like directories as far as checkpoints need them.

All of it goes through TensorStore's key-value stores: reads and lists are never stale, and a write
can be made to depend on what is there. (The file system interfaces of Python cache listings.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from flaxckpt.errors import FlaxckptError, StoreError
from flaxckpt.storage.object_store import ObjectStore, context_spec, driver_spec, split_url

if TYPE_CHECKING:
    import tensorstore as ts

T = TypeVar("T")

# The generation of what does not exist, and what a write gives whose condition did not hold.
# https://google.github.io/tensorstore/python/api/tensorstore.KvStore.TimestampedStorageGeneration.html
MISSING, _NOT_WRITTEN = b"\x02", b""

# What TensorStore says, as the first word, of requests that did not reach the store or that it
# refused; all else is about what is stored.
_UNREACHED = re.compile(
    "ABORTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED"
    "|UNKNOWN"
)
# An object that is not there is no error to TensorStore; to a database it is damage.
_NO_BUCKET = "NOT_FOUND"


@dataclasses.dataclass(frozen=True, eq=False)
class Bucket:
    """A bucket: the connection that all its users share.

    Attributes:
      url: such as `s3://bucket`.
      timeout_secs: how long the answer to a request is waited for, with all its repetitions.
      spec: what TensorStore opens.
      context: what TensorStore shares; copies within a bucket need the same.
    """

    url: str
    timeout_secs: float
    spec: Mapping[str, Any]
    context: ts.Context

    def kvstore(self, prefix: str) -> ts.KvStore:
        """All objects whose names begin with `prefix`."""
        import tensorstore as ts

        return self.result(ts.KvStore.open({**self.spec, "path": prefix}, context=self.context))

    def result(self, future: ts.Future[T]) -> T:
        """What `future` gives.

        Raises:
          StoreError: when the store cannot be reached, refuses, or does not answer in time.
        """
        with self.reached(_NO_BUCKET):
            return future.result(timeout=self.timeout_secs)

    @contextlib.contextmanager
    def reached(self, also: str = "") -> Iterator[None]:
        """Explains what goes wrong in the block because the store cannot be used.

        Args:
          also: what TensorStore's messages begin with that mean this here, and elsewhere do not.

        Raises:
          StoreError: in that case.
        """
        try:
            yield
        except FlaxckptError:
            raise  # some are a TimeoutError or a ValueError too
        except TimeoutError:
            why = f"it did not answer within {self.timeout_secs:g} s"
        except ValueError as error:
            if not _UNREACHED.match(str(error)) and not (also and str(error).startswith(also)):
                raise
            why = str(error)
        else:
            return
        raise StoreError(
            f"{self.url} cannot be used: {why}. Check the network, the credentials and "
            "Options(storage=...)."
        ) from None


@dataclasses.dataclass(frozen=True, eq=False)
class BucketPath:
    """A name in a bucket, of one object or, as a directory would be, of all below it."""

    bucket: Bucket
    key: str

    def __truediv__(self, name: str) -> BucketPath:
        """What is called `name` below this."""
        return BucketPath(self.bucket, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        """The URL."""
        return f"{self.bucket.url}/{self.key}"

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> BucketPath:
        """All but the last part."""
        return BucketPath(self.bucket, self.key.rpartition("/")[0])

    def kvstore(self) -> ts.KvStore:
        """All that is below this."""
        return self.bucket.kvstore(f"{self.key}/" if self.key else "")

    # Objects

    def read(self, start: int = 0, stop: int | None = None) -> bytes | None:
        """The bytes of the object, or those from `start` to `stop`; `None` when there is none.

        Raises:
          ValueError: when it has not so many bytes.
        """
        found = self._found(byte_range=slice(start, stop))
        return None if found.state == "missing" else found.value

    def exists(self) -> bool:
        """Whether there is an object of this name."""
        return self.read() is not None

    def create(self, data: bytes) -> bool:
        """Writes an object that must not exist; returns whether it has `data` now.

        The answer to a request may be lost, and the request be repeated: then it finds the object
        that it has written itself. So what is there is read before that is called a failure.
        """
        for _ in range(2):  # what was there may be gone by the time it is read
            if self._write(data, MISSING):
                return True
            if (found := self.read()) is not None:
                return found == data
        # TensorStore takes it for a lost condition when there is no bucket.
        raise StoreError(
            f"{self} cannot be written, most likely because there is no bucket {self.bucket.url}. "
            "Create it, or correct the URL."
        )

    def write(self, data: bytes) -> None:
        """Writes the object, whether it exists or not."""
        self.bucket.result(self.bucket.kvstore("").write(self.key, data))

    def replace(self, old: bytes, new: bytes) -> bool:
        """Writes `new` where there is `old`; returns whether `new` is there now."""
        found = self._found()
        if found.state != "value" or found.value != old:
            return False
        return self._write(new, found.stamp.generation) or self.read() == new

    def delete(self) -> None:
        """Deletes the object; that there is none is no error."""
        self.bucket.result(self.bucket.kvstore("").write(self.key, None))

    def generation(self) -> bytes:
        """What changes whenever the object does."""
        return self._found().stamp.generation

    def delete_at(self, generation: bytes) -> None:
        """Deletes the object if it has that generation. (S3 looks first, then deletes.)"""
        self.bucket.result(self.bucket.kvstore("").write(self.key, None, if_equal=generation))

    def delete_if(self, data: bytes) -> None:
        """Deletes the object if it has `data`."""
        found = self._found()
        if found.state == "value" and found.value == data:
            self.delete_at(found.stamp.generation)

    def is_created_twice(self, data: bytes) -> bool:
        """Whether the store lets an object that exists be created; it must not."""
        return self._write(data, MISSING) and self._write(data, MISSING)

    def _found(self, **limits: Any) -> ts.KvStore.ReadResult:
        """What a read gives: the object and its generation, or that there is none."""
        return self.bucket.result(self.bucket.kvstore("").read(self.key, **limits))

    def _write(self, data: bytes, generation: bytes) -> bool:
        """Writes the object if it has `generation`; returns whether that is known to be so."""
        kvstore = self.bucket.kvstore("")
        stamp = self.bucket.result(kvstore.write(self.key, data, if_equal=generation))
        return stamp.generation != _NOT_WRITTEN

    # All that is below

    def names(self) -> list[str]:
        """The names of all objects below this, relative to it.

        TensorStore takes it for an empty list when GCS refuses to list; a read would raise then.
        """
        found = sorted(key.decode() for key in self.bucket.result(self.kvstore().list()))
        if not found:
            self.exists()
        return found

    def delete_all(self, names: Iterable[str]) -> None:
        """Deletes `names` below this, one by one: `delete_range` hides what GCS refuses."""
        kvstore = self.kvstore()
        for deleting in [kvstore.write(name, None) for name in names]:
            self.bucket.result(deleting)


def open_bucket(url: str, settings: ObjectStore, timeout_secs: float) -> BucketPath:
    """What `url` names.

    Raises:
      DirectoryError: when it is no URL of an object store.
    """
    scheme, name, key = split_url(url)
    import tensorstore as ts

    spec, context = driver_spec(scheme, name, settings), ts.Context(context_spec(scheme, settings))
    return BucketPath(Bucket(f"{scheme}://{name}", timeout_secs, spec, context), key)
