"""What the page tells of a run, as plain data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from flaxckpt.retention import Mode, StepInfo, best_first


@dataclasses.dataclass(frozen=True)
class Save:
    """A save that the run remembers.

    Attributes:
      step: the step.
      time: when it was committed, in seconds since 1970.
      seconds: from the call until then.
      blocked: for how many of them the loop waited; `None` where nobody noted it.
      trained: for how many seconds the loop had trained since the save before; likewise.
      metrics: its metrics.
    """

    step: int
    time: float
    seconds: float
    blocked: float | None = None
    trained: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that is in the run, or was.

    Attributes:
      step: the step.
      time: when it was committed, in seconds since 1970; `None` when that is not known.
      metrics: its metrics.
      nbytes: the size of its files, in bytes; `None` when it is gone.
      is_kept: whether it is there.
      is_pinned: whether the user pinned it.
      is_damaged: whether it is there, but what it says of itself cannot be read.
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
    """All of a run.

    Attributes:
      directory: where it is.
      steps: the steps that are there or were, in order.
      saves: the saves that it remembers, in order.
      metric: the metric that decides what is best; `None` when none does.
      mode: whether its best value is the smallest or the largest.
      has_history: whether it remembers more than the newest one.
    """

    directory: str
    steps: Sequence[Step]
    saves: Sequence[Save] = ()
    metric: str | None = None
    mode: Mode = "min"
    has_history: bool = False

    @property
    def kept(self) -> list[Step]:
        """The steps that are there."""
        return [step for step in self.steps if step.is_kept]

    @property
    def readable(self) -> list[Step]:
        """Those of them that can be opened."""
        return [step for step in self.kept if not step.is_damaged]

    @property
    def metric_names(self) -> list[str]:
        """The metrics that any step has, the one that decides first."""
        names = {name for step in self.steps for name in step.metrics}
        return sorted(names, key=lambda name: (name != self.metric, name))

    @property
    def best(self) -> Step | None:
        """The best step that is there."""
        if self.metric is None:
            return None
        steps = {step.step: step for step in self.kept}
        infos = [StepInfo(s.step, metric=s.metrics.get(self.metric)) for s in steps.values()]
        ranked = best_first(infos, self.mode)
        return steps[ranked[0].step] if ranked else None

    @property
    def nbytes(self) -> int:
        """The size of the files of all steps, in bytes."""
        return sum(step.nbytes or 0 for step in self.kept)

    @property
    def span(self) -> tuple[float, float] | None:
        """When the first and the last step were committed, of which that is known."""
        times = [step.time for step in self.steps if step.time is not None]
        return (min(times), max(times)) if times else None

    @property
    def overhead(self) -> tuple[float, float] | None:
        """For how many seconds saves blocked the loop, and for how many it trained between them."""
        known = [
            (save.blocked, save.trained)
            for save in self.saves
            if save.blocked is not None and save.trained is not None
        ]
        if not known:
            return None
        return math.fsum(k[0] for k in known), math.fsum(k[1] for k in known)
