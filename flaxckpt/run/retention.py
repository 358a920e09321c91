"""Which steps of a run are kept. Pure decisions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

Mode = Literal["min", "max"]
# The name of the metric that decides what is best; the only one there is; or, from elsewhere, a
# function that gives the value at each step that has one so far.
Metric = str | None | Callable[[], Mapping[int, float]]


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """What retention needs to know of a committed step.

    Attributes:
      step: the step.
      time: when it was committed, in seconds since 1970.
      metric: the metric that decides what is best; `None` where there is none.
      pinned: whether the user pinned it.
    """

    step: int
    time: float = 0.0
    metric: float | None = None
    pinned: bool = False


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which steps are kept: the union of what each attribute keeps. With none set, all.

    The newest step and pinned steps are always kept.

    Attributes:
      last: the newest so many.
      best: so many with the best metric. NaN is never best; of equals the newer is better.
      every: steps that are multiples of this.
      hours: the first step, and each that is at least so many hours newer than the one kept
        before it.

    Raises:
      ValueError: when a number is not positive.

    Example:
      >>> keep = flaxckpt.Keep(last=1, best=1)
      >>> infos = [StepInfo(step, metric=loss) for step, loss in enumerate([3.0, 1.0, 2.0])]
      >>> sorted(keep.select(infos, mode="min"))
      [1, 2]
    """

    last: int | None = None
    best: int | None = None
    every: int | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        """Refuses numbers that are not positive."""
        for field in ("last", "best", "every", "hours"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ValueError(f"Keep.{field} must be positive, got {value!r}")

    @property
    def everything(self) -> bool:
        """Whether nothing is ever deleted."""
        return self == Keep()

    def select(self, steps: Sequence[StepInfo], *, mode: Mode = "min") -> frozenset[int]:
        """The steps to keep, of the committed `steps`.

        Args:
          steps: all of them, in any order.
          mode: whether the best metric is the smallest or the largest.
        """
        ordered = sorted(steps, key=lambda info: info.step)
        if self.everything:
            return frozenset(info.step for info in ordered)
        kept = {info.step for info in ordered if info.pinned}
        kept |= {info.step for info in ordered[-(self.last or 1) :]}
        kept |= {info.step for info in best_first(ordered, mode)[: self.best or 0]}
        kept |= {info.step for info in ordered if self.every and info.step % self.every == 0}
        return frozenset(kept | self._by_hours(ordered))

    def _by_hours(self, ordered: Sequence[StepInfo]) -> set[int]:
        """The steps that are kept because enough time lies between them."""
        kept: set[int] = set()
        previous = -math.inf
        for info in ordered if self.hours is not None else ():
            if info.time - previous >= (self.hours or 0) * 3600:
                kept.add(info.step)
                previous = info.time
        return kept


def best_first(steps: Sequence[StepInfo], mode: Mode) -> list[StepInfo]:
    """The steps that have a metric which is a number, the best first; of equals the newer."""
    ranked = [i for i in steps if i.metric is not None and not math.isnan(i.metric)]
    sign = 1.0 if mode == "min" else -1.0
    return sorted(ranked, key=lambda info: (sign * (info.metric or 0.0), -info.step))
