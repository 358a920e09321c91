"""Saving one checkpoint, at once or part by part."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
import types
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from flaxckpt import multihost
from flaxckpt.arguments import checked
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
from flaxckpt.metadata.step_metadata import CheckpointMetadata, Ranking
from flaxckpt.multihost import Collective, ProcessGroup
from flaxckpt.options import BUFFER_BYTES, Options
from flaxckpt.saving.contents import PartialTree, WholeTree, plan_items
from flaxckpt.saving.save_plan import PlannedTree, SavePlan, as_saved, plan_tree
from flaxckpt.saving.snapshot import ShardQueue, stream
from flaxckpt.saving.writing import PreparedSave, write
from flaxckpt.store import layout
from flaxckpt.store.key_values import storage_key_values
from flaxckpt.store.locate import locate
from flaxckpt.store.store import Location

if TYPE_CHECKING:
    from etils import epath

# The prelude of every save: its arguments, and what is to be written.


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """The arguments of one save. Metrics may lie on devices, so they are checked when it begins."""

    state: Any
    metrics: Mapping[str, Any] | None = None
    metadata: Mapping[str, Any] | None = None
    items: Mapping[str, Any] | None = None
    overwrite: bool = False

    def checked(self) -> SaveRequest:
        """The same request, with metrics and metadata as they are recorded.

        Raises:
          InvalidMetricError: if a metric is not a number.
          ValueError: if the metadata does not survive a JSON round trip.
          ItemError: if an item has a name that items cannot have.
        """
        metrics = step_metadata.check_metrics(self.metrics or {})
        metadata = step_metadata.check_metadata(self.metadata or {})
        check_names(self.items or ())
        return dataclasses.replace(self, metrics=metrics, metadata=metadata)


def plan_save(
    request: SaveRequest,
    final: Location,
    group: ProcessGroup,
    options: Options,
    attempt: str,
    *,
    ranking: Ranking | None = None,
    rank: ProcessRank | None = None,
    plans: Mapping[str, SavePlan] = types.MappingProxyType({}),
) -> tuple[PreparedSave, list[PlannedTree]]:
    """Plans the save at `final`; returns it and its planned trees in write order.

    A `PartialTree` as state is planned later, part by part.

    Args:
      request: checked.
      final: where the checkpoint is to be.
      group: the processes that save.
      options: how to write.
      attempt: the id of this save.
      ranking: how the run ranks its steps.
      rank: of this process, if it is not its rank in `group`.
      plans: of the previous save, by directory, to be used where they fit.

    Raises:
      UnsupportedLeafError: if a leaf cannot be serialized.
      ItemError: if an item cannot be serialized.
    """
    described = CheckpointMetadata(
        attempt, time.time_ns(), 0, request.metrics or {}, request.metadata or {}, ranking=ranking
    )
    rank = rank or ProcessRank(group.index, group.count)
    chunk_bytes, process = options.chunk_bytes, group.process
    items, trees = plan_items(request.items or {}, rank, chunk_bytes, plans, process)
    state = request.state
    if not isinstance(state, PartialTree):
        kept = as_saved(state, options.save_dtype)
        trees.append(plan_tree(kept, chunk_bytes, plans.get(layout.ITEM), process))
        state = WholeTree(layout.ITEM, trees[-1].plan)
    prepared = PreparedSave(state, final, described, request.overwrite, options, tuple(items))
    return prepared, trees


# Saving one checkpoint.


@checked(options=Options)
def save(
    path: epath.PathLike,
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
    request = SaveRequest(tree, None, metadata, items, overwrite).checked()
    final = locate(path, options)
    collective = _collective(final, f"saving {final}", options)
    with collective.sharing_errors():
        attempt = collective.broadcast(functools.partial(admit, final, overwrite, options))
        prepared, trees = plan_save(request, final, collective.group, options, attempt)
    # Lazy: each shard comes to the host when `write` takes it.
    shards = stream(*trees, limit=options.snapshot_bytes, copy=False)
    write(prepared, shards, collective)


def _collective(final: Location, title: str, options: Options) -> Collective:
    """What the processes of the job do together for a checkpoint outside of a run."""
    key_values = functools.partial(storage_key_values, final.parent)
    return multihost.process_group(options.timeout_secs, key_values).collective(title)


def admit(final: Location, overwrite: bool, options: Options) -> str:
    """The id of an attempt to save to `final`, once that is known to be possible."""
    check_vacant(final, overwrite=overwrite)
    final.store.prepare(final.parent)
    final.store.take_over(final.parent, final.name)
    return layout.new_attempt()


def check_vacant(final: Location, *, overwrite: bool) -> None:
    """Refuses to save over something.

    Raises:
      StepExistsError: when it is a checkpoint and `overwrite` is not set.
      DirectoryError: when it is anything else that flaxckpt did not write.
    """
    try:
        if final.store.committed_by(final) is None:
            return  # the commit finds out whether its writer lives
        step_metadata.read(final)
    except (CorruptCheckpointError, UnsupportedFormatError):
        pass  # one of ours, though not one that can be read
    except StoreError:
        raise
    except (CheckpointNotFoundError, OSError) as error:
        if isinstance(error, CheckpointNotFoundError) and _is_vacant(final):
            return
        raise DirectoryError(
            f"{final} exists but is not a flaxckpt checkpoint, so it was left alone. Save "
            "elsewhere, or remove it first."
        ) from error
    if not overwrite:
        raise StepExistsError(
            f"a checkpoint already exists at {final}. Pass overwrite=True to replace it."
        )


def _is_vacant(final: Location) -> bool:
    """Whether there is nothing, or an empty directory."""
    found = final.store.stat(final)
    return found is None or (found.is_directory and not final.children())


# Saving one checkpoint in several calls.


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

    @checked(options=Options)
    def __init__(
        self,
        path: epath.PathLike,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        items: Mapping[str, Any] | None = None,
        options: Options = Options(),
    ):
        """Describes the checkpoint; nothing is written before the `with` block.

        Args:
          path: directory of the checkpoint, as for `flaxckpt.save`.
          overwrite: whether to replace an existing checkpoint.
          metadata: JSON data for people and tools.
          items: objects to save beside the tree, as for `flaxckpt.save`; they are saved as they
            are when the block is entered.
          options: how to write.

        Raises:
          ItemError: if an item has a name that items cannot have.
        """
        self._tree = PartialTree()
        self._request = SaveRequest(self._tree, None, metadata, items, overwrite).checked()
        self._final, self._options = locate(path, options), options
        self._limit = options.snapshot_bytes or BUFFER_BYTES
        self._queue = ShardQueue(self._limit)
        self._written: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> Self:
        """Begins to write, with the items.

        Raises:
          StepExistsError: if there is a checkpoint at the path and `overwrite` is not set.
          ItemError: if an item cannot be serialized; nothing is written.
          DirectoryError: if the path is a file, holds something else, or is not writable.
        """
        final, options, request = self._final, self._options, self._request
        self._collective = _collective(final, f"saving {final} in parts", options)
        group, admitted = self._collective.group, (final, request.overwrite, options)
        with self._collective.sharing_errors():
            attempt = self._collective.broadcast(functools.partial(admit, *admitted))
            prepared, of_items = plan_save(request, final, group, options, attempt)
        self._number = len(of_items)
        pool = concurrent.futures.ThreadPoolExecutor(1, "flaxckpt-save")
        self._written = pool.submit(self._write, prepared)
        pool.shutdown(wait=False)
        try:
            went_on = self._queue.put_all(stream(*of_items, limit=self._limit, copy=True))
        except BaseException:
            concurrent.futures.wait([self._written])  # it cleans up
            raise
        if not went_on:
            self._raise_closed()
        return self

    def _write(self, prepared: PreparedSave) -> None:
        """Writes what comes, and commits it at the end."""
        try:
            write(prepared, self._queue, self._collective)
        finally:
            self._queue.stop()

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
        kept, process = as_saved(part, self._options.save_dtype), self._collective.group.process
        taken = plan_tree(kept, self._options.chunk_bytes, process=process)
        self._tree.parts = self._tree.parts.with_part(taken.plan)
        shards = stream(taken, limit=self._limit, copy=True, first=self._number)
        if not self._queue.put_all(shards):
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
            self._queue.end()
            self._written.result()
            return
        empty = ManagerError(
            f"no part of {self._final} was added, so nothing is saved. Add one in the with block."
        )
        self._queue.fail(error or empty)
        concurrent.futures.wait([self._written])
        if error is None:
            raise empty
