"""What a store of checkpoints can do, and a place in one.

A `Store` is a directory tree or a bucket; all that differs between the two is behind it. To add one
(Azure, say), implement `Store` in a file of its own and name its URLs in `locate.py`.
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
    """What a store has, for those who would do something else without it.

    Attributes:
      atomic_rename: a checkpoint is written elsewhere and gets its name at once, so that one can be
        replaced. Otherwise it is written in place, and a marker makes it visible.
      locks: whether a writer that is gone can be told from one that lives. Otherwise what is not
        committed is taken over by the next writer, and each attempt gives names of its own.
      sizes: whether the sizes of files are known without reading them.
      directories: whether there are directories, even empty ones.
      rewrites: whether a file may be written again at once.
      latency: whether an answer takes so long that many requests are made at a time, and bytes that
        lie between two ranges are rather read than asked around.
    """

    atomic_rename: bool
    locks: bool
    sizes: bool
    directories: bool
    rewrites: bool
    latency: bool


class FileStatus(NamedTuple):
    """What is known of a file without reading it.

    Attributes:
      is_file: whether it is one, or
      is_directory: a directory, and nothing special.
      size: in bytes, and
      seconds: when it was last changed, since 1970; both `None` in a store that does not say.
    """

    is_file: bool
    is_directory: bool
    size: int | None
    seconds: float | None


class Stray(NamedTuple):
    """Something in the directory of a run that is no committed step.

    Attributes:
      name: what it is called.
      unfinished: what is known of a checkpoint that is not committed; empty for what is foreign.
    """

    name: str
    unfinished: str = ""


class NewFiles(Protocol):
    """Files that are being written, and are there when all of them are."""

    def file(self, name: str, size: int) -> AbstractContextManager[WriteAt]:
        """A file of `size` bytes, all of which are written in the block."""


def already_there(path: object) -> StepExistsError:
    """The error for a file that is there."""
    return StepExistsError(f"there is {path} already. Pass overwrite=True to replace it.")


class WriteAt(Protocol):
    """Writes bytes at an offset of a file."""

    def __call__(self, offset: int, data: memoryview, /) -> None:
        """Writes all of `data`."""


class Store(Protocol):
    """Where checkpoints lie."""

    @property
    def url(self) -> str:
        """What comes before the names in it: `s3://bucket`, or nothing for the file system."""

    @property
    def can(self) -> Capabilities:
        """What it has."""

    @property
    def timeout_secs(self) -> float | None:
        """How long the answer to a request is waited for; a file system always answers."""

    def reached(self) -> AbstractContextManager[None]:
        """Explains what goes wrong in a block because the store cannot be used.

        Raises:
          StoreError: in that case.
        """

    def kvstore(self, at: Location, context: ts.Context | None = None) -> ts.KvStore:
        """All files below `at`, to TensorStore; for copies between stores, in one `context`."""

    def context(self, parent: ts.Context | None) -> ts.Context | None:
        """What databases in it are opened with, where the caller would share `parent`."""

    # Files

    def stat(self, at: Location) -> FileStatus | None:
        """What is known of a file; `None` when there is none. Buckets have no directories."""

    def read(self, at: Location, start: int, stop: int | None) -> bytes:
        """The bytes of a file from `start` to `stop`; fewer when it ends before.

        Raises:
          FileNotFoundError: when there is none.
        """

    def read_own(self, at: Location, limit: int) -> bytes:
        """The bytes of a file that flaxckpt wrote: it is no link, and has at most `limit`.

        Raises:
          FileNotFoundError: when there is none.
          OSError: when it is something else, larger, or cannot be read.
        """

    def fill(self, at: Location, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fills `buffers` from `offset` of a file; returns how many bytes the file lacks."""

    def create(self, at: Location, data: bytes) -> bool:
        """Writes a file, unless there is one; returns whether it has `data` now."""

    def create_from(self, at: Location, blocks: Iterable[bytes]) -> None:
        """Writes a new file of `blocks`, one after the other.

        Raises:
          FileExistsError: when there is one.
        """

    def blocks(self, at: Location) -> Iterator[bytes]:
        """The bytes of a file that flaxckpt wrote, of any size.

        Raises:
          FileNotFoundError: when there is none.
        """

    def set_flag(self, at: Location, *, present: bool) -> None:
        """Makes an empty file be there, or not, and stay so."""

    def make_directory(self, at: Location) -> None:
        """Makes a directory and its parents; buckets need none."""

    def sync(self, at: Location) -> None:
        """Waits until the disk has the names of all that is below `at`."""

    def names(self, at: Location) -> list[str]:
        """The names of all files below `at`, relative to it, sorted."""

    def children(self, at: Location) -> list[str]:
        """The names of the files and directories in `at`, sorted."""

    def directories(self, at: Location) -> list[str]:
        """The names of the directories in `at`, sorted; a bucket has no empty ones."""

    def new_files(
        self, final: Location, names: Sequence[str], old: Sequence[str], index: str
    ) -> AbstractContextManager[NewFiles]:
        """Files in the place of `old`; all are there when the block ends, or none.

        Args:
          final: what was asked for; the files lie beside it.
          names: in the order in which they shall appear.
          old: what is there.
          index: of these, what names the others; it goes before they do.

        Raises:
          StepExistsError: when there is a file that is not in `old`.
        """

    # Checkpoints

    def prepare(self, parent: Location) -> None:
        """Makes sure that checkpoints can be written into `parent`.

        Raises:
          DirectoryError: when they cannot.
        """

    def commit(
        self, final: Location, attempt: str, *, overwrite: bool
    ) -> AbstractContextManager[Location]:
        """Where to write a checkpoint; it is `final` when the block ends without an error.

        Args:
          final: where the checkpoint shall be; its parent is prepared.
          attempt: the id of this attempt.
          overwrite: whether a checkpoint that is there may be replaced.

        Raises:
          StepExistsError: when there is one, or another writer is at it.
        """

    def committed_by(self, final: Location) -> str | None:
        """The attempt whose marker makes `final` visible; empty when its name does, else `None`."""

    def discard(self, directory: Location) -> None:
        """Removes what may be left where a checkpoint was to be written that is given up."""

    def checkpoints(self, parent: Location) -> list[str]:
        """The names of all that may be a checkpoint in `parent`."""

    def take_over(self, parent: Location, name: str | None = None) -> Sequence[Location]:
        """Removes what writers that are gone left unfinished in `parent`; returns what it was.

        With `name` only that of the checkpoint of this name.
        """

    def remove(self, final: Location) -> None:
        """Deletes a checkpoint, its name first; that somebody else has is no error."""

    def set_aside(self, final: Location) -> None:
        """Makes a committed checkpoint invisible to every reader, and keeps its files."""

    def remove_aside(self, parent: Location, name: str | None = None) -> None:
        """Deletes the checkpoints in `parent` that were set aside; with `name`, only that one.

        Where a checkpoint is set aside under another name, `name` finds nothing to delete.
        """

    def strays(self, parent: Location, steps: Container[str]) -> Iterator[Stray]:
        """All that is in `parent` beside `steps`, the names of the committed steps."""


