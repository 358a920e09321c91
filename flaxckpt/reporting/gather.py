"""What there is to know of a run without reading an array, as facts."""

from __future__ import annotations

from collections.abc import Sequence

from flaxckpt.cli.work import steps
from flaxckpt.errors import InvalidMetricError
from flaxckpt.options import Options
from flaxckpt.reporting.facts import Facts, Save, Step
from flaxckpt.reporting.saves import finite, saves_of
from flaxckpt.retention import Mode
from flaxckpt.runs.history import history
from flaxckpt.runs.run import Run


def gather(
    run: Run,
    *,
    metric: str | None = None,
    mode: Mode = "min",
    options: Options = Options(),
) -> Facts:
    """The facts of `run`.

    Args:
      run: it has a step.
      metric: which metric decides what is best; by default the only one there is.
      mode: whether its best value is the smallest or the largest.
      options: how object stores are reached.

    Raises:
      CheckpointNotFoundError: when it has no step.
      InvalidMetricError: when no step has that metric.
    """
    run.existing(run.latest())
    saves = saves_of(history(run, options))
    kept = [_kept(step) for step in steps.steps_of(run)]
    found = merged(kept, saves)
    has_history = len(saves) > 1 or len(kept) == 1
    return Facts(str(run.directory), found, saves, _deciding(found, metric), mode, has_history)


def merged(kept: Sequence[Step], saves: Sequence[Save]) -> list[Step]:
    """The steps that are there, and those that once were saved, in order."""
    gone = {s.step: Step(s.step, s.time, s.metrics, is_kept=False) for s in saves}
    there = {step.step: step for step in kept}
    return [step for _, step in sorted((gone | there).items())]


def _kept(step: steps.Step) -> Step:
    """A step that is there."""
    return Step(
        step.step,
        None if step.damaged else step.described.committed_ns / 1e9,
        finite(step.described.metrics),
        step.nbytes,
        is_pinned=step.pinned,
        is_damaged=step.damaged,
    )


def _deciding(found: Sequence[Step], metric: str | None) -> str | None:
    """The metric that decides what is best.

    Raises:
      InvalidMetricError: when no step has `metric`.
    """
    names = sorted({name for step in found for name in step.metrics})
    if metric is None:
        return names[0] if len(names) == 1 else None
    if metric not in names:
        have = f"{', '.join(names)}. Give one of these" if names else "none. Give none"
        raise InvalidMetricError(f"no step has the metric {metric!r}. They have {have}.")
    return metric
