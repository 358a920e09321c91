"""Saving one checkpoint, at once or part by part."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flaxckpt import multihost
from flaxckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DirectoryError,
    ManagerError,
    StepExistsError,
    StoreError,
    UnsupportedFormatError,
)
from flaxckpt.items.item import ProcessRank, check_names
from flaxckpt.metadata import step_metadata
from flaxckpt.metadata.step_metadata import CheckpointMetadata
from flaxckpt.options import BUFFER_BYTES, Options
from flaxckpt.saving import contents
from flaxckpt.saving.save_plan import PartialPlan, SavePlan
from flaxckpt.saving.snapshot import ShardQueue, as_saved, stream, stream_all, take_apart
from flaxckpt.saving.writing import PreparedSave, write
from flaxckpt.store import layout, store
from flaxckpt.store.store import Location, PathLike, locate

# Saving one checkpoint.


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """The arguments of one save. They are checked when it begins, as some lie on devices."""

    state: Any
    metrics: Mapping[str, Any] | None = None
    metadata: Mapping[str, Any] | None = None
    items: Mapping[str, Any] | None = None
    overwrite: bool = False


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
      ProcessTimeoutError: if another process of the job did not arrive.

    Example:
      >>> import jax.numpy as jnp
      >>> flaxckpt.save(tmp_path / "exported", {"kernel": jnp.ones((2, 3)), "step": 7})
    """
    final = locate(path, options)
    started = time.time_ns()
    user_metadata = step_metadata.check_metadata(metadata or {})
    check_names(items or ())
    group = multihost.process_group(
        options.timeout_secs, functools.partial(store.key_values, final.parent)
    )
    collective = group.collective(f"saving {final}")
    with collective.sharing_errors():
        attempt = collective.broadcast(functools.partial(admit, final, overwrite, options))
        described = CheckpointMetadata(attempt, started, 0, {}, user_metadata)
        rank = ProcessRank(group.index, group.count)
        encoded = contents.encode(items or {}, rank)
        state = take_apart(
            as_saved(tree, options.save_dtype), options.chunk_bytes, process=group.process
        )
        of_items, states = contents.take_items_apart(
            encoded, rank, options.chunk_bytes, {}, group.process
        )
        pieces = stream_all([state, *states], options.snapshot_bytes, copy=False)
    whole = contents.WholeTree(layout.ITEM, state.plan)
    job = PreparedSave(whole, final, described, overwrite, options, tuple(of_items))
    write(job, pieces, collective)


def admit(final: Location, overwrite: bool, options: Options) -> str:
    """The id of an attempt to save to `final`, once that is known to be possible."""
    check_vacant(final, overwrite=overwrite)
    store.prepare(final.parent, options)
    store.remove_abandoned(final.parent, options, final.name)
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
        if store.committed_by(final) is None:
            return  # the commit finds out whether its writer lives
        step_metadata.read(final)
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


# Saving one checkpoint in several calls.


class PartialTree:
    """A `WrittenTree` of which more becomes known while it is written."""

    directory = layout.ITEM

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.parts = PartialPlan()

    @functools.cached_property
    def plan(self) -> SavePlan:
        """The plan of all parts; only asked for when there are no more."""
        return self.parts.merged()

    @property
    def orbax_files(self) -> dict[str, bytes]:
        """The files beside `_METADATA` that only Orbax reads."""
        return self.plan.orbax_files


class PartialSave:
    """Saves one checkpoint in several calls, for a tree that is never whole in memory.

    It is there when the block ends; when the block raises, it never was. In a job of several
    processes, all of them make the same calls in the same order.

    Example:
      >>> import jax.numpy as jnp
      >>> with flaxckpt.PartialSave(tmp_path / "converted") as parts:
      ...     parts.add({"params": {"encoder": jnp.ones(3)}})
      ...     parts.add({"params": {"decoder": jnp.zeros(3)}, "step": 7})
      >>> sorted(flaxckpt.restore(tmp_path / "converted")["params"])
      ['decoder', 'encoder']
    """

    def __init__(
        self,
        path: PathLike,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        options: Options = Options(),
    ):
        """What is to be saved to `path`, within a `with` block.

        Args:
          path: as for `flaxckpt.save`, and so are the others.
          overwrite: whether to replace a checkpoint that is there.
          metadata: anything JSON can hold, for people and tools.
          options: how to write.
        """
        self._final, self._options, self._overwrite = locate(path, options), options, overwrite
        self._metadata = step_metadata.check_metadata(metadata or {})
        self._tree, self._limit = PartialTree(), options.snapshot_bytes or BUFFER_BYTES
        self._feed = ShardQueue(self._limit)
        self._written: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> Self:
        """Begins to write.

        Raises:
          StepExistsError: when there is a checkpoint at the path and `overwrite` is not set.
          DirectoryError: when it is a file, holds something else, or may not be written.
        """
        final, options, overwrite = self._final, self._options, self._overwrite
        key_values = functools.partial(store.key_values, final.parent)
        self._group = multihost.process_group(options.timeout_secs, key_values)
        self._collective = self._group.collective(f"saving {final} in parts")
        with self._collective.sharing_errors():
            attempt = self._collective.broadcast(
                functools.partial(admit, final, overwrite, options)
            )
        described = CheckpointMetadata(attempt, time.time_ns(), 0, {}, self._metadata)
        job = PreparedSave(self._tree, final, described, overwrite, options)
        pool = concurrent.futures.ThreadPoolExecutor(1, "flaxckpt-save")
        self._written = pool.submit(self._write, job)
        pool.shutdown(wait=False)
        return self

    def _write(self, job: PreparedSave) -> None:
        """Writes what comes, and commits it at the end."""
        try:
            write(job, self._feed, self._collective)
        finally:
            self._feed.stop()

    def add(self, part: Any) -> None:
        """Writes a part of the tree; when this returns, it may be donated, deleted or changed.

        Args:
          part: dicts within dicts, down to where it is the only part that has something there.

        Raises:
          UnsupportedKeyError: when another part has a leaf of it already; nothing of it was
            written then, and the next may be added.
          UnsupportedLeafError: when a leaf cannot be held; likewise.
          ManagerError: outside of the `with` block.
        """
        if self._written is None or self._written.done():
            self._raise_closed()
        kept = as_saved(part, self._options.save_dtype)
        state = take_apart(kept, self._options.chunk_bytes, process=self._group.process)
        self._tree.parts = self._tree.parts.with_part(state.plan)
        if not self._feed.put_all(stream(state, self._limit, copy=True)):
            self._raise_closed()

    def _raise_closed(self) -> None:
        """Raises why nothing can be added: what went wrong while writing, or that it is over."""
        if self._written is not None:
            self._written.result()
        raise ManagerError(f"parts of {self._final} are added within a with block. Open one.")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Commits, or raises what `flaxckpt.save` would; when the block raised, removes it all."""
        assert self._written is not None, "it was entered"
        if error is None and self._tree.parts.plans:
            self._feed.end()
            self._written.result()
            return
        empty = ManagerError(
            f"no part of {self._final} was added, so nothing is saved. Add one in the with block."
        )
        self._feed.fail(error or empty)
        concurrent.futures.wait([self._written])
        if error is None:
            raise empty
