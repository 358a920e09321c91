"""Where checkpoints lie: in a directory, or in a bucket. What differs between the two is here."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from flaxckpt import options as options_module
from flaxckpt.options import Options
from flaxckpt.store import bucket, layout, local
from flaxckpt.store.bucket import BucketPath, open_bucket
from flaxckpt.store.key_values import StorageKeyValueStore

if TYPE_CHECKING:
    import tensorstore as ts


Location = Path | BucketPath
PathLike = str | os.PathLike[str] | BucketPath


def locate(path: PathLike, options: Options) -> Location:
    """What `path` names: a URL (`s3://`, `gs://`), or a path of this machine.

    Raises:
      DirectoryError: when the URL is of another kind, or incomplete.
    """
    if isinstance(path, BucketPath):
        return path
    text = os.fspath(path)
    for scheme in ("gs:/", "s3:/"):  # pathlib and epath make one slash of two
        if text.startswith(scheme) and not text.startswith(f"{scheme}/"):
            text = f"{scheme}/{text[len(scheme) :]}"
    if options_module.is_url(text):
        timeout_secs = min(options.timeout_secs, options.storage.timeout_secs)
        return open_bucket(text, options.storage, timeout_secs)
    return local.local_path(text)


def kvstore(
    location: Location, context: ts.Context | None = None, *, fsync: bool = True
) -> ts.KvStore:
    """All files below `location`, to TensorStore.

    Args:
      location: a directory.
      context: what copies within it need to share; a bucket has its own.
      fsync: whether what is written waits for the disk.
    """
    if isinstance(location, BucketPath):
        return location.kvstore()
    import tensorstore as ts  # `flaxckpt ls` does without it, and numpy

    spec = {"driver": "file", "path": f"{location}/", "file_io_sync": fsync}
    return ts.KvStore.open(spec, context=context).result()


def reached(location: Location) -> AbstractContextManager[None]:
    """Explains what goes wrong in a block because a bucket cannot be used."""
    return location.bucket.reached() if isinstance(location, BucketPath) else nullcontext()


def timeout_of(location: Location) -> float | None:
    """How long the answer to a request is waited for, in seconds; a file system always answers."""
    return location.bucket.timeout_secs if isinstance(location, BucketPath) else None


def committing(
    final: Location, attempt: str, options: Options, *, overwrite: bool
) -> AbstractContextManager[Location]:
    """A directory to write a checkpoint into; it is `final` when the block ends without an error.

    Args:
      final: where the checkpoint shall be; its parent exists.
      attempt: the id of this attempt.
      options: how to write.
      overwrite: whether a checkpoint that is there may be replaced.

    Raises:
      StepExistsError: when there is one, or another writer is at it.
    """
    if isinstance(final, BucketPath):
        return bucket.commit_by_claim(final, attempt, overwrite=overwrite)
    way = local.commit_by_rename if options.atomic_rename else local.commit_by_marker
    return way(final, attempt, overwrite=overwrite, fsync=options.fsync)


def is_replaceable(final: Location, options: Options) -> bool:
    """Whether a checkpoint at `final` can be replaced at once."""
    return options.atomic_rename and not isinstance(final, BucketPath)


def prepare(parent: Location, options: Options) -> None:
    """Makes sure that checkpoints can be written into `parent`.

    Raises:
      DirectoryError: when they cannot.
    """
    if isinstance(parent, BucketPath):
        bucket.check_conditions(parent)
        return
    local.make_directory(parent, fsync=options.fsync)
    local.check_writable(parent)


def remove_abandoned(
    parent: Location, options: Options, name: str | None = None
) -> Sequence[Location]:
    """Removes what writers that are gone left unfinished in `parent`; returns what was removed.

    Args:
      parent: where it lies.
      options: how checkpoints are written there.
      name: only that of the checkpoint of this name.
    """
    if isinstance(parent, BucketPath):
        return bucket.take_over(parent, name)
    # Looking into every step for a claim is only needed where steps are written in place.
    look = name is not None or not options.atomic_rename
    return local.remove_abandoned(parent, name, claims=look)


def remove(final: Location, *, fsync: bool) -> None:
    """Deletes a checkpoint, its name first."""
    if isinstance(final, BucketPath):
        bucket.remove(final)
    else:
        local.remove(final, fsync=fsync)


def committed_by(final: Location) -> str | None:
    """The attempt whose marker makes `final` visible; empty when its name does, `None` if nothing.

    A directory that was renamed into place needs no marker.
    """
    if isinstance(final, BucketPath):
        return bucket.committed_by(final)
    return (local.marked(final) or "") if local.is_committed(final) else None


def listed(parent: Location) -> list[str]:
    """The names of all that may be a checkpoint in `parent`."""
    if isinstance(parent, BucketPath):
        return bucket.claimed(parent)
    try:
        return [path.name for path in parent.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def files(location: Location) -> list[str]:
    """The names of all files below `location`, relative to it."""
    if isinstance(location, BucketPath):
        return location.names()
    found = (path for path in location.rglob("*") if not path.is_dir())
    return sorted(str(path.relative_to(location)) for path in found)


def make_child(parent: Location, name: str) -> Location:
    """A new directory in `parent`; buckets have none."""
    child = parent / name
    if isinstance(child, Path):
        child.mkdir(parents=True)
    return child


def read_file(path: Location, limit: int) -> bytes:
    """The bytes of a file of at most `limit` bytes.

    Raises:
      FileNotFoundError: when there is none.
      StoreError: when a bucket cannot be read.
      OSError: when it is no file, or larger.
    """
    if isinstance(path, Path):
        return local.read_file(path, limit)
    if (found := path.read()) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if len(found) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return found


def write_file(path: Location, data: bytes, *, fsync: bool) -> None:
    """Writes a new file.

    Raises:
      FileExistsError: when there is one.
    """
    if isinstance(path, Path):
        local.write_file(path, data, fsync=fsync)
    elif not path.create(data):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def key_values(parent: Location, name: str) -> StorageKeyValueStore:
    """The key-value store called `name`, for a job without a coordination service."""
    directory = layout.temporary_name(layout.KEY_VALUES, name[:12], layout.ALL_HOSTS)
    return StorageKeyValueStore(kvstore(parent / directory))


def set_flag(path: Location, value: bool, *, fsync: bool) -> None:
    """Makes an empty file be there, or not."""
    if isinstance(path, BucketPath):
        if value:
            path.create(b"")
        else:
            path.delete()
        return
    if value:
        path.touch()
    else:
        path.unlink(missing_ok=True)
    if fsync:
        local.fsync_path(path.parent)
