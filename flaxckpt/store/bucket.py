"""A store in a bucket: conditional writes, and commit by a claim."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from flaxckpt.errors import DirectoryError, FlaxckptError, StepExistsError, StoreError
from flaxckpt.options import ObjectStore, context_spec, driver_spec, split_url
from flaxckpt.store import layout

if TYPE_CHECKING:
    import tensorstore as ts


# Buckets of object stores, used like directories as far as checkpoints need them.
#
# All of it goes through TensorStore's key-value stores: reads and lists are never stale, and a
# write can be made to depend on what is there. (The file system interfaces of Python cache
# listings.)


T = TypeVar("T")

# The generation of what does not exist, and what a write gives whose condition did not hold. https:
# //google.github.io/tensorstore/python/api/tensorstore.KvStore.TimestampedStorageGeneration.html
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


# How a checkpoint becomes visible in a bucket: by the claim to it.
#
# Stores have no rename, no locks, and cannot list a directory without all that is below it. So next
# to the checkpoints there is `_claims/`, with one small object for each that exists, is being
# written or is being removed; a run is listed by it, however many objects its steps have. A claim
# holds the attempt's id and one of three words:
#
#     writing      created on the condition that there is no claim: one writer can
#     committed    put in place of `writing`, on the condition that it is still there: the commit
#     removing     put in place of either, on the same condition; then the objects go, then it
#
# The commit and everything that could contradict it are changes of one object, each of which names
# what it replaces, so exactly one of them happens. The marker of Orbax is written before the
# commit.
#
# Nobody can see whether the writer of a claim lives. A run has one writer, so the next one takes
# over and removes what is not committed. A writer that lives after all cannot commit any more. What
# it still writes has names of its own or is written on the condition that there is nothing; what it
# still deletes, it deletes on the condition that it is what it found there.


# What a dead process may still have written after the others had cleaned up: names that are only
# ours, and those whose contents tell.
_CERTAIN = re.compile(
    rf"{layout.TREE}/{layout.CHILD}\d+-[0-9a-f]{{12}}/.*"
    rf"|{layout.ITEM_NAME}/process_\d+-of-\d+-[0-9a-f]{{12}}[./].+"
)
# Names that no two attempts give.
_UNIQUE = re.compile(rf"{_CERTAIN.pattern}|{layout.TREE}/d/[0-9a-f]+")
_TELLING = (
    (re.compile(re.escape(layout.COMMIT_SUCCESS)), re.compile(rb"[0-9a-f]{12}")),
    (
        re.compile(rf"{layout.ITEM_NAME}/{re.escape(layout.COMMIT_SUCCESS)}"),
        re.compile(re.escape(layout.ITEM_MARKER)),
    ),
    (
        re.compile(rf"{layout.CHECKPOINT_METADATA}|{layout.TREE}/{layout.TREE_METADATA}"),
        re.compile(rb'.*"flaxckpt":.*', re.DOTALL),
    ),
)
# And beside one of these, also what Orbax may have written, and the files of items.
_COMMON = re.compile(
    rf"{layout.TREE}/({layout.SHARDING}|{re.escape(layout.STRINGS)}|{layout.MANIFEST}"
    rf"|{layout.ARRAY_METADATAS}/process_0|d/[0-9a-f]+)"
    rf"|{layout.ITEM_NAME}/({layout.JSON_FILE}|{re.escape(layout.PROTO_FILE)}"
    rf"|{layout.USER_FILES}/.+|process_\d+-of-\d+[./].+"
    rf"|({layout.JAX_KEY}|{layout.NUMPY_KEY})_metadata/{layout.JSON_FILE})"
)


@contextlib.contextmanager
def commit_by_claim(final: BucketPath, attempt: str, *, overwrite: bool) -> Iterator[BucketPath]:
    """As `commit.commit_by_rename`, for a bucket; `final` is written in place.

    Raises:
      StepExistsError: when `final` is committed, or claimed by another writer.
      DirectoryError: when it has objects that flaxckpt did not write.
    """
    _claim(final, attempt, overwrite=overwrite)
    try:
        yield final
        (final / layout.COMMIT_SUCCESS).write(attempt.encode())
        if not _claim_of(final).replace(_writing(attempt), _committed(attempt)):
            raise StepExistsError(
                f"{final} was taken over by another writer while it was written. That save is "
                "intact, and this one is lost. Stop one of the two jobs: only one may write a run."
            )
    except BaseException:
        if _claim_of(final).replace(_writing(attempt), _removing(attempt)):
            _remove(final, attempt)
        raise


def _claim(final: BucketPath, attempt: str, *, overwrite: bool) -> None:
    """Creates the claim of `attempt`, and makes sure that nothing else is there."""
    if not _claim_of(final).create(_writing(attempt)):
        advice = "; in a bucket it cannot be replaced safely" if overwrite else ""
        raise StepExistsError(
            f"{final} exists already, or is being written by another writer{advice}. Delete it "
            "first, or save another step."
        )
    names = final.names()
    ours = {name for name in names if _is_certain(final, name)}
    foreign = [
        name for name in names if name not in ours and not (ours and _COMMON.fullmatch(name))
    ]
    if foreign:
        _claim_of(final).delete_if(_writing(attempt))
        raise DirectoryError(
            f"{final} has objects that flaxckpt did not write, such as {foreign[0]}, so it is not "
            "touched. Save somewhere else, or remove them yourself."
        )
    _delete(final, names, _writing(attempt))


def _is_certain(final: BucketPath, name: str) -> bool:
    """Whether an object can only be flaxckpt's."""
    for names, contents in _TELLING:
        if names.fullmatch(name):
            return contents.fullmatch((final / name).read() or b"") is not None
    return _CERTAIN.fullmatch(name) is not None


