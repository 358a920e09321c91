"""A store in a directory: commit by rename, or by a marker."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from flaxckpt.errors import DirectoryError, StepExistsError
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

BLOCK_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class LocalStore:
    """The file system of this machine; a `Store`, whose methods say what these do.

    Attributes:
      fsync: whether to wait for the disk.
      can_rename: whether a directory is renamed atomically and without copying it.
    """

    fsync: bool
    can_rename: bool

    url = ""
    timeout_secs = None

    @property
    def can(self) -> Capabilities:
        """See `Store`, as for all that follows."""
        return Capabilities(
            atomic_rename=self.can_rename,
            locks=True,
            sizes=True,
            directories=True,
            rewrites=True,
            latency=False,
            orbax_marker=False,
        )

    def reached(self) -> AbstractContextManager[None]:
        """A file system can always be reached."""
        return contextlib.nullcontext()

    def kvstore(self, at: Location, context: ts.Context | None = None) -> ts.KvStore:
        """The driver `file`."""
        import tensorstore as ts  # `flaxckpt ls` does without it, and numpy

        spec = {"driver": "file", "path": f"{at}/", "file_io_sync": self.fsync}
        return ts.KvStore.open(spec, context=context).result()

    def context(self, parent: ts.Context | None) -> ts.Context | None:
        """That of the caller will do."""
        return parent

    # Files

    def stat(self, at: Location) -> FileStatus | None:
        """What a link leads to counts."""
        try:
            found = os.stat(at)
        except (FileNotFoundError, NotADirectoryError):
            return None
        mode = found.st_mode
        is_file, is_directory = stat.S_ISREG(mode), stat.S_ISDIR(mode)
        return FileStatus(is_file, is_directory, found.st_size, found.st_mtime)

    def read(self, at: Location, start: int, stop: int | None) -> bytes:
        """From a file, or what a link leads to."""
        with open(at, "rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def read_own(self, at: Location, limit: int) -> bytes:
        """See `Store`."""
        return read_file(Path(at), limit)

    def fill(self, at: Location, offset: int, buffers: Sequence[memoryview]) -> int:
        """Opened each time: there may be more files than a process may have open."""
        fd = os.open(at, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _fill(fd, offset, list(buffers))
        finally:
            os.close(fd)

    def create(self, at: Location, data: bytes) -> bool:
        """Waits until the disk has its bytes; for its name see `sync`."""
        try:
            write_file(Path(at), data, fsync=self.fsync)
        except FileExistsError:
            return False
        return True

    def create_from(self, at: Location, blocks: Iterable[bytes]) -> None:
        """One block is in memory at a time."""
        with open(at, "xb") as file:
            for block in blocks:
                file.write(block)
            if self.fsync:
                file.flush()
                os.fsync(file.fileno())

    def blocks(self, at: Location) -> Iterator[bytes]:
        """A checkpoint has no links, and what one leads to is none of it."""
        with open(os.open(at, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    def set_flag(self, at: Location, *, present: bool) -> None:
        """See `Store`."""
        path = Path(at)
        if present:
            path.touch()
        else:
            path.unlink(missing_ok=True)
        if self.fsync:
            fsync_path(path.parent)

    def make_directory(self, at: Location) -> None:
        """See `Store`."""
        os.makedirs(at, exist_ok=True)

    def sync(self, at: Location) -> None:
        """See `Store`."""
        if self.fsync:
            fsync_directories(Path(at))

    def names(self, at: Location) -> list[str]:
        """See `Store`."""
        root = Path(at)
        found = (path for path in root.rglob("*") if not path.is_dir())
        return sorted(str(path.relative_to(root)) for path in found)

    def children(self, at: Location) -> list[str]:
        """See `Store`."""
        try:
            return sorted(os.listdir(at))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def directories(self, at: Location) -> list[str]:
        """See `Store`."""
        return [name for name in self.children(at) if os.path.isdir(at / name)]

    @contextlib.contextmanager
    def new_files(
        self, final: Location, names: Sequence[str], old: Sequence[str], index: str
    ) -> Iterator[NewFiles]:
        """Written in a temporary directory, which a later writer removes should this one die."""
        directory = Path(final.parent)
        temporary = directory / layout.temporary_name(final.name, layout.new_attempt())
        with _claim(temporary), contextlib.ExitStack() as stack:
            stack.callback(remove_tree, temporary)
            yield _FilesInDirectory(temporary, self.fsync)
            _publish_files(temporary, directory, names, old, index)
            if self.fsync:
                fsync_path(directory)

    # Checkpoints

    def prepare(self, parent: Location) -> None:
        """Makes the directory."""
        make_directory(Path(parent), fsync=self.fsync)
        check_writable(Path(parent))

    @contextlib.contextmanager
    def commit(self, final: Location, attempt: str, *, overwrite: bool) -> Iterator[Location]:
        """By rename where that is atomic, or else by a marker."""
        way = commit_by_rename if self.can_rename else commit_by_marker
        with way(Path(final), attempt, overwrite=overwrite, fsync=self.fsync) as directory:
            yield final.parent / directory.name

    def committed_by(self, final: Location) -> str | None:
        """A directory that was renamed into place needs no marker."""
        path = Path(final)
        return (marked(path) or "") if is_committed(path) else None

    def discard(self, directory: Location) -> None:
        """The next writer removes what cannot be removed now."""
        shutil.rmtree(directory, ignore_errors=True)

    def checkpoints(self, parent: Location) -> list[str]:
        """All names: only a look into each would tell more."""
        return self.children(parent)

    def take_over(self, parent: Location, name: str | None = None) -> Sequence[Location]:
        """See `Store`."""
        # Looking into every step for a claim is only needed where steps are written in place.
        look = name is not None or not self.can_rename
        return [parent / path.name for path in remove_abandoned(Path(parent), name, claims=look)]

    def remove(self, final: Location) -> None:
        """See `Store`."""
        remove(Path(final), fsync=self.fsync)

    def set_aside(self, final: Location) -> None:
        """By rename where that is atomic, or else by a file beside its claim."""
        path = Path(final)
        if self.can_rename:
            with lock(path.parent, shared=True):
                os.rename(path, path.with_name(layout.aside_name(path.name, layout.new_attempt())))
        else:
            # What has this file is nothing that a dead writer left, so only a commit removes it.
            (path / layout.ASIDE).touch()
            if not (path / layout.CLAIM).exists():
                write_file(path / layout.CLAIM, b"aside", fsync=self.fsync)
            (path / layout.COMMIT_SUCCESS).unlink(missing_ok=True)
            if self.fsync:
                fsync_path(path)
        if self.fsync:
            fsync_path(path.parent)

    def remove_aside(self, parent: Location, name: str | None = None) -> None:
        """See `Store`."""
        for child in self.children(parent) if name is None else [name]:
            if layout.is_aside(child):
                remove_tree(Path(parent / child))
            elif not self.can_rename and _is_aside(Path(parent / child)):
                remove_marked(Path(parent / child))

    def strays(self, parent: Location, steps: Container[str]) -> Iterator[Stray]:
        """See `Store`."""
        with os.scandir(parent) as entries:
            for entry in entries:
                if entry.name in steps or entry.name == layout.CLAIMS:
                    continue
                path = Path(entry.path)
                if layout.is_aside(entry.name) or _is_aside(path):
                    yield Stray(entry.name, "set aside by a rollback")
                    continue
                unfinished = layout.parse_temporary(entry.name)
                if unfinished is None and entry.is_dir(follow_symlinks=False):
                    unfinished = unfinished_marked(path)
                yield Stray(entry.name, "" if unfinished is None else _writer(path, unfinished[1]))


def _is_aside(path: Path) -> bool:
    return (path / layout.ASIDE).exists() and not is_committed(path)


def _writer(path: Path, host: str) -> str:
    """Who writes an unfinished checkpoint, as far as that can be seen from here."""
    if host != layout.host_name():
        return f"possibly being written by {host}"
    try:
        return "being written" if is_locked(path) else "its writer is gone"
    except OSError:
        return "already gone, or unreadable"


def _fill(fd: int, offset: int, buffers: list[memoryview]) -> int:
    """Fills `buffers` from `offset` of a file; returns how many bytes the file lacks."""
    while any(map(len, buffers)):
        count = os.preadv(fd, buffers, offset)
        if not count:
            break
        offset += count
        # A system call reads at most 2 GiB, and may read less.
        while count:
            taken = min(count, len(buffers[0]))
            buffers[0] = buffers[0][taken:]
            count -= taken
            if not buffers[0]:
                buffers.pop(0)
    return sum(map(len, buffers))


class _FilesInDirectory:
    """New files in a directory; `NewFiles`."""

    def __init__(self, path: Path, fsync: bool):
        self._path, self._fsync = path, fsync

    @contextlib.contextmanager
    def file(self, name: str, size: int) -> Iterator[WriteAt]:
        """See `NewFiles`."""
        del size
        with open(self._path / name, "xb", buffering=0) as file:

            def write(offset: int, data: memoryview) -> None:
                while data:  # a system call writes at most 2 GiB, and may write less
                    count = os.pwrite(file.fileno(), data, offset)
                    data, offset = data[count:], offset + count

            yield write
            if self._fsync:
                os.fsync(file.fileno())


def _publish_files(
    temporary: Path, directory: Path, names: Sequence[str], old: Sequence[str], index: str
) -> None:
    """Moves the files to their place, and removes what was there instead of them."""
    if len(names) > 1 and index in old:
        # Files of two exports may have the same names: the old index must not name new ones.
        (directory / index).unlink()
    with contextlib.ExitStack() as undo:
        for name in names:
            if name in old:
                os.replace(temporary / name, directory / name)
            else:
                _move(temporary / name, directory / name)
                undo.callback((directory / name).unlink)
        undo.pop_all()
    for name in set(old) - set(names):
        (directory / name).unlink(missing_ok=True)


def _move(source: Path, target: Path) -> None:
    """Renames a file to a name that nobody else may have taken meanwhile."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise already_there(target) from None
    except OSError:  # there are file systems without links
        os.rename(source, target)


