"""Writing the steps of a run: snapshot on the caller's thread, the rest in the background."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Mapping
from typing import Any

from flaxckpt.background import Background
from flaxckpt.errors import DirectoryError, InvalidMetricError, StepPinnedError
from flaxckpt.metadata import checkpoint as checkpoint_metadata
from flaxckpt.metadata.checkpoint import CheckpointMetadata
from flaxckpt.options import Options
from flaxckpt.retention import Keep, Mode
from flaxckpt.run import Run
from flaxckpt.save import check_vacant, write
from flaxckpt.snapshot import Snapshot, take
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


@dataclasses.dataclass(frozen=True)
class _Job:
    """One step to write."""

    step: int
    snapshot: Snapshot
    described: CheckpointMetadata
    overwrite: bool
    began: float
    blocked: float


class Writer:
    """Writes one step at a time, and deletes steps after each commit."""

    def __init__(self, run: Run, retention: Retention, options: Options, *, async_: bool):
        """A writer for `run`."""
        self.background = Background(options.timeout_secs)
        self._run, self._retention, self._options = run, retention, options
        self._async = async_

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
        snapshot = take(state, self._options.chunk_bytes)
        job = _Job(step, snapshot, described, overwrite, began, time.monotonic() - began)
        if self._async:
            name = f"saving step {step} to {self._run.directory}"
            self.background.start(name, functools.partial(self._write, job))
        else:
            self._write(job)

    def wait(self) -> None:
        """Waits for the save in flight and raises its failure."""
        self.background.join()
        self.background.raise_failure()

    def _write(self, job: _Job) -> None:
        """Writes and commits one step, then deletes what is no longer kept."""
        path = self._run.path(job.step)
        write(job.snapshot, path, job.described, overwrite=job.overwrite, options=self._options)
        self._run.forget(job.step)
        logger.info(
            "saved step %d: %d leaves, %.1f MB in %.3f s (%.1f ms blocked) to %s",
            job.step,
            len(job.snapshot.records),
            job.snapshot.nbytes / 1e6,
            time.monotonic() - job.began,
            job.blocked * 1e3,
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
                continue  # since it was looked at
            except OSError as error:
                raise DirectoryError(
                    f"step {saved} is saved, but step {step}, which is no longer kept, cannot be "
                    f"deleted: {error}"
                ) from error
            logger.debug("deleted step %d of %s", step, self._run.directory)
