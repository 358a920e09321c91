"""Writing the files of one checkpoint, by one process or by all of a job.

Each process of several, and one that writes to a bucket, writes the chunks that are its own into a
database of its own. Process 0 waits until all have, merges the databases into one, writes the
metadata and commits. Merging copies where the values are, and no value.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import crc32c
import tensorstore as ts

from flaxckpt import parts
from flaxckpt.agreement import Meeting
from flaxckpt.metadata import checkpoint as checkpoint_metadata
from flaxckpt.metadata import sealed_json
from flaxckpt.metadata.checkpoint import CheckpointMetadata
from flaxckpt.metadata.tree import SavedFile, with_files
from flaxckpt.options import Options
from flaxckpt.parts import Part
from flaxckpt.save_plan import SavePlan
from flaxckpt.snapshot import Piece
from flaxckpt.storage import filesystem, layout, location, tensorstore_io
from flaxckpt.storage.location import Location


@dataclasses.dataclass(frozen=True)
class Job:
    """One checkpoint to write: what, where, and what is known of it."""

    plan: SavePlan
    final: Location
    described: CheckpointMetadata
    overwrite: bool
    options: Options


def write(job: Job, pieces: Iterable[Piece], meeting: Meeting) -> None:
    """Writes `pieces`, this process's part of the arrays, and returns when all is committed.

    Raises:
      StepExistsError: when another writer has committed it meanwhile.
      ProcessFailedError: when another process of the job failed; nothing is committed then.
      ProcessTimeoutError: when another process of the job did not arrive.
    """
    with meeting.reporting(), location.reached(job.final):
        if meeting.group.is_leader:
            _lead(job, pieces, meeting)
        else:
            _follow(job, pieces, meeting)


def _follow(job: Job, pieces: Iterable[Piece], meeting: Meeting) -> None:
    """What every process but 0 does."""
    directory, index = job.final.parent / meeting.heard("begun"), meeting.group.index
    try:
        part = _write_part(job, pieces, directory / layout.ITEM, index, ts.Context())
        meeting.done(part.to_json())
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
        item = location.make_child(directory, layout.ITEM)
        meeting.say("begun", directory.name)
        if meeting.group.count == 1 and isinstance(item, Path):
            files = _write_alone(job, pieces, item)
        else:
            files = _write_together(job, pieces, item, meeting)
        _write_metadata(job, directory, files)
    meeting.say("outcome", attempt)


def _write_alone(job: Job, pieces: Iterable[Piece], item: Location) -> dict[str, SavedFile]:
    """Writes all arrays; returns the files that they are in."""
    store = tensorstore_io.create_store(item, ts.Context(), fsync=job.options.fsync)
    values = (*job.plan.array_metadata, (layout.ATTEMPT_KEY, job.described.attempt.encode()))
    _write_all(job, store, _chained(pieces, values))
    return _files(item)


def _write_all(job: Job, store: ts.KvStore, items: Iterable[tuple[str, bytes]]) -> None:
    """Writes `items` to `store`."""
    timeout_secs = location.timeout_of(job.final)
    tensorstore_io.write_all(store, items, job.options.buffer_bytes, timeout_secs)


def _chained(
    pieces: Iterable[Piece], small: Iterable[tuple[str, bytes]]
) -> Iterator[tuple[str, bytes]]:
    """All keys and values of the key-value store, the small ones last."""
    for piece in pieces:
        yield from piece.encode()
    yield from small


def _write_together(
    job: Job, pieces: Iterable[Piece], item: Location, meeting: Meeting
) -> dict[str, SavedFile]:
    """Writes the arrays of process 0 and merges those of all; returns the files they are in."""
    context, attempt = ts.Context(), job.described.attempt
    ours = _write_part(job, pieces, item, 0, context)
    found = [ours, *map(Part.from_json, meeting.collect())]
    parts.check_equal(found, meeting.title)
    store = tensorstore_io.create_store(item, context, fsync=job.options.fsync)
    children = [
        tensorstore_io.open_store(item / _child(i, attempt), context)
        for i, part in enumerate(found)
        if part.is_written
    ]
    values = (*job.plan.array_metadata, (layout.ATTEMPT_KEY, attempt.encode()))
    tensorstore_io.merge(store, children, values, location.timeout_of(item))
    written = {name: SavedFile(size, None) for part in found for name, size in part.files.items()}
    return written | {n: f for n, f in _files(item).items() if not n.startswith(layout.CHILD)}


def _write_part(
    job: Job, pieces: Iterable[Piece], item: Location, process: int, context: ts.Context
) -> Part:
    """Writes what is `process`'s own of the arrays."""
    fsync, name = job.options.fsync, _child(process, job.described.attempt)
    local: dict[str, str] = {}
    values = parts.own(pieces, local, is_leader=process == 0)
    if (first := next(values, None)) is None:
        return Part(parts.digest(job.plan), local, {}, is_written=False)
    child = location.make_child(item, name)
    numbered = not isinstance(child, Path)
    store = tensorstore_io.create_store(child, context, fsync=fsync, numbered=numbered)
    _write_all(job, store, itertools.chain([first], values))
    if fsync and isinstance(child, Path):
        filesystem.fsync_directories(child)
    files = {f"{name}/{file}": found.size for file, found in _files(child).items()}
    return Part(parts.digest(job.plan), local, files, is_written=True)


def _child(process: int, attempt: str) -> str:
    """The directory of the database of one process."""
    return f"{layout.CHILD}{process}-{attempt}"


def _write_metadata(job: Job, directory: Location, files: dict[str, SavedFile]) -> None:
    """Writes all but the arrays, which are in `files`."""
    fsync, plan, item = job.options.fsync, job.plan, directory / layout.ITEM
    is_renamed = location.is_replaceable(job.final, job.options)
    for name, data in _files_for_orbax(plan, is_renamed).items():
        if "/" in name and isinstance(item, Path):
            (item / name).parent.mkdir()
        location.write_file(item / name, data, fsync=fsync)
        files[name] = SavedFile(len(data), crc32c.crc32c(data))
    ours = with_files(plan.structure, job.described.attempt, files)
    tree: dict[str, Any] = plan.orbax_members | {"flaxckpt": ours}
    location.write_file(item / layout.TREE_METADATA, sealed_json.seal(tree), fsync=fsync)
    described = dataclasses.replace(job.described, committed_ns=time.time_ns())
    encoded = checkpoint_metadata.encode(described)
    location.write_file(directory / layout.CHECKPOINT_METADATA, encoded, fsync=fsync)


def _files(item: Location) -> dict[str, SavedFile]:
    """The files of a key-value store, whose contents carry checksums of their own.

    Of those in a bucket the sizes are not known, and the index has all that is needed of them.
    """
    if not isinstance(item, Path):
        return {}
    files = (path for path in sorted(item.rglob("*")) if path.is_file())
    return {str(path.relative_to(item)): SavedFile(path.stat().st_size, None) for path in files}


def _files_for_orbax(plan: SavePlan, is_renamed: bool) -> dict[str, bytes]:
    """The files beside `_METADATA` that only Orbax reads."""
    # Where it cannot rely on a rename, Orbax wants a marker in the item too.
    files = {} if is_renamed else {layout.COMMIT_SUCCESS: layout.ITEM_MARKER}
    return files | plan.orbax_files
