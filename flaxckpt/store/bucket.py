"""A store in a bucket: conditional writes, and commit by a claim."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import re
import uuid
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from flaxckpt.errors import DirectoryError, FlaxckptError, StepExistsError, StoreError
from flaxckpt.options import ObjectStore
from flaxckpt.store import layout
from flaxckpt.store.store import (
    Capabilities,
    FileStatus,
    Location,
    NewFiles,
    Stray,
    WriteAt,
    already_there,
)

if TYPE_CHECKING:
    import tensorstore as ts


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
# A range that does not lie within the object.
_OUT_OF_RANGE = "OUT_OF_RANGE"

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


@dataclasses.dataclass(frozen=True, eq=False)
class BucketStore:
    """A bucket: the connection that all its users share; a `Store`.

    Attributes:
      url: such as `s3://bucket`.
      timeout_secs: how long the answer to a request is waited for, with all its repetitions.
      spec: what TensorStore opens.
      shared: the context of all that is opened in it; copies within a bucket need the same.
    """

    url: str
    timeout_secs: float
    spec: Mapping[str, Any]
    shared: ts.Context

    @property
    def can(self) -> Capabilities:
        """See `Store`, as for all that is not explained here."""
        return Capabilities(
            atomic_rename=False,
            locks=False,
            sizes=False,
            directories=False,
            rewrites=False,
            latency=True,
            orbax_marker=self.url.startswith("gs://"),
        )

    def objects(self, prefix: str = "") -> ts.KvStore:
        """All objects whose names begin with `prefix`."""
        import tensorstore as ts

        return self.result(ts.KvStore.open({**self.spec, "path": prefix}, context=self.shared))

    def kvstore(self, at: Location, context: ts.Context | None = None) -> ts.KvStore:
        """See `Store`."""
        del context
        return self.objects(f"{at.key}/" if at.key else "")

    def context(self, parent: ts.Context | None) -> ts.Context | None:
        """Its own."""
        del parent
        return self.shared

    def result(self, future: ts.Future[T]) -> T:
        """What `future` gives.

        Raises:
          StoreError: when the store cannot be reached, refuses, or does not answer in time.
        """
        with self._explained(_NO_BUCKET):
            return future.result(timeout=self.timeout_secs)

    def reached(self) -> contextlib.AbstractContextManager[None]:
        """See `Store`."""
        return self._explained()

    @contextlib.contextmanager
    def _explained(self, also: str = "") -> Iterator[None]:
        """As `reached`; TensorStore's messages that begin with `also` mean it here, too."""
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

    # Objects

    def stat(self, at: Location) -> FileStatus | None:
        """Asks for one byte; TensorStore does not say how many there are."""
        try:
            found = self._found(at, byte_range=slice(0, 1))
        except ValueError as error:
            if not str(error).startswith(_OUT_OF_RANGE):  # it is empty
                raise
        else:
            if found.state == "missing":
                return None
        return FileStatus(is_file=True, is_directory=False, size=None, seconds=None)

    def read(self, at: Location, start: int, stop: int | None) -> bytes:
        """A second request, for what there is, when the range does not lie within the object."""
        for end in (stop, None):
            try:
                found = self._found(at, byte_range=slice(start, end))
            except ValueError as error:
                if not str(error).startswith(_OUT_OF_RANGE):
                    raise
                continue
            if found.state == "missing":
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(at))
            return found.value
        return b""

    def read_own(self, at: Location, limit: int) -> bytes:
        """See `Store`."""
        found = self.read(at, 0, None)
        if len(found) > limit:
            raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(at))
        return found

    def fill(self, at: Location, offset: int, buffers: Sequence[memoryview]) -> int:
        """See `Store`."""
        data = memoryview(self.read(at, offset, offset + sum(map(len, buffers))))
        missing = 0
        for buffer in buffers:
            part = data[: len(buffer)]
            buffer[: len(part)] = part
            data, missing = data[len(buffer) :], missing + len(buffer) - len(part)
        return missing

    def create(self, at: Location, data: bytes) -> bool:
        """Writes an object that must not exist; returns whether it has `data` now.

        The answer to a request may be lost, and the request be repeated: then it finds the object
        that it has written itself. So what is there is read before that is called a failure.
        """
        for _ in range(2):  # what was there may be gone by the time it is read
            if self._write_if(at, data, MISSING):
                return True
            if (found := self.value(at)) is not None:
                return found == data
        # TensorStore takes it for a lost condition when there is no bucket.
        raise StoreError(
            f"{at} cannot be written, most likely because there is no bucket {self.url}. Create "
            "it, or correct the URL."
        )

    def create_from(self, at: Location, blocks: Iterable[bytes]) -> None:
        """An object is on the host as a whole. (Those of flaxckpt have 256 MiB at the most.)"""
        at.create(b"".join(blocks))

    def blocks(self, at: Location) -> Iterator[bytes]:
        """One block."""
        yield self.read(at, 0, None)

    def set_flag(self, at: Location, *, present: bool) -> None:
        """See `Store`."""
        if present:
            self.create(at, b"")
        else:
            self._put(at, None)

    def make_directory(self, at: Location) -> None:
        """There are none."""

    def sync(self, at: Location) -> None:
        """What was answered is durable."""

    def names(self, at: Location) -> list[str]:
        """TensorStore takes it for an empty list when GCS refuses to list; a read would raise."""
        found = sorted(key.decode() for key in self.result(self.kvstore(at).list()))
        if not found:
            self.stat(at)
        return found

    def children(self, at: Location) -> list[str]:
        """All that is below it is listed."""
        return sorted({name.partition("/")[0] for name in self.names(at)})

    def directories(self, at: Location) -> list[str]:
        """See `Store`."""
        return sorted({name.partition("/")[0] for name in self.names(at) if "/" in name})

    @contextlib.contextmanager
    def new_files(
        self, final: Location, names: Sequence[str], old: Sequence[str], index: str
    ) -> Iterator[NewFiles]:
        """Each is there when it is written; what was written goes again when one fails."""
        parent = final.parent
        if len(names) > 1 and index in old:
            self._put(parent / index, None)
        with contextlib.ExitStack() as undo:
            yield _NewObjects(self, parent, old, undo)
            undo.pop_all()
        for name in set(old) - set(names):
            self._put(parent / name, None)

    def value(self, at: Location) -> bytes | None:
        """All of an object; `None` when there is none."""
        found = self._found(at)
        return None if found.state == "missing" else found.value

    def replace(self, at: Location, old: bytes, new: bytes) -> bool:
        """Writes `new` where there is `old`; returns whether `new` is there now."""
        found = self._found(at)
        if found.state != "value" or found.value != old:
            return False
        return self._write_if(at, new, found.stamp.generation) or self.value(at) == new

    def delete_if(self, at: Location, data: bytes) -> None:
        """Deletes the object if it has `data`. (S3 looks first, then deletes.)"""
        found = self._found(at)
        if found.state == "value" and found.value == data:
            self._put(at, None, if_equal=found.stamp.generation)

    def _found(self, at: Location, **limits: Any) -> ts.KvStore.ReadResult:
        """What a read gives: the object and its generation, or that there is none."""
        return self.result(self.objects().read(at.key, **limits))

    def _put(self, at: Location, data: bytes | None, **condition: Any) -> bytes:
        """Writes the object, or deletes it; gives its new generation."""
        return self.result(self.objects().write(at.key, data, **condition)).generation

    def _write_if(self, at: Location, data: bytes, generation: bytes) -> bool:
        """Writes the object if it has `generation`; returns whether that is known to be so."""
        return self._put(at, data, if_equal=generation) != _NOT_WRITTEN

    # Checkpoints

    def prepare(self, parent: Location) -> None:
        """Makes sure that the store heeds conditions on writes.

        Raises:
          DirectoryError: when it does not: two writers could then destroy each other's checkpoints.
        """
        probe = parent / f"{layout.PROBE}{uuid.uuid4().hex}"
        try:
            if not (self._write_if(probe, b"", MISSING) and self._write_if(probe, b"", MISSING)):
                return
        finally:
            self._put(probe, None)
        raise DirectoryError(
            f"{self.url} ignores conditional writes (If-None-Match), so nothing can be saved there "
            "safely. Use a store that has them: AWS S3, GCS, MinIO, Ceph 19 or later."
        )

    @contextlib.contextmanager
    def commit(self, final: Location, attempt: str, *, overwrite: bool) -> Iterator[Location]:
        """By a claim; `final` is written in place.

        Raises:
          StepExistsError: when `final` is committed, or claimed by another writer.
          DirectoryError: when it has objects that flaxckpt did not write.
        """
        self._claim(final, attempt, overwrite=overwrite)
        try:
            yield final
            self._put(final / layout.COMMIT_SUCCESS, attempt.encode())
            if not self.replace(_claim_of(final), _writing(attempt), _committed(attempt)):
                raise StepExistsError(
                    f"{final} was taken over by another writer while it was written. That save is "
                    "intact, and this one is lost. Stop one of the two jobs: only one may write a "
                    "run."
                )
        except BaseException:
            if self.replace(_claim_of(final), _writing(attempt), _removing(attempt)):
                self._remove(final, attempt)
            raise

    def _claim(self, final: Location, attempt: str, *, overwrite: bool) -> None:
        """Creates the claim of `attempt`, and makes sure that nothing else is there."""
        if not self.create(_claim_of(final), _writing(attempt)):
            advice = "; in a bucket it cannot be replaced safely" if overwrite else ""
            raise StepExistsError(
                f"{final} exists already, or is being written by another writer{advice}. Delete it "
                "first, or save another step."
            )
        names = self.names(final)
        ours = {name for name in names if self._is_certain(final, name)}
        foreign = [
            name for name in names if name not in ours and not (ours and _COMMON.fullmatch(name))
        ]
        if foreign:
            self.delete_if(_claim_of(final), _writing(attempt))
            raise DirectoryError(
                f"{final} has objects that flaxckpt did not write, such as {foreign[0]}, so it is "
                "not touched. Save somewhere else, or remove them yourself."
            )
        self._delete(final, names, _writing(attempt))

    def _is_certain(self, final: Location, name: str) -> bool:
        """Whether an object can only be flaxckpt's."""
        for names, contents in _TELLING:
            if names.fullmatch(name):
                return contents.fullmatch(self.value(final / name) or b"") is not None
        return _CERTAIN.fullmatch(name) is not None

    def committed_by(self, final: Location) -> str | None:
        """The attempt that committed `final`; `None` when it is not.

        What was copied to somewhere else has no claim there: its marker counts, which a copy that
        was cut short may lack.
        """
        found = self.value(_claim_of(final))
        if found is None:
            found = self.value(final / layout.COMMIT_SUCCESS)
            return None if found is None else found.decode(errors="replace")
        attempt, _, state = found.decode(errors="replace").partition(" ")
        return attempt if state == "committed" else None

    def discard(self, directory: Location) -> None:
        """The next writer takes it over."""

    def checkpoints(self, parent: Location) -> list[str]:
        """What is or may become a checkpoint: one listing, whatever they hold."""
        return self.names(parent / layout.CLAIMS)

    def take_over(self, parent: Location, name: str | None = None) -> Sequence[Location]:
        """See `Store`."""
        names = self.checkpoints(parent) if name is None else [name]
        return [parent / name for name in names if self._is_taken_over(parent / name)]

    def _is_taken_over(self, final: Location) -> bool:
        """Removes `final` if it is unfinished; returns whether it was."""
        found, attempt = self.value(_claim_of(final)), layout.new_attempt()
        if found is None or found.endswith((b" committed", b" aside")):
            return False
        if not self.replace(_claim_of(final), found, _removing(attempt)):
            return False  # its writer lives, or somebody else removes it
        self._remove(final, attempt)
        return True

    def remove(self, final: Location) -> None:
        """See `Store`."""
        claim, attempt = _claim_of(final), layout.new_attempt()
        found = self.value(claim)
        if (
            self.create(claim, _removing(attempt))
            if found is None
            else self.replace(claim, found, _removing(attempt))
        ):
            self._remove(final, attempt)

    def set_aside(self, final: Location) -> None:
        """By its claim, which no longer says that it is committed."""
        claim = _claim_of(final)
        if (found := self.value(claim)) is None:
            self.create(claim, _aside(layout.new_attempt()))
        else:
            self.replace(claim, found, found.partition(b" ")[0] + b" aside")

    def remove_aside(self, parent: Location, name: str | None = None) -> None:
        """See `Store`."""
        for child in self.checkpoints(parent) if name is None else [name]:
            if (self.value(_claim_of(parent / child)) or b"").endswith(b" aside"):
                self.remove(parent / child)

    def _remove(self, final: Location, attempt: str) -> None:
        """Deletes all of a checkpoint whose claim says that `attempt` removes it."""
        self._delete(final, self.names(final), _removing(attempt))
        self.delete_if(_claim_of(final), _removing(attempt))

    def _delete(self, final: Location, names: list[str], claim: bytes) -> None:
        """Deletes objects, the marker first, unless somebody has taken over from who holds `claim`.

        If the claim is still there after `names` and the generations were read, they are not of the
        next attempt; and what changes after that is not deleted.
        """
        unique = [name for name in names if _UNIQUE.fullmatch(name)]
        shared = sorted(set(names).difference(unique), key=lambda n: n != layout.COMMIT_SUCCESS)
        found = [(final / n, self._found(final / n).stamp.generation) for n in shared]
        if not names or self.value(_claim_of(final)) != claim:
            return
        for path, generation in found:
            self._put(path, None, if_equal=generation)
        # One by one: `delete_range` hides what GCS refuses.
        objects = self.kvstore(final)
        for deleting in [objects.write(name, None) for name in unique]:
            self.result(deleting)

    def strays(self, parent: Location, steps: Container[str]) -> Iterator[Stray]:
        """See `Store`."""
        names = self.names(parent)
        claims = {n.partition("/")[2] for n in names if n.startswith(f"{layout.CLAIMS}/")}
        others = {name.partition("/")[0] for name in names} - claims - {layout.CLAIMS}
        for name in claims:
            if name not in steps:
                said = self.value(parent / layout.CLAIMS / name) or b""
                state = said.decode(errors="replace").partition(" ")[2]
                yield Stray(name, _UNFINISHED.get(state, "damaged"))
        for name in others:
            if name not in steps:
                is_ours = name.startswith(layout.PROBE) or layout.parse_temporary(name) is not None
                yield Stray(name, "left by a process, or in use" if is_ours else "")


