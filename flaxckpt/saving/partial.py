"""Saving one checkpoint in several calls."""

from __future__ import annotations

import concurrent.futures
import functools
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from flaxckpt import processes
from flaxckpt.errors import ManagerError
from flaxckpt.metadata import checkpoint as checkpoint_metadata
from flaxckpt.metadata.checkpoint import CheckpointMetadata
from flaxckpt.options import BUFFER_BYTES, Options
from flaxckpt.saving.feed import Feed
from flaxckpt.saving.job import Job
from flaxckpt.saving.merged_plan import Parts
from flaxckpt.saving.plan import SavePlan
from flaxckpt.saving.save import admit
from flaxckpt.saving.save_dtype import as_saved
from flaxckpt.saving.snapshot import stream, take_apart
from flaxckpt.saving.writing import write
from flaxckpt.storage import layout, location
from flaxckpt.storage.location import PathLike, locate


class _TreeInParts:
    """A `WrittenTree` of which more becomes known while it is written."""

    directory = layout.ITEM

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.parts = Parts()

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
        self._metadata = checkpoint_metadata.check_metadata(metadata or {})
        self._tree, self._limit = _TreeInParts(), options.snapshot_bytes or BUFFER_BYTES
        self._feed = Feed(self._limit)
        self._written: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> Self:
        """Begins to write.

        Raises:
          StepExistsError: when there is a checkpoint at the path and `overwrite` is not set.
          DirectoryError: when it is a file, holds something else, or may not be written.
        """
        final, options, overwrite = self._final, self._options, self._overwrite
        board = functools.partial(location.board, final.parent)
        self._group = processes.join(options.timeout_secs, board)
        self._meeting = self._group.meet(f"saving {final} in parts")
        with self._meeting.reporting():
            attempt = self._meeting.decide(functools.partial(admit, final, overwrite, options))
        described = CheckpointMetadata(attempt, time.time_ns(), 0, {}, self._metadata)
        job = Job(self._tree, final, described, overwrite, options)
        pool = concurrent.futures.ThreadPoolExecutor(1, "flaxckpt-save")
        self._written = pool.submit(self._write, job)
        pool.shutdown(wait=False)
        return self

    def _write(self, job: Job) -> None:
        """Writes what comes, and commits it at the end."""
        try:
            write(job, self._feed, self._meeting)
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
