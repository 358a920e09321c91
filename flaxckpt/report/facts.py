"""The facts of a report, collected without reading an array."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from flaxckpt.errors import InvalidMetricError
from flaxckpt.metadata.step_metadata import Mode, PastSave
from flaxckpt.options import Options
from flaxckpt.run import listing
from flaxckpt.run.retention import StepInfo, best_first
from flaxckpt.run.run import Run, history


@dataclasses.dataclass(frozen=True)
class ReportedSave:
    """A save that the run records.

    Attributes:
      step: the step.
      time: when it was committed, in seconds since 1970.
      seconds: the seconds from the call to the commit.
      blocked: for how many of these seconds the loop waited; `None` if that was not recorded.
      trained: for how many seconds the loop trained after the previous save; `None` if unknown.
      metrics: its metrics.
    """

    step: int
    time: float
    seconds: float
    blocked: float | None = None
    trained: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ReportedStep:
    """A step of the run, or a deleted one.

    Attributes:
      step: the step.
      time: when it was committed, in seconds since 1970; `None` if unknown.
      metrics: its metrics.
      nbytes: the size of its files, in bytes; `None` if it was deleted.
      is_kept: whether the run still has it.
      is_pinned: whether the user pinned it.
      is_damaged: whether the run has it, but its metadata is unreadable.
    """

    step: int
    time: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    nbytes: int | None = None
    is_kept: bool = True
    is_pinned: bool = False
    is_damaged: bool = False


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of a run.

    Attributes:
      directory: the run directory.
      steps: the kept and the deleted steps, in order.
      saves: the saves that the run records, in order.
      metric: the metric that ranks steps; `None` if unknown.
      mode: whether its smallest or its largest value is best.
      has_history: whether the run records more saves than the newest one.
      unranked: why the steps are not ranked.
    """

    directory: str
    steps: Sequence[ReportedStep]
    saves: Sequence[ReportedSave] = ()
    metric: str | None = None
    mode: Mode | None = None
    has_history: bool = False
    unranked: str = ""

    @property
    def kept(self) -> list[ReportedStep]:
        """The steps that the run has."""
        return [step for step in self.steps if step.is_kept]

    @property
    def readable(self) -> list[ReportedStep]:
        """The kept steps with readable metadata."""
        return [step for step in self.kept if not step.is_damaged]

    @property
    def metric_names(self) -> list[str]:
        """The metrics of all steps; the one that ranks them comes first."""
        names = {name for step in self.steps for name in step.metrics}
        return sorted(names, key=lambda name: (name != self.metric, name))

    @property
    def best(self) -> ReportedStep | None:
        """The best of the kept steps."""
        if self.metric is None or self.mode is None:
            return None
        steps = {step.step: step for step in self.kept}
        infos = [StepInfo(s.step, metric=s.metrics.get(self.metric)) for s in steps.values()]
        ranked = best_first(infos, self.mode)
        return steps[ranked[0].step] if ranked else None

    def state_of(self, step: ReportedStep) -> str:
        """The state of a step in words."""
        if not step.is_kept:
            return "deleted"
        notes = {"best": step == self.best, "pinned": step.is_pinned, "damaged": step.is_damaged}
        return ", ".join(["kept", *(note for note, is_so in notes.items() if is_so)])

    @property
    def nbytes(self) -> int:
        """The size of the files of all steps, in bytes."""
        return sum(step.nbytes or 0 for step in self.kept)

    @property
    def span(self) -> tuple[float, float] | None:
        """The first and the last commit time that is known."""
        times = [step.time for step in self.steps if step.time is not None]
        return (min(times), max(times)) if times else None

    @property
    def overhead(self) -> tuple[float, float] | None:
        """For how many seconds saves blocked the loop, and it trained between saves."""
        known = [
            (save.blocked, save.trained)
            for save in self.saves
            if save.blocked is not None and save.trained is not None
        ]
        if not known:
            return None
        return math.fsum(k[0] for k in known), math.fsum(k[1] for k in known)


def saves_of(past: Iterable[PastSave]) -> list[ReportedSave]:
    """The saves with finite times, each with how long the loop had trained before it.

    Example:
      >>> past = [PastSave(1, 10.0, 2.0, 0.5, 1, 8, {}), PastSave(2, 20.0, 3.0, 0.5, 1, 8, {})]
      >>> [save.trained for save in saves_of(past)]  # from 8.5 to 17
      [None, 8.5]
    """
    found: list[ReportedSave] = []
    since: float | None = None
    for save in past:
        if not all(map(math.isfinite, (save.time, save.seconds, save.blocked_seconds))):
            continue
        began = save.time - save.seconds
        trained = None if since is None or began < since else began - since
        # The last save of a process does not record for how long it blocked. The time until the
        # next save, by another process, is not counted as training.
        blocked = save.blocked_seconds or None
        since = None if blocked is None else began + blocked
        metrics = finite(save.metrics)
        found.append(ReportedSave(save.step, save.time, save.seconds, blocked, trained, metrics))
    return found


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are finite numbers."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def gather(
    run: Run,
    *,
    metric: str | None = None,
    mode: Mode | None = None,
    options: Options = Options(),
) -> Facts:
    """The facts of `run`.

    Args:
      run: a run with at least one step.
      metric: the metric that ranks steps; by default the one that the run records.
      mode: whether its smallest or its largest value is best; by default as the run records.
      options: how to connect to object stores.

    Raises:
      CheckpointNotFoundError: if the run has no step.
      InvalidMetricError: if no step has `metric`, or nothing says whether its smallest or its
        largest value is best.
    """
    run.existing(run.latest())
    saves = saves_of(history(run, options))
    listed = listing.steps_of(run)
    kept = [_kept(step) for step in listed]
    has_history = len(saves) > 1 or len(kept) == 1
    found = Facts(str(run.directory), merged(kept, saves), saves, has_history=has_history)
    try:
        ranking = listing.ranking_of(run, listed, metric, mode)
    except InvalidMetricError as error:
        if metric is not None or mode is not None:
            raise
        return dataclasses.replace(found, unranked=str(error))
    name = ranking.metric or (found.metric_names[0] if len(found.metric_names) == 1 else None)
    return dataclasses.replace(found, metric=name, mode=ranking.mode)


def merged(kept: Sequence[ReportedStep], saves: Sequence[ReportedSave]) -> list[ReportedStep]:
    """The kept steps and the deleted ones, in order."""
    gone = {s.step: ReportedStep(s.step, s.time, s.metrics, is_kept=False) for s in saves}
    there = {step.step: step for step in kept}
    return [step for _, step in sorted((gone | there).items())]


def _kept(step: listing.ListedStep) -> ReportedStep:
    return ReportedStep(
        step.step,
        None if step.damaged else step.described.committed_ns / 1e9,
        finite(step.described.metrics),
        step.nbytes,
        is_pinned=step.pinned,
        is_damaged=step.damaged,
    )