@dataclasses.dataclass(frozen=True)
class Location(os.PathLike[str]):
    """A place in a store: a file, or a directory with all that is below it.

    Attributes:
      store: where it is.
      key: the path there, without a slash at the beginning.
    """

    store: Store
    key: str

    def __truediv__(self, name: str) -> Location:
        """What is called `name` below this."""
        return Location(self.store, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        """The path, or the URL."""
        return f"{self.store.url}/{self.key}"

    def __fspath__(self) -> str:
        """The same, for functions that take any path."""
        return str(self)

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """All but the last part."""
        return Location(self.store, self.key.rpartition("/")[0])

    def exists(self) -> bool:
        """Whether there is a file, or a directory where the store has such."""
        return self.store.stat(self) is not None

    def is_file(self) -> bool:
        """Whether there is a file."""
        found = self.store.stat(self)
        return found is not None and found.is_file

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of the file from `start` to `stop`; fewer when it ends before.

        Raises:
          FileNotFoundError: when there is none.
        """
        return self.store.read(self, start, stop)

    def create(self, data: bytes) -> None:
        """Writes a new file.

        Raises:
          FileExistsError: when there is one.
        """
        if not self.store.create(self, data):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self))

    def children(self) -> list[str]:
        """The names of the files and directories in it, sorted."""
        return self.store.children(self)
