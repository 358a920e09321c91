"""The protocol of a store of checkpoints, and a location in a store.

A `Store` is a directory tree or a bucket, and hides all differences between the two. To add a store
(Azure, say), implement `Store` in a new file and add its URLs to `locate.py`.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from flaxckpt.errors import StepExistsError

if TYPE_CHECKING:
    import tensorstore as ts


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """The properties of a store that its callers depend on.

    Attributes:
      atomic_rename: whether a checkpoint is written under a temporary name and then renamed, so
        that it can replace another. Otherwise the checkpoint is written in place, and a marker
        makes it visible.
      locks: whether a lock tells a live writer from a dead one. Otherwise the next writer takes
        over every uncommitted checkpoint, and file names carry the attempt.
      sizes: whether the store knows the size of a file without reading the file.
      directories: whether directories exist by themselves, even empty ones.
      rewrites: whether a file may be written again at once.
      latency: whether answers are slow, so readers send many requests at once and read across
        small gaps.
      orbax_marker: whether flax and Orbax mark a committed save with a file, as they do on GCS.
    """

    atomic_rename: bool
    locks: bool
    sizes: bool
    directories: bool
    rewrites: bool
    latency: bool
    orbax_marker: bool


class FileStatus(NamedTuple):
    """What a store knows about a path without reading it.

    Attributes:
      is_file: whether the path is a regular file.
      is_directory: whether the path is a directory.
      size: size of the file in bytes; `None` if the store does not know it.
      seconds: time of the last change, in seconds since 1970; `None` if the store does not know it.
    """

    is_file: bool
    is_directory: bool
    size: int | None
    seconds: float | None


class Stray(NamedTuple):
    """A file or directory in a run directory that is not a committed step.

    Attributes:
      name: name of the file or directory.
      unfinished: description of an uncommitted checkpoint; empty for files of other programs.
    """

    name: str
    unfinished: str = ""


class NewFiles(Protocol):
    """A group of new files that are being written."""

    def file(self, name: str, size: int) -> AbstractContextManager[WriteAt]:
        """A file of `size` bytes; the block must write all of them."""


def already_there(path: object) -> StepExistsError:
    """The error for a file that exists already."""
    return StepExistsError(f"there is {path} already. Pass overwrite=True to replace it.")


class WriteAt(Protocol):
    """Writes bytes at an offset of a file."""

    def __call__(self, offset: int, data: memoryview, /) -> None:
        """Writes all of `data`."""


class Store(Protocol):
    """A place that holds checkpoints."""

    @property
    def url(self) -> str:
        """The prefix of all paths in the store: `s3://bucket`, or empty for the file system."""

    @property
    def can(self) -> Capabilities:
        """The capabilities of the store."""

    @property
    def timeout_secs(self) -> float | None:
        """How long one request may take, with its retries; `None` for the file system."""

    def reached(self) -> AbstractContextManager[None]:
        """Turns errors of the connection in a block into errors that name the store.

        Raises:
          StoreError: if the store does not answer, or refuses a request.
        """

    def kvstore(self, at: Location, context: ts.Context | None = None) -> ts.KvStore:
        """All files below `at` for TensorStore; copies between stores need one shared `context`."""

    def context(self, parent: ts.Context | None) -> ts.Context | None:
        """The context to open databases with, for a caller that would share `parent`."""

    # Files

    def stat(self, at: Location) -> FileStatus | None:
        """The status of `at`; `None` if nothing exists there. Buckets have no directories."""

    def read(self, at: Location, start: int, stop: int | None) -> bytes:
        """The bytes of a file from `start` to `stop`; fewer if the file ends before `stop`.

        Raises:
          FileNotFoundError: if the file does not exist.
        """

    def read_own(self, at: Location, limit: int) -> bytes:
        """The contents of a file that flaxckpt wrote, which has at most `limit` bytes.

        Raises:
          FileNotFoundError: if the file does not exist.
          OSError: if it is a link or a directory, is larger, or cannot be read.
        """

    def fill(self, at: Location, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fills `buffers` from `offset` of a file; returns how many bytes the file lacks."""

    def create(self, at: Location, data: bytes) -> bool:
        """Writes a file if it does not exist; returns whether the file now contains `data`."""

    def create_from(self, at: Location, blocks: Iterable[bytes]) -> None:
        """Writes a new file from consecutive `blocks`.

        Raises:
          FileExistsError: if the file exists.
        """

    def blocks(self, at: Location) -> Iterator[bytes]:
        """The contents of a file that flaxckpt wrote, of any size, in blocks.

        Raises:
          FileNotFoundError: if the file does not exist.
        """

    def set_flag(self, at: Location, *, present: bool) -> None:
        """Durably creates an empty file, or deletes it."""

    def make_directory(self, at: Location) -> None:
        """Creates a directory and its parents; does nothing in a bucket."""

    def sync(self, at: Location) -> None:
        """Waits until the names of all files below `at` are durable."""

    def names(self, at: Location) -> list[str]:
        """The names of all files below `at`, relative to it, sorted."""

    def children(self, at: Location) -> list[str]:
        """The names of the files and directories in `at`, sorted."""

    def directories(self, at: Location) -> list[str]:
        """The names of the directories in `at`, sorted; a bucket has no empty ones."""

    def new_files(
        self, final: Location, names: Sequence[str], old: Sequence[str], index: str
    ) -> AbstractContextManager[NewFiles]:
        """Replaces the files `old` by new files; if the block raises, no new file stays.

        Args:
          final: path that the caller asked for; the files are written next to it.
          names: names of the new files, in the order in which they appear.
          old: names of the existing files to replace.
          index: the file in `old` that lists the others; it is deleted first.

        Raises:
          StepExistsError: if one of `names` exists and is not in `old`.
        """

    # Checkpoints

    def prepare(self, parent: Location) -> None:
        """Makes sure that checkpoints can be written into `parent`.

        Raises:
          DirectoryError: if they cannot.
        """

    def commit(
        self, final: Location, attempt: str, *, overwrite: bool
    ) -> AbstractContextManager[Location]:
        """The directory to write a checkpoint into; commits it at the end of the block.

        If the block raises, nothing is committed.

        Args:
          final: path of the checkpoint; its parent must be prepared.
          attempt: id of this save.
          overwrite: whether to replace an existing checkpoint.

        Raises:
          StepExistsError: if the checkpoint exists, or another writer is writing it.
        """

    def committed_by(self, final: Location) -> str | None:
        """The attempt in the marker of a committed checkpoint; `None` if it is not committed.

        Empty for a checkpoint without a marker, which a rename has committed.
        """

    def discard(self, directory: Location) -> None:
        """Deletes the files of an abandoned save from `directory`, as far as possible."""

    def checkpoints(self, parent: Location) -> list[str]:
        """The names in `parent` that may belong to checkpoints."""

    def take_over(self, parent: Location, name: str | None = None) -> Sequence[Location]:
        """Deletes the saves in `parent` that dead writers left unfinished; returns their paths.

        With `name`, deletes only the unfinished saves of that checkpoint.
        """

    def remove(self, final: Location) -> None:
        """Deletes a checkpoint, its name first; not an error if another process has deleted it."""

    def set_aside(self, final: Location) -> None:
        """Hides a committed checkpoint from every reader, and keeps its files."""

    def remove_aside(self, parent: Location, name: str | None = None) -> None:
        """Deletes the checkpoints in `parent` that were set aside; with `name`, only that one.

        Where a checkpoint is set aside under another name, `name` finds nothing to delete.
        """

    def strays(self, parent: Location, steps: Container[str]) -> Iterator[Stray]:
        """All entries of `parent` except `steps`, the names of the committed steps."""


