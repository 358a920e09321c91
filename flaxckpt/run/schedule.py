"""When a step is saved. Pure decisions: steps and seconds come in, a decision goes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from flaxckpt.arguments import check_count, check_positive
from flaxckpt.errors import ArgumentError

if TYPE_CHECKING:
    from flaxckpt.multihost import ProcessGroup


@dataclasses.dataclass(frozen=True)
class Every:
    """When to save; several conditions are alternatives, of which `max_overhead` is none.

    Attributes:
      steps: when a multiple of this lies in the steps since the last decision. Steps may jump.
      secs: when this many seconds have passed since the last save.
      minutes: the same in minutes.
      at: at these steps; one that was jumped over counts at the next call.
      max_overhead: the share of its time, below 1, that the loop may lose to saves. What it loses
        is measured, and a save that would make it more is put off until it can be paid for; only
        those of `at` never are. Without steps or seconds a save is due whenever it can be.

    Raises:
      ValueError: when a number is not positive, a step of `at` is negative, `max_overhead` is not
        below 1, both `secs` and `minutes` are given, or nothing is.

    Example:
      >>> flaxckpt.Every(steps=100).due(250, last=199, elapsed=0.0)
      True
    """

    steps: int | None = None
    secs: float | None = None
    minutes: float | None = None
    at: Iterable[int] = ()
    max_overhead: float | None = None

    def __post_init__(self) -> None:
        """Checks the numbers and sorts `at`."""
        for field in ("steps", "secs", "minutes", "max_overhead"):
            if (value := getattr(self, field)) is not None:
                check_positive(f"Every.{field}", value, is_count=field == "steps")
        if self.max_overhead is not None and self.max_overhead >= 1:
            raise ValueError(f"Every.max_overhead must be below 1, got {self.max_overhead!r}")
        if self.secs is not None and self.minutes is not None:
            raise ValueError("Every takes secs or minutes, not both")
        given: Any = self.at
        if not isinstance(given, Iterable):
            raise ArgumentError(f"Every.at takes a list of steps, got {given!r}. Pass [{given!r}].")
        steps = list(given)
        for step in steps:
            check_count("a step of Every.at", step)
        at = tuple(sorted({int(step) for step in steps}))
        if at and at[0] < 0:
            raise ValueError(f"Every.at must not be negative, got {at[0]}")
        object.__setattr__(self, "at", at)
        if not at and not self._has_interval and self.max_overhead is None:
            raise ValueError("Every needs a condition: steps, secs, minutes, at or max_overhead")

    @property
    def _has_interval(self) -> bool:
        """Whether steps or seconds make a save due."""
        return any(value is not None for value in (self.steps, self.secs, self.minutes))

    @property
    def is_timed(self) -> bool:
        """Whether clocks have a part in the decision, which differ from process to process."""
        return any(value is not None for value in (self.secs, self.minutes, self.max_overhead))

    def due(self, step: int, *, last: int, elapsed: float) -> bool:
        """Whether `step` is to be saved, if the loop can afford it.

        Args:
          step: the step.
          last: the step of the last decision; what lies after it and up to `step` is decided now.
          elapsed: seconds since the last save, or since the first decision.
        """
        if step <= last:
            return False
        by_step = self.steps is not None and step // self.steps > last // self.steps
        whenever = not self._has_interval and self.max_overhead is not None
        return by_step or whenever or self.wants(step, last=last) or self._by_time(elapsed)

    def wants(self, step: int, *, last: int) -> bool:
        """Whether a step of `at` lies after `last` and up to `step`."""
        return any(last < s <= step for s in self.at)

    def affords(self, cost: float, *, lost: float, total: float) -> bool:
        """Whether the loop may lose `cost` seconds more, of `total`, after it has `lost` some.

        Example:
          >>> every = flaxckpt.Every(max_overhead=0.01)
          >>> every.affords(0.5, lost=0.5, total=99.0), every.affords(0.5, lost=0.5, total=100.0)
          (False, True)
        """
        return self.max_overhead is None or lost + cost <= self.max_overhead * total

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
      first: the smallest step that was asked about before that.
      since: the time of the last save, or of the first question, in seconds.
      begun: the time of the first question, in seconds.
      lost: how many seconds the loop lost to saves, and `cost` those to the last one.
      owed: whether a save that was due has been put off.
    """

    every: Every
    last: int | None = None
    first: int | None = None
    since: float | None = None
    begun: float | None = None
    lost: float = 0.0
    cost: float = 0.0
    owed: bool = False

    def decide(self, step: int, now: float) -> bool:
        """Whether `step`, at the time `now`, is due; it counts as decided then.

        Without a step before it, the first call decides on its own step only.
        """
        decision, self.owed = self._outcome(step, now)
        self.last = max(step, self._last(step))
        return decision

    def would(self, step: int, now: float) -> bool:
        """Whether `decide` would say that `step` is due; nothing is decided."""
        return self._outcome(step, now)[0]

    def _last(self, step: int) -> int:
        if self.last is not None:
            return self.last
        self.first = step if self.first is None else min(step, self.first)
        return self.first - 1

    def _outcome(self, step: int, now: float) -> tuple[bool, bool]:
        """Whether `step` is to be saved, and whether its save is due but put off."""
        last = self._last(step)
        self.since = now if self.since is None else self.since
        self.begun = now if self.begun is None else self.begun
        due = self.every.due(step, last=last, elapsed=now - self.since) or (
            self.owed and step > last
        )
        affordable = self.every.affords(self.cost, lost=self.lost, total=now - self.begun)
        decision = due and (affordable or self.every.wants(step, last=last))
        return decision, due and not decision

    def decide_together(self, group: ProcessGroup, step: int, now: float) -> bool:
        """Whether `step` is due on all processes. If it depends on clocks, process 0 decides."""
        due = self.decide(step, now)
        if not self.every.is_timed:
            return due
        return group.broadcast(f"deciding whether step {step} is due", lambda: due)

    def saved(self, step: int, now: float) -> None:
        """Notes that `step` is saved: there, or restored from there, since the time `now`."""
        self.last, self.since, self.owed = step, now, False

    def paid(self, cost: float) -> None:
        """Notes that the loop lost `cost` seconds to a save."""
        self.cost = cost
        self.lost += cost
