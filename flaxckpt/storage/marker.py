"""How a checkpoint becomes visible where a directory cannot be renamed atomically: by a marker.

Buckets that are mounted as a file system copy every object when a directory is renamed. There a
checkpoint is written under its own name, and counts only once its marker, written last, is there:

1. A claim with the attempt's id is created in the directory; only one writer can. Whoever finds a
   claim but no marker sees a step that is being written, or whose writer is gone: not a step.
2. The files are written, and made durable.
3. The writer looks whether the claim is still its own (the rubbish of a writer that was silent for
   too long may have been removed, and the step been claimed anew), and creates the marker with the
   attempt's id, which fails if there is one. From here on the step is committed.
4. Readers compare the ids in the marker, in the metadata and in the key-value store, so that the
   files of two attempts are never taken for one checkpoint.
5. Deleting begins with the marker, and ends with the claim.

A checkpoint cannot be replaced in this way: there would be a time without either.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from flaxckpt.errors import StepExistsError
from flaxckpt.storage import filesystem, layout

_CLAIM = re.compile(r"([0-9a-f]{12}) ([A-Za-z0-9._-]+)")


@contextlib.contextmanager
def commit_by_marker(final: Path, attempt: str, *, overwrite: bool, fsync: bool) -> Iterator[Path]:
    """As `commit.commit_by_rename`, but `final` is written in place.

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
        with filesystem.lock(final.parent, shared=True):
            final.mkdir(exist_ok=True)
            _create(final / layout.CLAIM, f"{attempt} {layout.host_name()}", fsync=fsync)
            stack.enter_context(filesystem.lock(final, shared=True))
        try:
            yield final
            _publish(final, attempt, fsync=fsync)
        except BaseException:
            if _claimant(final)[0] == attempt and not is_committed(final):
                remove(final)
            raise


def _publish(final: Path, attempt: str, *, fsync: bool) -> None:
    """Creates the marker, when the claim is still that of `attempt`."""
    if fsync:
        filesystem.fsync_directories(final)
    if _claimant(final)[0] != attempt:
        raise StepExistsError(
            f"{final} was claimed by another writer while it was written. That save is intact, and "
            "this one is lost. Stop one of the two jobs: only one may write a run."
        )
    _create(final / layout.COMMIT_SUCCESS, attempt, fsync=fsync)
    if fsync:
        filesystem.fsync_path(final)
        filesystem.fsync_path(final.parent)


def _create(path: Path, content: str, *, fsync: bool) -> None:
    """Creates a file that must not exist."""
    try:
        filesystem.write_file(path, content.encode(), fsync=fsync)
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


def remove(path: Path) -> None:
    """Deletes a checkpoint: its marker first, and its claim last.

    Without its claim, what is left of it would look like a checkpoint that was renamed into place.
    """
    (path / layout.COMMIT_SUCCESS).unlink(missing_ok=True)
    for entry in path.iterdir():
        if entry.is_dir():
            filesystem.remove_tree(entry)
        elif entry.name != layout.CLAIM:
            entry.unlink()
    filesystem.remove_tree(path)


def unfinished(path: Path) -> tuple[str, str] | None:
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
