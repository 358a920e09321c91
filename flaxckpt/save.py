"""Saving one checkpoint."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import crc32c
from etils import epath

from flaxckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DirectoryError,
    StepExistsError,
    UnsupportedFormatError,
)
from flaxckpt.metadata import checkpoint as checkpoint_metadata
from flaxckpt.metadata import sealed_json
from flaxckpt.metadata.checkpoint import CheckpointMetadata
from flaxckpt.metadata.tree import SavedFile, with_files
from flaxckpt.options import Options
from flaxckpt.save_plan import SavePlan
from flaxckpt.snapshot import Piece, stream, take_apart
from flaxckpt.storage import filesystem, layout, tensorstore_io
from flaxckpt.storage.commit import Commit, commit_by_rename, remove_abandoned
from flaxckpt.storage.marker import commit_by_marker, is_committed


def save(
    path: epath.PathLike,
    tree: Any,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    options: Options = Options(),
) -> None:
    """Saves `tree` as one checkpoint at `path`, and returns when it is committed.

    Args:
      path: a directory that does not exist yet, or is empty. Relative paths and `~` work.
      tree: any pytree: a TrainState, an nnx module, a dict of arrays, numbers and strings, ...
      overwrite: whether to replace a checkpoint that is there. It lives until the new one is
        committed.
      metadata: anything JSON can hold, for people and tools.
      options: how to write.

    Raises:
      StepExistsError: when there is a checkpoint at `path` and `overwrite` is not set.
      UnsupportedLeafError: when a leaf cannot be held; nothing was written then.
      DirectoryError: when `path` is a file, holds something else, or may not be written.

    Example:
      >>> import jax.numpy as jnp
      >>> flaxckpt.save(tmp_path / "exported", {"kernel": jnp.ones((2, 3)), "step": 7})
    """
    final = filesystem.local_path(path)
    started = time.time_ns()
    user_metadata = checkpoint_metadata.check_metadata(metadata or {})
    check_vacant(final, overwrite=overwrite)
    state = take_apart(tree, options.chunk_bytes)
    filesystem.make_directory(final.parent, fsync=options.fsync)
    filesystem.check_writable(final.parent)
    remove_abandoned(final.parent, final.name)
    described = CheckpointMetadata(layout.new_attempt(), started, 0, {}, user_metadata)
    pieces = stream(state, options.snapshot_bytes, copy=False)
    write(state.plan, pieces, final, described, overwrite=overwrite, options=options)


def check_vacant(final: Path, *, overwrite: bool) -> None:
    """Refuses to save over something.

    Raises:
      StepExistsError: when it is a checkpoint and `overwrite` is not set.
      DirectoryError: when it is anything else that flaxckpt did not write.
    """
    try:
        if not final.exists() or (final.is_dir() and not any(final.iterdir())):
            return
        if not is_committed(final):
            return  # the commit finds out whether its writer lives
        checkpoint_metadata.read(final)
    except (CorruptCheckpointError, UnsupportedFormatError):
        pass  # one of ours, though not one that can be read
    except (CheckpointNotFoundError, OSError) as error:
        raise DirectoryError(
            f"{final} exists and is no checkpoint of flaxckpt, so it is not touched. Save "
            "somewhere else, or remove it yourself."
        ) from error
    if not overwrite:
        raise StepExistsError(
            f"there is a checkpoint at {final} already. Pass overwrite=True to replace it."
        )


def write(
    plan: SavePlan,
    pieces: Iterable[Piece],
    final: Path,
    described: CheckpointMetadata,
    *,
    overwrite: bool,
    options: Options,
) -> None:
    """Writes `pieces`, the arrays of `plan`, to `final` and commits them."""
    fsync, attempt = options.fsync, described.attempt
    commit: Commit = commit_by_rename if options.atomic_rename else commit_by_marker
    with commit(final, attempt, overwrite=overwrite, fsync=fsync) as directory:
        item = directory / layout.ITEM
        item.mkdir()
        store = tensorstore_io.create_store(item, fsync=fsync)
        tensorstore_io.write_all(store, _values(plan, pieces, attempt), options.buffer_bytes)
        files = _sizes(item)
        for name, data in _files_for_orbax(plan, options.atomic_rename).items():
            if "/" in name:
                (item / name).parent.mkdir()
            filesystem.write_file(item / name, data, fsync=fsync)
            files[name] = SavedFile(len(data), crc32c.crc32c(data))
        ours = with_files(plan.structure, attempt, files)
        tree: dict[str, Any] = plan.orbax_members | {"flaxckpt": ours}
        filesystem.write_file(item / layout.TREE_METADATA, sealed_json.seal(tree), fsync=fsync)
        described = dataclasses.replace(described, committed_ns=time.time_ns())
        filesystem.write_file(
            directory / layout.CHECKPOINT_METADATA,
            checkpoint_metadata.encode(described),
            fsync=fsync,
        )


def _values(plan: SavePlan, pieces: Iterable[Piece], attempt: str) -> Iterator[tuple[str, bytes]]:
    """All keys and values of the key-value store, the small ones last."""
    for piece in pieces:
        yield from piece.encode()
    yield from plan.array_metadata
    yield layout.ATTEMPT_KEY, attempt.encode()


def _sizes(item: Path) -> dict[str, SavedFile]:
    """The files of the key-value store. Their contents carry checksums of their own."""
    files = (path for path in sorted(item.rglob("*")) if path.is_file())
    return {str(path.relative_to(item)): SavedFile(path.stat().st_size, None) for path in files}


def _files_for_orbax(plan: SavePlan, atomic_rename: bool) -> dict[str, bytes]:
    """The files beside `_METADATA` that only Orbax reads."""
    # Where it cannot rely on a rename, Orbax wants a marker in the item too.
    files = {} if atomic_rename else {layout.COMMIT_SUCCESS: b"the marker is that of the step"}
    return files | plan.orbax_files