_UNFINISHED = {
    "writing": "being written, or its writer is gone",
    "removing": "being removed",
    "aside": "set aside by a rollback",
}


def _claim_of(final: Location) -> Location:
    """The claim to `final`."""
    return final.parent / layout.CLAIMS / final.name


def _writing(attempt: str) -> bytes:
    """The claim of an attempt that writes."""
    return f"{attempt} writing".encode()


def _committed(attempt: str) -> bytes:
    """The claim of an attempt that has committed."""
    return f"{attempt} committed".encode()


def _aside(attempt: str) -> bytes:
    """The claim to a checkpoint that was set aside."""
    return f"{attempt} aside".encode()


def _removing(attempt: str) -> bytes:
    """The claim of who removes what there is."""
    return f"{attempt} removing".encode()


class _NewObjects:
    """New objects next to each other, which `undo` removes; `NewFiles`."""

    def __init__(
        self,
        store: BucketStore,
        parent: Location,
        old: Sequence[str],
        undo: contextlib.ExitStack,
    ):
        self._store, self._parent, self._old, self._undo = store, parent, old, undo

    @contextlib.contextmanager
    def file(self, name: str, size: int) -> Iterator[WriteAt]:
        """An object, which is in memory until all of it is there."""
        memory = io.BytesIO()
        memory.truncate(size)

        def write(offset: int, data: memoryview) -> None:
            memory.seek(offset)
            memory.write(data)

        yield write
        path = self._parent / name
        if name in self._old:
            self._store._put(path, memory.getvalue())
        elif not self._store.create(path, memory.getvalue()):
            raise already_there(path)
        self._undo.callback(self._store._put, path, None)


