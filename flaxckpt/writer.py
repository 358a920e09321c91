"""Writing the steps of a run: snapshot on the caller's thread, the rest in the background."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from flaxckpt.background import Background
from flaxckpt.errors import DirectoryError, InvalidMetricError, StepPinnedError
from flaxckpt.feed import Feed
from flaxckpt.metadata import checkpoint as checkpoint_metadata
from flaxckpt.metadata.checkpoint import CheckpointMetadata
from flaxckpt.options import Options
from flaxckpt.retention import Keep, Mode
from flaxckpt.run import Run
from flaxckpt.save import check_vacant, write
from flaxckpt.save_plan import SavePlan
from flaxckpt.snapshot import Piece, State, hold, stream, take_apart
from flaxckpt.storage import layout

logger = logging.getLogger("flaxckpt")


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which steps of a run are kept, and what decides which is best."""

    keep: Keep
    metric: str | None
    mode: Mode

    def check(self, metrics: Mapping[str, float]) -> None:
        """Refuses metrics without the one that decides; a step without any is never best.

        Raises:
          InvalidMetricError: in that case.
        """
        decides = self.metric or (next(iter(metrics)) if len(metrics) == 1 else None)
        if metrics and decides not in metrics and (self.metric or self.keep.best):
            raise InvalidMetricError(
                f"the metrics are {', '.join(metrics)}, and metric={self.metric!r} decides what "
                "is best. Give CheckpointManager the name of one that is always there."
            )


@dataclasses.dataclass
class _Job:
    """One step to write. `blocked` is for how many seconds the loop waited, if not for all."""

    step: int
    plan: SavePlan
    described: CheckpointMetadata
    overwrite: bool
    blocked: float | None = None


class Writer:
    """Writes one step at a time, and deletes steps after each commit."""

    def __init__(self, run: Run, retention: Retention, options: Options, *, async_: bool):
        """A writer for `run`."""
        self.background = Background(options.timeout_secs)
        self._run, self._retention, self._options = run, retention, options
        self._async = async_
        self._plan: SavePlan | None = None

    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any],
        metadata: Mapping[str, Any],
        *,
        overwrite: bool,
    ) -> None:
        """Saves `state` as `step`; returns when the state may change.

        The save before this one is waited for, and its failure is raised.
        """
        began = time.monotonic()
        numbers = checkpoint_metadata.check_metrics(metrics)
        self._retention.check(numbers)
        user_metadata = checkpoint_metadata.check_metadata(metadata)
        described = CheckpointMetadata(
            layout.new_attempt(), time.time_ns(), 0, numbers, user_metadata
        )
        self.wait()
        check_vacant(self._run.path(step), overwrite=overwrite)
        self._run.check_not_pinned(step)
        taken = take_apart(state, self._options.chunk_bytes, self._plan)
        self._plan = taken.plan
        self._start(_Job(step, taken.plan, described, overwrite), taken, began)

    def wait(self) -> None:
        """Waits for the save in flight and raises its failure."""
        self.background.join()
        self.background.raise_failure()

    def _start(self, job: _Job, state: State, began: float) -> None:
        """Writes `state`, or sees to it that it is written whatever becomes of the state."""
        limit = self._options.snapshot_bytes
        name = f"saving step {job.step} to {self._run.directory}"
        if not self._async:
            self._write(job, stream(state, limit, copy=False), began)
        elif limit is None or job.plan.nbytes <= limit:
            pieces = hold(state)
            job.blocked = time.monotonic() - began
            self.background.start(name, functools.partial(self._write, job, pieces, began))
        else:
            feed = Feed(limit // 2)
            self.background.start(name, functools.partial(self._write_fed, job, feed, began))
            went_on = feed.put_all(stream(state, limit // 2, copy=True))
            job.blocked = time.monotonic() - began
            feed.end()
            if not went_on:
                self.wait()

    def _write_fed(self, job: _Job, feed: Feed, began: float) -> None:
        """As `_write`; when it fails, the loop's thread is not kept waiting."""
        try:
            self._write(job, feed, began)
        finally:
            feed.stop()

    def _write(self, job: _Job, pieces: Iterable[Piece], began: float) -> None:
        """Writes and commits one step, then deletes what is no longer kept."""
        path = self._run.path(job.step)
        options = self._options
        write(job.plan, pieces, path, job.described, overwrite=job.overwrite, options=options)
        self._run.forget(job.step)
        seconds = time.monotonic() - began
        logger.info(
            "saved step %d: %d leaves, %.1f MB in %.3f s (%.1f ms blocked) to %s",
            job.step,
            len(job.plan.records),
            job.plan.nbytes / 1e6,
            seconds,
            (seconds if job.blocked is None else job.blocked) * 1e3,
            path,
        )
        self._delete_unkept(job.step)

    def _delete_unkept(self, saved: int) -> None:
        """Deletes the steps that are not to be kept. Only called after the commit of `saved`.

        That step stays, even when it is not the newest: a loop that went back to an older step
        must find what it saved since.
        """
        if self._retention.keep.everything:
            return
        infos = self._run.infos(self._retention.metric)
        kept = self._retention.keep.select(infos, mode=self._retention.mode) | {saved}
        for step in sorted({info.step for info in infos} - kept):
            try:
                self._run.delete(step)
            except StepPinnedError:
                continue  # only now is it looked up whether a step is pinned
            except OSError as error:
                raise DirectoryError(
                    f"step {saved} is saved, but step {step}, which is no longer kept, cannot be "
                    f"deleted: {error}"
                ) from error
            logger.debug("deleted step %d of %s", step, self._run.directory)
