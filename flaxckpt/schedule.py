"""When a step is saved. Pure decisions: steps and seconds come in, a decision goes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Every:
    """When to save; several conditions are alternatives.

    Attributes:
      steps: when a multiple of this lies in the steps since the last decision. Steps may jump.
      secs: when this many seconds have passed since the last save.
      minutes: the same in minutes.
      at: at these steps; one that was jumped over counts at the next call.

    Raises:
      ValueError: when a number is not positive, a step of `at` is negative, both `secs` and
        `minutes` are given, or nothing is.

    Example:
      >>> flaxckpt.Every(steps=100).due(250, last=199, elapsed=0.0)
      True
    """

    steps: int | None = None
    secs: float | None = None
    minutes: float | None = None
    at: Iterable[int] = ()

    def __post_init__(self) -> None:
        """Checks the numbers and sorts `at`."""
        for field in ("steps", "secs", "minutes"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ValueError(f"Every.{field} must be positive, got {value!r}")
        if self.secs is not None and self.minutes is not None:
            raise ValueError("Every takes secs or minutes, not both")
        at = tuple(sorted({int(step) for step in self.at}))
        if at and at[0] < 0:
            raise ValueError(f"Every.at must not be negative, got {at[0]}")
        object.__setattr__(self, "at", at)
        if not at and all(value is None for value in (self.steps, self.secs, self.minutes)):
            raise ValueError("Every needs a condition: steps, secs, minutes or at")

    def due(self, step: int, *, last: int, elapsed: float) -> bool:
        """Whether `step` is to be saved.

        Args:
          step: the step.
          last: the step of the last decision; what lies after it and up to `step` is decided now.
          elapsed: seconds since the last save, or since the first decision.
        """
        if step <= last:
            return False
        by_step = self.steps is not None and step // self.steps > last // self.steps
        return by_step or any(last < s <= step for s in self.at) or self._by_time(elapsed)

    def _by_time(self, elapsed: float) -> bool:
        """Whether enough time has passed: strictly more, as in CLU."""
        interval = self.secs if self.minutes is None else self.minutes * 60
        return interval is not None and elapsed > interval

    def jumped_over(self, step: int, *, last: int) -> tuple[int, ...]:
        """The steps of `at` that were never decided on, between `last` and `step`."""
        return tuple(s for s in self.at if last < s < step)


@dataclasses.dataclass
class Pacer:
    """What a schedule remembers from one call to the next.

    Attributes:
      every: the schedule.
      last: the step of the last decision; `None` before the first.
      since: the time of the last save, or of the first decision, in seconds.
    """

    every: Every
    last: int | None = None
    since: float | None = None

    def decide(self, step: int, now: float) -> bool:
        """Whether `step`, at the time `now`, is due; it counts as decided then.

        Without a step before it, the first call decides on its own step only.
        """
        last = step - 1 if self.last is None else self.last
        self.since = now if self.since is None else self.since
        due = self.every.due(step, last=last, elapsed=now - self.since)
        self.last = max(step, last)
        return due

    def saved(self, step: int, now: float) -> None:
        """Notes that `step` is saved: there, or restored from there, since the time `now`."""
        self.last, self.since = step, now
