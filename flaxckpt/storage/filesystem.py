"""The few things done with local files that Python's own functions do not make durable."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from flaxckpt.errors import DirectoryError


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
