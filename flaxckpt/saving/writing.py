"""Writing the files of one checkpoint, by one process or by all of a job.

Each process of several, and one that writes to a bucket, writes the chunks that are its own into
databases of its own, one for each tree. Process 0 waits until all have, merges the databases,
writes the metadata and commits. Merging copies where the values are, and no value.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from flaxckpt.agreement import Meeting
from flaxckpt.metadata import checkpoint as checkpoint_metadata
from flaxckpt.metadata.files import SavedFile
from flaxckpt.progress import Progress
from flaxckpt.saving import parts
from flaxckpt.saving.job import Job
from flaxckpt.saving.parts import Share
from flaxckpt.saving.snapshot import Piece, by_tree
from flaxckpt.saving.tree_writing import TreeWriter, write_files
from flaxckpt.storage import filesystem, layout, location
from flaxckpt.storage.bucket import BucketPath
from flaxckpt.storage.location import Location


class _Written(NamedTuple):
    """The files of a checkpoint so far: of each tree, and of each item beside its tree."""

    trees: list[dict[str, SavedFile]]
    items: Mapping[str, Mapping[str, SavedFile]]


def write(job: Job, pieces: Iterable[Piece], meeting: Meeting) -> None:
    """Writes `pieces`, this process's part of the arrays, and returns when all is committed.

    Raises:
      StepExistsError: when another writer has committed it meanwhile.
      ProcessFailedError: when another process of the job failed; nothing is committed then.
      ProcessTimeoutError: when another process of the job did not arrive.
    """
    is_leader = meeting.group.is_leader
    is_shown = is_leader and job.options.progress
    bar = Progress(f"saving {job.final}", job.total_bytes, is_shown=is_shown)
    with meeting.reporting(), location.reached(job.final), bar:
        counted = bar.counted(pieces, lambda piece: piece.values.nbytes)
        if is_leader:
            _lead(job, counted, meeting)
        else:
            _follow(job, counted, meeting)


def _follow(job: Job, pieces: Iterable[Piece], meeting: Meeting) -> None:
    """What every process but 0 does."""
    directory, index = job.final.parent / meeting.heard("begun"), meeting.group.index
    try:
        share = _write_share(job, pieces, directory, job.writers(directory), index)
        meeting.done(share.to_json())
    except FileNotFoundError:
        meeting.raise_failure()  # process 0 may have cleaned up, and knows why
        raise
    finally:
        # Process 0 has cleaned up, and this process may have written since. What is written in
        # place may have been committed before something failed, and is left alone.
        if isinstance(directory, Path) and directory != job.final and meeting.has_failed():
            shutil.rmtree(directory, ignore_errors=True)


def _lead(job: Job, pieces: Iterable[Piece], meeting: Meeting) -> None:
    """What process 0 does, or one that is alone."""
    attempt = job.described.attempt
    committing = location.committing(job.final, attempt, job.options, overwrite=job.overwrite)
    with committing as directory:
        for name in job.directories:
            location.make_child(directory, name)
        meeting.say("begun", directory.name)
        writers = job.writers(directory)
        if meeting.group.count == 1 and isinstance(directory, Path):
            written = _write_alone(job, pieces, directory, writers)
        else:
            written = _write_together(job, pieces, directory, writers, meeting)
        _write_metadata(job, directory, writers, written)
    meeting.say("outcome", attempt)


def _write_alone(
    job: Job, pieces: Iterable[Piece], directory: Path, writers: list[TreeWriter]
) -> _Written:
    """Writes all arrays, and what each process has for itself."""
    split = zip(writers, by_tree(pieces, len(writers)), strict=True)
    files = [writer.write_alone(mine) for writer, mine in split]
    return _Written(files, _write_own(job, directory))


def _write_together(
    job: Job,
    pieces: Iterable[Piece],
    directory: Location,
    writers: list[TreeWriter],
    meeting: Meeting,
) -> _Written:
    """Writes what is process 0's, waits for the others, and merges the arrays of all."""
    ours = _write_share(job, pieces, directory, writers, 0)
    shares = [ours, *map(Share.from_json, meeting.collect())]
    parts.check_items(shares, meeting.title)
    of_trees = zip(*(share.trees for share in shares), strict=True)
    trees = [
        writer.merge(found, meeting.title) for writer, found in zip(writers, of_trees, strict=True)
    ]
    names = [item.name for item in job.items]
    own = {name: {n: f for s in shares for n, f in s.files[name].items()} for name in names}
    return _Written(trees, own)


def _write_share(
    job: Job, pieces: Iterable[Piece], directory: Location, writers: list[TreeWriter], process: int
) -> Share:
    """Writes all that is `process`'s own."""
    split = zip(writers, by_tree(pieces, len(writers)), strict=True)
    trees = [writer.write_part(mine, process) for writer, mine in split]
    files = _write_own(job, directory)
    return Share(trees, files, {item.name: item.digest for item in job.items})


def _write_own(job: Job, directory: Location) -> dict[str, dict[str, SavedFile]]:
    """Writes the files of each item that every process has for itself."""
    # In a bucket, what a dead process of several still writes must be known for what it is.
    is_unique = isinstance(directory, BucketPath)
    written = {}
    for item in job.items:
        files = item.own(job.described.attempt if is_unique and item.place.count > 1 else "")
        path = directory / item.name
        written[item.name] = write_files(path, files, fsync=job.options.fsync)
        if files and job.options.fsync and isinstance(path, Path):
            filesystem.fsync_directories(path)
    return written


def _write_metadata(
    job: Job, directory: Location, writers: list[TreeWriter], written: _Written
) -> None:
    """Writes all but the arrays and what processes have for themselves, which are `written`."""
    for writer, arrays in zip(writers, written.trees, strict=True):
        writer.write_metadata(arrays, job.past if writer is writers[0] else ())
    records = {}
    for item in job.items:
        files = dict(item.files)
        if job.is_marked and not (item.tree and item.tree.directory == item.name):
            files[layout.COMMIT_SUCCESS] = layout.ITEM_MARKER
        found = write_files(directory / item.name, files, fsync=job.options.fsync)
        records[item.name] = item.record({**found, **written.items[item.name]})
    described = dataclasses.replace(job.described, committed_ns=time.time_ns(), items=records)
    encoded = checkpoint_metadata.encode(described)
    location.write_file(directory / layout.CHECKPOINT_METADATA, encoded, fsync=job.options.fsync)
