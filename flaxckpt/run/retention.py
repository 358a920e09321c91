"""Which steps of a run are kept. Pure decisions."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flaxckpt.arguments import check_positive
from flaxckpt.errors import ArgumentError, InvalidMetricError
from flaxckpt.metadata.step_metadata import Mode, Ranking

# The name of a metric or, for metrics from elsewhere, a function that gives the value at each step
# that has one so far.
Metric = str | Callable[[], Mapping[int, float]]


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """What retention needs to know of a committed step.

    Attributes:
      step: the step.
      time: when it was committed, in seconds since 1970.
      metric: the value of the metric that ranks steps; `None` if the step does not have it.
      pinned: whether the step stays in any case.
    """

    step: int
    time: float = 0.0
    metric: float | None = None
    pinned: bool = False


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which steps are kept: the union of the steps that each rule keeps; without a rule, all.

    The newest step and pinned steps are always kept. A step without the metric is kept by the rules
    other than `best`; if `best` is the only rule, it stays, because nobody judged it.

    Attributes:
      last: how many of the newest steps to keep.
      best: how many of the steps with the best metric to keep. NaN is never best; on ties, the
        newer step wins.
      metric: the name of the metric that ranks steps; needed if a save has several metrics. Or
        `metric_from_tensorboard(...)`.
      mode: `"min"` if its smallest value is best, `"max"` if its largest is. Required with `best`
        and with `metric`. The run records both, so `best_step()` of later managers and the command
        line use them.
      every: keep the first saved step at or after each multiple of this number.
      hours: keep the first step, and each step that is at least this many hours newer than the
        step kept before it.

    Raises:
      ValueError: if a number is not positive, or `mode` is missing or not `"min"` or `"max"`.

    Example:
      >>> keep = flaxckpt.Keep(last=1, best=1, mode="min")
      >>> infos = [StepInfo(step, metric=loss) for step, loss in enumerate([3.0, 1.0, 2.0])]
      >>> sorted(keep.select(infos))
      [1, 2]
    """

    last: int | None = None
    best: int | None = None
    metric: Metric | None = None
    mode: Mode | None = None
    every: int | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        """Refuses numbers that are not positive, and a ranking without a direction."""
        for field in ("last", "best", "every", "hours"):
            if (value := getattr(self, field)) is not None:
                check_positive(f"Keep.{field}", value, is_count=field != "hours")
        if isinstance(self.metric, str | None):
            pass
        elif not callable(self.metric) or _needs_arguments(self.metric):
            raise ArgumentError(
                f"Keep.metric takes the name of a metric, got {self.metric!r}. Pass "
                'Keep(metric="loss", ...), and the values in ckpt(..., metrics={"loss": ...}).'
            )
        if self.mode not in ("min", "max", None):
            raise ValueError(f'Keep.mode must be "min" or "max", got {self.mode!r}')
        if self.mode is None and (self.best is not None or self.metric is not None):
            given = "best" if self.metric is None else "metric"
            raise ValueError(
                f'Keep({given}={getattr(self, given)!r}) needs mode="min" or mode="max": whether '
                "the smallest or the largest value is best."
            )

    @property
    def everything(self) -> bool:
        """Whether nothing is ever deleted."""
        return not (self.last or self.best or self.every or self.hours)

    def select(self, steps: Sequence[StepInfo]) -> frozenset[int]:
        """The steps to keep, out of all committed `steps`, which may be in any order."""
        ordered = sorted(steps, key=lambda info: info.step)
        if self.everything:
            return frozenset(info.step for info in ordered)
        kept = {info.step for info in ordered if info.pinned}
        kept |= {info.step for info in ordered[-(self.last or 1) :]}
        if self.best and self.mode:
            kept |= {info.step for info in best_first(ordered, self.mode)[: self.best]}
            if not (self.last or self.every or self.hours):
                kept |= {info.step for info in ordered if info.metric is None}
        return frozenset(kept | self._by_multiples(ordered) | self._by_hours(ordered))

    def _by_multiples(self, ordered: Sequence[StepInfo]) -> set[int]:
        kept: dict[int, int] = {}
        for info in ordered if self.every is not None else ():
            kept.setdefault(info.step // (self.every or 1), info.step)
        return set(kept.values())

    def _by_hours(self, ordered: Sequence[StepInfo]) -> set[int]:
        kept: set[int] = set()
        previous = -math.inf
        for info in ordered if self.hours is not None else ():
            if info.time - previous >= (self.hours or 0) * 3600:
                kept.add(info.step)
                previous = info.time
        return kept

    def ranking_of(self, metrics: Mapping[str, float]) -> Ranking | None:
        """The ranking that a step with these metrics records; `None` if steps cannot record it.

        Raises:
          InvalidMetricError: if the metrics of the step lack the one that ranks steps. A step
            without any metrics is never best.
        """
        if self.mode is None or callable(self.metric):
            return None
        metric = self.metric or (next(iter(metrics)) if len(metrics) == 1 else None)
        if metrics and metric not in metrics and (self.metric or self.best):
            shown = ", ".join(metrics)
            if self.metric is None:
                raise InvalidMetricError(
                    f"this save has the metrics {shown}, and Keep does not say which of them ranks "
                    "steps. Pass Keep(metric=...)."
                )
            raise InvalidMetricError(
                f"Keep(metric={self.metric!r}) ranks steps, and this save only has the metrics "
                f"{shown}. Pass {self.metric!r} in metrics=, or another Keep(metric=...)."
            )
        return Ranking(metric, self.mode)


def _needs_arguments(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in parameters)


def best_first(steps: Sequence[StepInfo], mode: Mode) -> list[StepInfo]:
    """The steps that have a metric that is a number, the best first; on ties the newer first."""
    ranked = [i for i in steps if i.metric is not None and not math.isnan(i.metric)]
    sign = 1.0 if mode == "min" else -1.0
    return sorted(ranked, key=lambda info: (sign * (info.metric or 0.0), -info.step))
