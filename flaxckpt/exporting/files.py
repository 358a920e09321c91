"""How exported files become visible: all of them, or none.

On a disk they are written into a temporary directory next to their place, which the next export
removes should this one be killed, and renamed when all of them are durable, the index last. A
bucket has no renames: the objects are written in that order, each at once.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from flaxckpt.errors import DirectoryError, StepExistsError
from flaxckpt.formats import files as foreign_files
from flaxckpt.formats.safetensors import INDEX_SUFFIX, SUFFIX
from flaxckpt.options import Options
from flaxckpt.storage import commit, filesystem, layout, location
from flaxckpt.storage.bucket import BucketPath
from flaxckpt.storage.location import Location

# Writes bytes at an offset of a file.
Write = Callable[[int, memoryview], None]


class Files(Protocol):
    """Where exported files go."""

    def file(self, name: str, size: int) -> AbstractContextManager[Write]:
        """A file of `size` bytes, all of which are written in the block."""


def writing(
    final: Location, names: Sequence[str], options: Options, *, overwrite: bool
) -> AbstractContextManager[Files]:
    """Where to write files next to `final`; they are there when the block ends without an error.

    Args:
      final: the file that was asked for.
      names: of the files, in the order in which they shall appear.
      options: whether to wait for the disk.
      overwrite: whether what is there, of any number of files, is replaced.

    Raises:
      StepExistsError: when there is something and `overwrite` is not set.
      DirectoryError: when there is a directory, or the parent cannot be written.
    """
    if isinstance(final, Path):
        if final.is_dir():
            raise DirectoryError(f"{final} is a directory. Export to a file in it, or next to it.")
        location.prepare(final.parent, options)
        commit.remove_abandoned(final.parent, final.name, claims=False)
    old = _existing(final)
    if old and not overwrite:
        raise _exists(final.parent / old[0])
    if isinstance(final, BucketPath):
        return _to_bucket(final, names, old)
    return _to_directory(final, names, old, options)


def index_of(final: Location) -> str:
    """The name of the index of the files that are there instead of `final`."""
    return final.name.removesuffix(SUFFIX) + INDEX_SUFFIX


def _existing(final: Location) -> list[str]:
    """The names of the files of an earlier export to `final`: the index first."""
    stem = final.name.removesuffix(SUFFIX)
    ours = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(SUFFIX)}")
    names = foreign_files.children(final.parent)
    return [n for n in names if n == index_of(final)] + [n for n in names if ours.fullmatch(n)]


def _exists(path: Location) -> StepExistsError:
    """The error for a file that is there."""
    return StepExistsError(f"there is {path} already. Pass overwrite=True to replace it.")


@contextlib.contextmanager
def _to_directory(
    final: Path, names: Sequence[str], old: Sequence[str], options: Options
) -> Iterator[Files]:
    """As `writing`, for the files `names` in the place of `old`."""
    temporary = final.with_name(layout.temporary_name(final.name, layout.new_attempt()))
    with contextlib.ExitStack() as stack:
        # As in `commit`: `remove_abandoned` sees it only once it is locked.
        with filesystem.lock(final.parent, shared=True):
            temporary.mkdir()
            stack.callback(filesystem.remove_tree, temporary)
            stack.enter_context(filesystem.lock(temporary, shared=True))
        yield _Directory(temporary, options.fsync)
        _publish(temporary, final, names, old)
        if options.fsync:
            filesystem.fsync_path(final.parent)


class _Directory:
    """Files in a directory."""

    def __init__(self, path: Path, fsync: bool):
        self._path, self._fsync = path, fsync

    @contextlib.contextmanager
    def file(self, name: str, size: int) -> Iterator[Write]:
        """A new file."""
        del size
        with open(self._path / name, "xb", buffering=0) as file:

            def write(offset: int, data: memoryview) -> None:
                while data:  # a system call writes at most 2 GiB, and may write less
                    count = os.pwrite(file.fileno(), data, offset)
                    data, offset = data[count:], offset + count

            yield write
            if self._fsync:
                os.fsync(file.fileno())


def _publish(temporary: Path, final: Path, names: Sequence[str], old: Sequence[str]) -> None:
    """Moves the files to their place, and removes what was there instead of them."""
    if len(names) > 1 and index_of(final) in old:
        # Files of two exports may have the same names: the old index must not name new ones.
        (final.parent / index_of(final)).unlink()
    with contextlib.ExitStack() as undo:
        for name in names:
            if name in old:
                os.replace(temporary / name, final.parent / name)
            else:
                _move(temporary / name, final.parent / name)
                undo.callback((final.parent / name).unlink)
        undo.pop_all()
    for name in set(old) - set(names):
        (final.parent / name).unlink(missing_ok=True)


def _move(source: Path, target: Path) -> None:
    """Renames a file to a name that nobody else may have taken meanwhile."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise _exists(target) from None
    except OSError:  # there are file systems without links
        os.rename(source, target)


@contextlib.contextmanager
def _to_bucket(final: BucketPath, names: Sequence[str], old: Sequence[str]) -> Iterator[Files]:
    """As `writing`, for the objects `names` in the place of `old`."""
    if len(names) > 1 and index_of(final) in old:
        (final.parent / index_of(final)).delete()
    with contextlib.ExitStack() as undo:
        yield _Objects(final.parent, old, undo)
        undo.pop_all()
    for name in set(old) - set(names):
        (final.parent / name).delete()


class _Objects:
    """Objects next to each other, which `undo` removes."""

    def __init__(self, parent: BucketPath, old: Sequence[str], undo: contextlib.ExitStack):
        self._parent, self._old, self._undo = parent, old, undo

    @contextlib.contextmanager
    def file(self, name: str, size: int) -> Iterator[Write]:
        """An object, which is in memory until all of it is there."""
        memory = io.BytesIO()
        memory.truncate(size)

        def write(offset: int, data: memoryview) -> None:
            memory.seek(offset)
            memory.write(data)

        yield write
        path = self._parent / name
        if name in self._old:
            path.write(memory.getvalue())
        elif not path.create(memory.getvalue()):
            raise _exists(path)
        self._undo.callback(path.delete)
