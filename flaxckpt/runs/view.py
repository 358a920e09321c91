"""What can be asked about the steps of a run, by whoever writes it and by others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from flaxckpt.retention import Metric, Mode, best_first
from flaxckpt.runs.follow import follow
from flaxckpt.runs.run import Run


class RunView:
    """The committed steps of a run; nothing is changed."""

    def __init__(self, run: Run, metric: Metric, mode: Mode, clock: Callable[[], float]):
        """The steps of `run`, of which `metric` decides what is best."""
        self._run, self._metric, self._mode, self._clock = run, metric, mode, clock
        self._last_step: int | None = None
        self._restored_step: int | None = None

    def steps(self) -> list[int]:
        """The committed steps, in order."""
        return self._run.steps()

    @property
    def latest_step(self) -> int | None:
        """The newest committed step."""
        return self._run.latest()

    @property
    def best_step(self) -> int | None:
        """The committed step with the best metric; `None` when none has one."""
        ranked = best_first(self._run.infos(self._metric), self._mode)
        return ranked[0].step if ranked else None

    @property
    def last_step(self) -> int | None:
        """The step that this manager saved or restored last."""
        return self._last_step

    @property
    def restored_step(self) -> int | None:
        """The step that this manager restored last."""
        return self._restored_step

    @property
    def next_step(self) -> int:
        """Where a loop goes on: after the step saved or restored last, else after the newest."""
        step = self.latest_step if self._last_step is None else self._last_step
        return 0 if step is None else step + 1

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that `step` was saved with.

        Raises:
          CheckpointNotFoundError: when there is no such step.
        """
        return dict(self._run.existing(step).metrics)

    def metadata(self, step: int) -> dict[str, Any]:
        """The metadata that `step` was saved with.

        Raises:
          CheckpointNotFoundError: when there is no such step.
        """
        return dict(self._run.existing(step).metadata)

    def follow(self, *, timeout_secs: float | None = None, poll_secs: float = 1.0) -> Iterator[int]:
        """Yields each step of the run that is newer than those before, as it is committed.

        Args:
          timeout_secs: ends after so many seconds without a new step; by default never.
          poll_secs: how often to look.
        """
        return follow(self.steps, self._clock, timeout_secs, poll_secs)
