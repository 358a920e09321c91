"""How a checkpoint becomes visible: all of it, or none.

A checkpoint is written under a temporary name that no reader lists, and takes its own name by one
rename. Window by window, for a crash of the process or of the machine:

1. While files are written. There is only a temporary directory. Its writer held a lock that the
   kernel released with the process, so the next writer of the run knows it for rubbish and
   removes it. What was committed before is untouched.
2. After the files are written, before the rename. Every file was fsynced as it was written, then
   every directory, bottom up; so whatever the rename makes visible is on disk. (Renaming first
   is the classic mistake: file systems may persist the new name before the bytes, and a power
   cut then leaves a checkpoint of empty files.)
3. The rename. It is atomic, and it fails if the name is taken by a directory that is not empty:
   of two writers of one step one wins, whole, and the other gets `StepExistsError`.
4. Between the rename and the fsync of the parent directory. A crash of the process loses nothing.
   A power cut may undo the rename, but then `save` had not returned. (If that fsync fails, the
   save raises, although the step may be there: it is not known to be durable.)
5. Replacing (`overwrite=True`). The new directory and the old one exchange their names in one
   system call, so that at every moment one of them, whole, has the name. The old one, which has
   the temporary name now, is removed once the exchange is on disk. Where the kernel has no such
   call, the old one steps aside first, and comes back if the new one cannot take its place: only
   there, a crash between the two renames leaves the old checkpoint under its temporary name.
6. Deleting. A step first loses its name by a rename, then its files: a half-deleted step is never
   listed.

Where directories cannot be renamed atomically, `marker` does the same by other means.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

from flaxckpt.errors import StepExistsError
from flaxckpt.storage import filesystem, layout, marker

# After this, a temporary directory of another machine, whose locks cannot be seen, is rubbish.
ABANDONED_SECS = 24 * 3600.0

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def commit_by_rename(final: Path, attempt: str, *, overwrite: bool, fsync: bool) -> Iterator[Path]:
    """A directory to write a checkpoint into; it becomes `final` when the block ends.

    When the block raises, `final` is as it was and the directory is gone.

    Args:
      final: where the checkpoint shall be; its parent exists.
      attempt: the id of this attempt.
      overwrite: whether a checkpoint that is there may be replaced.
      fsync: whether to wait for the disk.

    Raises:
      StepExistsError: when `final` exists and `overwrite` is not set.
    """
    temporary = final.with_name(layout.temporary_name(final.name, attempt))
    with _claim(temporary):
        try:
            yield temporary
            if fsync:
                filesystem.fsync_directories(temporary)
            _make_visible(temporary, final, overwrite=overwrite)
        except BaseException:
            # Another process of the job may still be writing there; the next opening removes it.
            with contextlib.suppress(OSError):
                filesystem.remove_tree(temporary)
            raise
        if fsync:
            filesystem.fsync_path(final.parent)
        # What was replaced has that name now. It goes only when the exchange is known to be on
        # disk: until then a power cut may give it its old name again.
        filesystem.remove_tree(temporary)


@contextlib.contextmanager
def _claim(temporary: Path) -> Iterator[None]:
    """Creates `temporary` and marks it as in use."""
    # `remove_abandoned` locks the parent, so it never sees the directory before it is marked.
    with contextlib.ExitStack() as stack:
        with filesystem.lock(temporary.parent, shared=True):
            temporary.mkdir()
            stack.enter_context(filesystem.lock(temporary, shared=True))
        yield


def _make_visible(temporary: Path, final: Path, *, overwrite: bool) -> None:
    """Gives `temporary` the name `final`; what had it before gets the name `temporary`."""
    try:
        os.rename(temporary, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not overwrite:
            raise StepExistsError(
                f"{final} was committed by another writer while this save was under way. That "
                "save is intact, and this one is lost. Stop one of the two jobs: only one may "
                "write a run."
            ) from None
        _exchange(temporary, final)


def _exchange(a: Path, b: Path) -> None:
    """Exchanges the names of two directories."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        arguments = (_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
        if renameat2(*arguments) == 0:
            return
        if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(a), None, str(b))
    aside = b.with_name(layout.temporary_name(b.name, layout.new_attempt()))
    os.rename(b, aside)
    try:
        os.rename(a, b)
    except OSError:
        os.rename(aside, b)
        raise
    os.rename(aside, a)


def remove(path: Path, *, fsync: bool) -> None:
    """Deletes the checkpoint at `path`: first its name, then its files.

    That somebody else has deleted it is no error.
    """
    if (path / layout.CLAIM).exists():
        marker.remove(path)
        return
    temporary = path.with_name(layout.temporary_name(path.name, layout.new_attempt()))
    with filesystem.lock(path.parent, shared=True):
        try:
            os.rename(path, temporary)
        except FileNotFoundError:
            return
    if fsync:
        filesystem.fsync_path(path.parent)
    filesystem.remove_tree(temporary)


def remove_abandoned(
    directory: Path, name: str | None = None, *, claims: bool = True
) -> list[Path]:
    """Removes what writers that are gone left unfinished; returns what was removed.

    Args:
      directory: where it lies.
      name: only that of the checkpoint of this name.
      claims: whether also that which only its claim tells from a checkpoint. It takes a look into
        each; without, it is one listing however many checkpoints there are.
    """
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                continue
            unfinished = layout.parse_temporary(entry.name)
            if unfinished is None and claims and name in (None, entry.name):
                unfinished = marker.unfinished(directory / entry.name)
            if unfinished is not None and name in (None, unfinished[0]):
                found.append((directory / entry.name, unfinished[1]))
    if not found:
        return []
    with filesystem.lock(directory, shared=False):
        removed = [path for path, host in found if _is_abandoned(path, host)]
        if removed:
            # One may be a checkpoint whose replacement is not known to be on disk yet.
            filesystem.fsync_path(directory)
        for path in removed:
            marker.remove(path)
    return removed


def _is_abandoned(path: Path, host: str) -> bool:
    """Whether the writer of an unfinished checkpoint is gone."""
    try:
        if host == layout.host_name():
            return not filesystem.is_locked(path)
        return time.time() - path.stat().st_mtime > ABANDONED_SECS
    except FileNotFoundError:
        return False