@dataclasses.dataclass(frozen=True)
class Location(os.PathLike[str]):
    """A path in a store: a file, or a directory with everything below it.

    Attributes:
      store: store of the path.
      key: path within the store, without a leading slash.
    """

    store: Store
    key: str

    def __truediv__(self, name: str) -> Location:
        """The path `name` below this one."""
        return Location(self.store, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        """The path, or the URL."""
        return f"{self.store.url}/{self.key}"

    def __fspath__(self) -> str:
        """The path or URL, for functions that accept any path."""
        return str(self)

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The path without its last component."""
        return Location(self.store, self.key.rpartition("/")[0])

    def exists(self) -> bool:
        """Whether a file exists at the path, or a directory if the store has directories."""
        return self.store.stat(self) is not None

    def is_file(self) -> bool:
        """Whether a file exists at the path."""
        found = self.store.stat(self)
        return found is not None and found.is_file

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of the file from `start` to `stop`; fewer if the file ends before `stop`.

        Raises:
          FileNotFoundError: if the file does not exist.
        """
        return self.store.read(self, start, stop)

    def create(self, data: bytes) -> None:
        """Writes a new file.

        Raises:
          FileExistsError: if the file exists.
        """
        if not self.store.create(self, data):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self))

    def children(self) -> list[str]:
        """The names of the files and directories in this directory, sorted."""
        return self.store.children(self)