# The few things done with local files that Python's own functions do not make durable.


def local_path(path: str | os.PathLike[str]) -> Path:
    """`path` as an absolute path of this machine; `~` and relative paths work.

    Raises:
      DirectoryError: for a URL.
    """
    if "://" in os.fspath(path):
        raise DirectoryError(
            f"{os.fspath(path)} is neither on a local or mounted file system nor in a bucket "
            "(s3://, gs://). Mount it, or save somewhere else."
        )
    return Path(os.path.abspath(Path(path).expanduser()))


def make_directory(path: Path, *, fsync: bool) -> None:
    """Creates `path` and its parents, each durable in its own parent.

    Raises:
      DirectoryError: when a part of it is a file, or may not be created.
    """
    missing = [p for p in (path, *path.parents) if not p.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DirectoryError(
            f"cannot create the directory {path}: {error}. Choose another one, or change what is "
            "in its way."
        ) from None
    if fsync:
        for created in missing:
            fsync_path(created.parent)


def check_writable(path: Path) -> None:
    """Finds out now, not at the first save, whether the directory `path` can be written.

    Raises:
      DirectoryError: when it cannot.
    """
    if not os.access(path, os.W_OK | os.X_OK):
        raise DirectoryError(
            f"the directory {path} may not be written by this user. Change its permissions or "
            "choose another one."
        )


def read_file(path: Path, limit: int) -> bytes:
    """The bytes of a file, which is no link to one and has at most `limit` bytes.

    Raises:
      FileNotFoundError: when there is none.
      OSError: when it is something else, larger, or cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except NotADirectoryError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no file", str(path))
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
        return file.read(status.st_size)


def write_file(path: Path, data: bytes, *, fsync: bool) -> None:
    """Writes a new file, and waits until the disk has its bytes."""
    with open(path, "xb") as file:
        file.write(data)
        if fsync:
            file.flush()
            os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Waits until the disk has a file's bytes, or a directory's entries."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_directories(root: Path) -> None:
    """Waits until the disk has the entries of `root` and of every directory below it."""
    for directory, _, _ in os.walk(root, topdown=False):
        fsync_path(Path(directory))


def remove_tree(path: Path) -> None:
    """Deletes a directory and everything in it; that it is gone already is no error."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


@contextlib.contextmanager
def lock(directory: Path, *, shared: bool) -> Iterator[None]:
    """Holds a lock on `directory`, against other processes of this machine, during the block.

    The kernel releases the lock of a process that dies, however it dies. On a file system without
    locks nothing is held.
    """
    fd = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def is_locked(directory: Path) -> bool:
    """Whether somebody of this machine holds a lock on `directory`, or may for all we know."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


# How a checkpoint becomes visible where a directory cannot be renamed atomically: by a marker.
#
# Buckets that are mounted as a file system copy every object when a directory is renamed. There a
# checkpoint is written under its own name, and counts only once its marker, written last, is there:
#
# 1. A claim with the attempt's id is created in the directory; only one writer can. Whoever finds a
#    claim but no marker sees a step that is being written, or whose writer is gone: not a step.
# 2. The files are written, and made durable.
# 3. The writer looks whether the claim is still its own (the leftovers of a writer that was silent
#    for too long may have been removed, and the step claimed again), and creates the marker with
#    the attempt's id, which fails if there is one. From here on the step is committed.
# 4. Readers compare the ids in the marker, in the metadata and in the key-value store, so that the
#    files of two attempts are never taken for one checkpoint.
# 5. Deleting begins with the marker, and ends with the claim.
#
# A checkpoint cannot be replaced in this way: there would be a time without either.


_CLAIM = re.compile(r"([0-9a-f]{12}) ([A-Za-z0-9._-]+)")


@contextlib.contextmanager
def commit_by_marker(final: Path, attempt: str, *, overwrite: bool, fsync: bool) -> Iterator[Path]:
    """As `commit_by_rename`, but `final` is written in place.

    Raises:
      StepExistsError: when `final` is committed, or claimed by another writer.
    """
    if final.exists() and any(final.iterdir()):
        advice = "; without an atomic rename it cannot be replaced safely" if overwrite else ""
        raise StepExistsError(
            f"{final} exists already, or is being written by another writer{advice}. Delete it "
            "first, or save another step."
        )
    with contextlib.ExitStack() as stack:
        with lock(final.parent, shared=True):
            final.mkdir(exist_ok=True)
            _create(final / layout.CLAIM, f"{attempt} {layout.host_name()}", fsync=fsync)
            stack.enter_context(lock(final, shared=True))
        try:
            yield final
            _publish(final, attempt, fsync=fsync)
        except BaseException:
            if _claimant(final)[0] == attempt and not is_committed(final):
                remove_marked(final)
            raise


def _publish(final: Path, attempt: str, *, fsync: bool) -> None:
    """Creates the marker, when the claim is still that of `attempt`."""
    if fsync:
        fsync_directories(final)
    if _claimant(final)[0] != attempt:
        raise StepExistsError(
            f"{final} was claimed by another writer while it was written. That save is intact, and "
            "this one is lost. Stop one of the two jobs: only one may write a run."
        )
    _create(final / layout.COMMIT_SUCCESS, attempt, fsync=fsync)
    if fsync:
        fsync_path(final)
        fsync_path(final.parent)


def _create(path: Path, content: str, *, fsync: bool) -> None:
    """Creates a file that must not exist."""
    try:
        write_file(path, content.encode(), fsync=fsync)
    except FileExistsError:
        raise StepExistsError(
            f"{path.parent} exists already, or is being written by another writer. Delete it "
            "first, or save another step."
        ) from None


def _claimant(path: Path) -> tuple[str, str]:
    """The attempt and the host that claimed the checkpoint at `path`; empty when nobody did."""
    found = _CLAIM.fullmatch(_read(path / layout.CLAIM) or "")
    return (found[1], found[2]) if found else ("", "")


def is_committed(path: Path) -> bool:
    """Whether the checkpoint at `path` is visible: without a claim it is, by its name.

    The marker must be that of the claim: a crash may have left it empty.
    """
    if not (path / layout.CLAIM).exists():
        return True
    attempt = _claimant(path)[0]
    return bool(attempt) and marked(path) == attempt


def marked(path: Path) -> str | None:
    """What the marker says; `None` when there is none."""
    return _read(path / layout.COMMIT_SUCCESS)


def remove_marked(path: Path) -> None:
    """Deletes a checkpoint: its marker first, and its claim last.

    Without its claim, what is left of it would look like a checkpoint that was renamed into place.
    """
    (path / layout.COMMIT_SUCCESS).unlink(missing_ok=True)
    for entry in path.iterdir():
        if entry.is_dir():
            remove_tree(entry)
        elif entry.name != layout.CLAIM:
            entry.unlink()
    remove_tree(path)


def unfinished_marked(path: Path) -> tuple[str, str] | None:
    """The name and the host of a checkpoint that was claimed and is not committed, or `None`.

    Nothing counts as one that could be somebody else's: there must be a claim as we write it, and
    beside it only what a checkpoint has. A claim that a crash has left empty must be all there is,
    and counts as one of this host: its lock decides.
    """
    if is_committed(path):
        return None
    entries = list(path.iterdir())
    items = {entry.name for entry in entries if entry.is_dir() and layout.may_be_item(entry.name)}
    names = {entry.name for entry in entries}
    host = _claimant(path)[1]
    if not names <= layout.CHECKPOINT_ENTRIES | items or (not host and names != {layout.CLAIM}):
        return None
    return (path.name, host or layout.host_name())


def _read(path: Path) -> str | None:
    """The beginning of a text file; `None` when there is no such file."""
    if not path.is_file() or path.is_symlink():
        return None
    with open(path, "rb") as file:
        return file.read(1024).decode(errors="replace")


# How a checkpoint becomes visible: all of it, or none.
#
# A checkpoint is written under a temporary name that no reader lists, and takes its own name by one
# rename. Window by window, for a crash of the process or of the machine:
#
# 1. While files are written. There is only a temporary directory. Its writer held a lock that the
#    kernel released with the process, so the next writer of the run knows it for rubbish and
#    removes it. What was committed before is untouched.
# 2. After the files are written, before the rename. Every file was fsynced as it was written, then
#    every directory, bottom up; so whatever the rename makes visible is on disk. (Renaming first
#    is the classic mistake: file systems may persist the new name before the bytes, and a power
#    cut then leaves a checkpoint of empty files.)
# 3. The rename. It is atomic, and it fails if the name is taken by a directory that is not empty:
#    of two writers of one step one wins, whole, and the other gets `StepExistsError`.
# 4. Between the rename and the fsync of the parent directory. A crash of the process loses nothing.
#    A power cut may undo the rename, but then `save` had not returned. (If that fsync fails, the
#    save raises, although the step may be there: it is not known to be durable.)
# 5. Replacing (`overwrite=True`). The new directory and the old one exchange their names in one
#    system call, so that at every moment one of them, whole, has the name. The old one, which has
#    the temporary name now, is removed once the exchange is on disk. Where the kernel has no such
#    call, the old one steps aside first, and comes back if the new one cannot take its place: only
#    there, a crash between the two renames leaves the old checkpoint under its temporary name.
# 6. Deleting. A step first loses its name by a rename, then its files: a half-deleted step is never
#    listed.
#
# Where directories cannot be renamed atomically, `commit_by_marker` does the same by other means.


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
                fsync_directories(temporary)
            _make_visible(temporary, final, overwrite=overwrite)
        except BaseException:
            # Another process of the job may still be writing there; the next opening removes it.
            with contextlib.suppress(OSError):
                remove_tree(temporary)
            raise
        if fsync:
            fsync_path(final.parent)
        # What was replaced has that name now. It goes only when the exchange is known to be on
        # disk: until then a power cut may give it its old name again.
        remove_tree(temporary)


@contextlib.contextmanager
def _claim(temporary: Path) -> Iterator[None]:
    """Creates `temporary` and marks it as in use."""
    # `remove_abandoned` locks the parent, so it never sees the directory before it is marked.
    with contextlib.ExitStack() as stack:
        with lock(temporary.parent, shared=True):
            temporary.mkdir()
            stack.enter_context(lock(temporary, shared=True))
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
        remove_marked(path)
        return
    temporary = path.with_name(layout.temporary_name(path.name, layout.new_attempt()))
    with lock(path.parent, shared=True):
        try:
            os.rename(path, temporary)
        except FileNotFoundError:
            return
    if fsync:
        fsync_path(path.parent)
    remove_tree(temporary)


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
                unfinished = unfinished_marked(directory / entry.name)
            if unfinished is not None and name in (None, unfinished[0]):
                found.append((directory / entry.name, unfinished[1]))
    if not found:
        return []
    with lock(directory, shared=False):
        removed = [path for path, host in found if _is_abandoned(path, host)]
        if removed:
            # One may be a checkpoint whose replacement is not known to be on disk yet.
            fsync_path(directory)
        for path in removed:
            remove_marked(path)
    return removed


def _is_abandoned(path: Path, host: str) -> bool:
    """Whether the writer of an unfinished checkpoint is gone."""
    try:
        if host == layout.host_name():
            return not is_locked(path)
        return time.time() - path.stat().st_mtime > ABANDONED_SECS
    except FileNotFoundError:
        return False
