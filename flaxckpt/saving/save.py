"""Saving one checkpoint."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flaxckpt import processes
from flaxckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DirectoryError,
    StepExistsError,
    StoreError,
    UnsupportedFormatError,
)
from flaxckpt.items.encoded import Place
from flaxckpt.items.names import check_names
from flaxckpt.metadata import checkpoint as checkpoint_metadata
from flaxckpt.metadata.checkpoint import CheckpointMetadata
from flaxckpt.options import Options
from flaxckpt.saving import contents
from flaxckpt.saving.job import Job
from flaxckpt.saving.save_dtype import as_saved
from flaxckpt.saving.snapshot import stream_all, take_apart
from flaxckpt.saving.writing import write
from flaxckpt.storage import layout, location
from flaxckpt.storage.location import Location, PathLike, locate


def save(
    path: PathLike,
    tree: Any,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    items: Mapping[str, Any] | None = None,
    options: Options = Options(),
) -> None:
    """Saves `tree` as one checkpoint at `path`, and returns when it is committed.

    In a job of several processes, all of them call it with the same path and tree.

    Args:
      path: a directory that does not exist yet, or is empty; `s3://` and `gs://` URLs, relative
        paths and `~` work.
      tree: any pytree: a TrainState, an nnx module, a dict of arrays, numbers and strings, ...
      overwrite: whether to replace a checkpoint that is there. It lives until the new one is
        committed.
      metadata: anything JSON can hold, for people and tools.
      items: what is saved beside the tree, by name: data iterators, configurations, numpy
        generators, protocol buffers, other trees; see `restore_items`.
      options: how to write.

    Raises:
      StepExistsError: when there is a checkpoint at `path` and `overwrite` is not set.
      UnsupportedLeafError: when a leaf cannot be held; nothing was written then.
      ItemError: when an item cannot be held; nothing was written then.
      DirectoryError: when `path` is a file, holds something else, or may not be written.
      StoreError: when an object store cannot be used.
      ProcessFailedError: when another process of the job failed; nothing is committed then.
      ProcessTimeoutError: when another process of the job did not arrive.

    Example:
      >>> import jax.numpy as jnp
      >>> flaxckpt.save(tmp_path / "exported", {"kernel": jnp.ones((2, 3)), "step": 7})
    """
    final = locate(path, options)
    started = time.time_ns()
    user_metadata = checkpoint_metadata.check_metadata(metadata or {})
    check_names(items or ())
    group = processes.join(options.timeout_secs, functools.partial(location.board, final.parent))
    meeting = group.meet(f"saving {final}")
    with meeting.reporting():
        attempt = meeting.decide(functools.partial(admit, final, overwrite, options))
        described = CheckpointMetadata(attempt, started, 0, {}, user_metadata)
        place = Place(group.index, group.count)
        encoded = contents.encode(items or {}, place)
        state = take_apart(
            as_saved(tree, options.save_dtype), options.chunk_bytes, process=group.process
        )
        of_items, states = contents.take_items_apart(
            encoded, place, options.chunk_bytes, {}, group.process
        )
        pieces = stream_all([state, *states], options.snapshot_bytes, copy=False)
    whole = contents.Tree(layout.ITEM, state.plan)
    job = Job(whole, final, described, overwrite, options, tuple(of_items))
    write(job, pieces, meeting)


def admit(final: Location, overwrite: bool, options: Options) -> str:
    """The id of an attempt to save to `final`, once that is known to be possible."""
    check_vacant(final, overwrite=overwrite)
    location.prepare(final.parent, options)
    location.remove_abandoned(final.parent, options, final.name)
    return layout.new_attempt()


def check_vacant(final: Location, *, overwrite: bool) -> None:
    """Refuses to save over something.

    Raises:
      StepExistsError: when it is a checkpoint and `overwrite` is not set.
      DirectoryError: when it is anything else that flaxckpt did not write.
    """
    try:
        if isinstance(final, Path) and _is_vacant(final):
            return
        if location.committed_by(final) is None:
            return  # the commit finds out whether its writer lives
        checkpoint_metadata.read(final)
    except (CorruptCheckpointError, UnsupportedFormatError):
        pass  # one of ours, though not one that can be read
    except StoreError:
        raise
    except (CheckpointNotFoundError, OSError) as error:
        raise DirectoryError(
            f"{final} exists and is no checkpoint of flaxckpt, so it is not touched. Save "
            "somewhere else, or remove it yourself."
        ) from error
    if not overwrite:
        raise StepExistsError(
            f"there is a checkpoint at {final} already. Pass overwrite=True to replace it."
        )


def _is_vacant(final: Path) -> bool:
    """Whether there is nothing, or an empty directory."""
    return not final.exists() or (final.is_dir() and not any(final.iterdir()))