# URLs, and what TensorStore makes of the settings.
#
# https://google.github.io/tensorstore/kvstore/s3/index.html
# https://google.github.io/tensorstore/kvstore/gcs/index.html


# Without a number TensorStore repeats a request 32 times, which takes a quarter of an hour.
FIRST_DELAY, LONGEST_DELAY = "500ms", "8s"
_URL = re.compile(r"(s3|gs)://([^/]+)/?(.*)")


def open_bucket(url: str, settings: ObjectStore, timeout_secs: float) -> Location:
    """What `url` names.

    Raises:
      DirectoryError: when it is no URL of an object store.
    """
    scheme, name, key = split_url(url)
    import tensorstore as ts

    spec, context = driver_spec(scheme, name, settings), ts.Context(context_spec(scheme, settings))
    return Location(BucketStore(f"{scheme}://{name}", timeout_secs, spec, context), key)


def is_url(path: str) -> bool:
    """Whether `path` is the URL of something in an object store."""
    return _URL.fullmatch(path) is not None


def split_url(url: str) -> tuple[str, str, str]:
    """The scheme, the bucket and the key of a URL.

    Raises:
      DirectoryError: when it is none, or its key has empty, `.` or `..` parts.

    Example:
      >>> split_url("s3://bucket/runs/mnist")
      ('s3', 'bucket', 'runs/mnist')
    """
    found = _URL.fullmatch(url)
    key = found[3].rstrip("/") if found else ""
    if found is None or (key and {"", ".", ".."} & set(key.split("/"))):
        raise DirectoryError(f"{url} is no URL of an object store. Give s3://bucket/path.")
    return found[1], found[2], key