def committed_by(final: BucketPath) -> str | None:
    """The attempt that committed `final`; `None` when it is not.

    What was copied to somewhere else has no claim there: its marker counts, which a copy that was
    cut short may lack.
    """
    found = _claim_of(final).read()
    if found is None:
        found = (final / layout.COMMIT_SUCCESS).read()
        return None if found is None else found.decode(errors="replace")
    attempt, _, state = found.decode(errors="replace").partition(" ")
    return attempt if state == "committed" else None


def remove(final: BucketPath) -> None:
    """Deletes a checkpoint: its name first. That somebody else does is no error."""
    claim, attempt = _claim_of(final), layout.new_attempt()
    found = claim.read()
    if (
        claim.create(_removing(attempt))
        if found is None
        else claim.replace(found, _removing(attempt))
    ):
        _remove(final, attempt)


def _remove(final: BucketPath, attempt: str) -> None:
    """Deletes all of a checkpoint whose claim says that `attempt` removes it."""
    _delete(final, final.names(), _removing(attempt))
    _claim_of(final).delete_if(_removing(attempt))


def _delete(final: BucketPath, names: list[str], claim: bytes) -> None:
    """Deletes objects, the marker first, unless somebody has taken over from who holds `claim`.

    If the claim is still there after `names` and the generations were read, they are not of the
    next attempt; and what changes after that is not deleted.
    """
    unique = [name for name in names if _UNIQUE.fullmatch(name)]
    shared = sorted(set(names).difference(unique), key=lambda name: name != layout.COMMIT_SUCCESS)
    found = [(final / name, (final / name).generation()) for name in shared]
    if names and _claim_of(final).read() == claim:
        for path, generation in found:
            path.delete_at(generation)
        final.delete_all(unique)


def claimed(parent: BucketPath) -> list[str]:
    """The names of what is or may become a checkpoint: one listing, whatever they hold."""
    return (parent / layout.CLAIMS).names()


def take_over(parent: BucketPath, name: str | None = None) -> list[BucketPath]:
    """Removes what writers before left unfinished; returns what was removed.

    Args:
      parent: where it lies.
      name: only that of the checkpoint of this name.
    """
    names = claimed(parent) if name is None else [name]
    return [parent / name for name in names if _is_removed(parent / name)]


def _is_removed(final: BucketPath) -> bool:
    """Removes `final` if it is unfinished; returns whether it was."""
    found, attempt = _claim_of(final).read(), layout.new_attempt()
    if found is None or found.endswith(b" committed"):
        return False
    if not _claim_of(final).replace(found, _removing(attempt)):
        return False  # its writer lives, or somebody else removes it
    _remove(final, attempt)
    return True


def check_conditions(parent: BucketPath) -> None:
    """Makes sure that the store heeds conditions on writes.

    Raises:
      DirectoryError: when it does not: two writers could then destroy each other's checkpoints.
    """
    probe = parent / f"{layout.PROBE}{uuid.uuid4().hex}"
    try:
        if not probe.is_created_twice(b""):
            return
    finally:
        probe.delete()
    raise DirectoryError(
        f"{parent.bucket.url} ignores conditional writes (If-None-Match), so nothing can be saved "
        "there safely. Use a store that has them: AWS S3, GCS, MinIO, Ceph 19 or later."
    )


def _claim_of(final: BucketPath) -> BucketPath:
    """The claim to `final`."""
    return final.parent / layout.CLAIMS / final.name


def _writing(attempt: str) -> bytes:
    """The claim of an attempt that writes."""
    return f"{attempt} writing".encode()


def _committed(attempt: str) -> bytes:
    """The claim of an attempt that has committed."""
    return f"{attempt} committed".encode()


def _removing(attempt: str) -> bytes:
    """The claim of who removes what there is."""
    return f"{attempt} removing".encode()