def driver_spec(scheme: str, bucket: str, settings: ObjectStore) -> dict[str, Any]:
    """What TensorStore opens.

    Raises:
      DirectoryError: when the store has no such setting.
    """
    if scheme == "s3":
        spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "use_conditional_write": True}
        if settings.endpoint is not None:
            spec["endpoint"] = settings.endpoint
        if settings.region is not None:
            spec["aws_region"] = settings.region
        return spec
    if (settings.endpoint, settings.region, settings.credentials) != (None, None, None):
        raise DirectoryError(
            f"gs://{bucket} takes no endpoint, region or credentials in Options(storage=...): they "
            "come from the environment (TENSORSTORE_GCS_HTTP_URL, Google's default credentials). "
            "Set them there."
        )
    return {"driver": "gcs", "bucket": bucket}


def context_spec(scheme: str, settings: ObjectStore) -> dict[str, Any]:
    """What all that is opened in one store shares."""
    retries = {
        "max_retries": settings.retries,
        "initial_delay": FIRST_DELAY,
        "max_delay": LONGEST_DELAY,
    }
    if scheme == "gs":
        return {"gcs_request_retries": retries}
    spec: dict[str, Any] = {"s3_request_retries": retries}
    if settings.credentials is not None:
        kind, _, profile = settings.credentials.partition(":")
        spec["aws_credentials"] = {"type": kind} | ({"profile": profile} if profile else {})
    return spec
