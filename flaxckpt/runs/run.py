"""The directory of a run: which steps are committed, what is known of them, and their deletion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flaxckpt.errors import CheckpointNotFoundError, FlaxckptError, StepPinnedError, StoreError
from flaxckpt.metadata import checkpoint as checkpoint_metadata
from flaxckpt.metadata.checkpoint import CheckpointMetadata
from flaxckpt.retention import Metric, StepInfo
from flaxckpt.storage import layout, location
from flaxckpt.storage.location import Location


class Run:
    """The steps in a run directory.

    A step is a directory with a number for a name and our `_CHECKPOINT_METADATA` in it; it is
    committed when it has that name. Everything else in the directory is not looked at.
    """

    def __init__(self, directory: Location, *, fsync: bool):
        """The run in `directory`, which need not exist."""
        self.directory = directory
        self._fsync = fsync
        # What was committed does not change, so it is read once.
        self._known: dict[int, CheckpointMetadata] = {}

    def path(self, step: int) -> Location:
        """Where `step` is, or would be."""
        return self.directory / layout.step_name(step)

    def steps(self) -> list[int]:
        """The committed steps that flaxckpt wrote, in order."""
        return [step for step in self._listed() if self.described(step) is not None]

    def latest(self) -> int | None:
        """The newest committed step."""
        newest_first = reversed(self._listed())
        return next((step for step in newest_first if self.described(step) is not None), None)

    def _listed(self) -> list[int]:
        """The directories whose name is a step, in order."""
        names = location.listed(self.directory)
        found = {step for name in names if (step := layout.parse_step(name)) is not None}
        for deleted in set(self._known) - found:
            self._known.pop(deleted, None)
        return sorted(found)

    def described(self, step: int) -> CheckpointMetadata | None:
        """What is known of `step`; `None` when it is not there, or flaxckpt did not write it.

        A step of ours whose metadata are damaged is there: it must be neither overlooked nor
        deleted.
        """
        # The background thread forgets steps meanwhile, so each look is one operation.
        if (known := self._known.get(step)) is not None:
            return known
        try:
            found = checkpoint_metadata.read(self.path(step))
        except CheckpointNotFoundError:
            return None
        except StoreError:
            raise
        except FlaxckptError:
            return CheckpointMetadata("", 0, 0, {}, {})
        self._known[step] = found
        return found

    def existing(self, step: int | None) -> CheckpointMetadata:
        """What is known of `step`, which must be there; `None` stands for one that never is.

        Raises:
          CheckpointNotFoundError: when it is not there.
        """
        if step is not None and (found := self.described(step)) is not None:
            return found
        steps = self.steps()
        wanted = "no step" if step is None else f"no step {step}"
        if not steps:
            raise CheckpointNotFoundError(
                f"{self.directory} has {wanted}{'' if step is None else ', nor any other'}. Check "
                "the path, or save a step first."
            )
        shown = ", ".join(map(str, steps if len(steps) <= 20 else (*steps[:3], "...", *steps[-3:])))
        raise CheckpointNotFoundError(
            f"{self.directory} has {wanted}. It has {shown}. Ask for one of these."
        )

    def candidates(self, step: int | None, *, older: bool) -> list[int]:
        """`step`, or the newest one, and with `older` those before it, the newest first.

        Raises:
          CheckpointNotFoundError: when there is no such step.
        """
        first = self.latest() if step is None else step
        self.existing(first)
        assert first is not None, "it exists"
        return [first, *(s for s in reversed(self.steps()) if older and s < first)]

    def forget(self, step: int) -> None:
        """Reads `step` anew when it is asked for next."""
        self._known.pop(step, None)

    def infos(self, metric: Metric) -> list[StepInfo]:
        """What retention needs to know of every committed step; `metric` decides what is best."""
        outside = metric() if callable(metric) else None
        known = [(step, self.described(step)) for step in self._listed()]
        found = [(step, described) for step, described in known if described is not None]
        if outside is None:
            assert not callable(metric), "it was called"
            values = {step: choose_metric(d.metrics, metric) for step, d in found}
        else:
            values = {step: _number(outside, step) for step, _ in found}
        # A damaged step may be the best or the last good one, for all we know, and so may one
        # whose metric is not written yet. Whether the user pinned a step is looked up when it is
        # to be deleted, not for all steps at each save.
        unknown = {
            s for s, d in found if not d.attempt or (outside is not None and s not in outside)
        }
        return [
            StepInfo(step, d.committed_ns / 1e9, values[step], pinned=step in unknown)
            for step, d in found
        ]

    def is_pinned(self, step: int) -> bool:
        """Whether `step` is pinned."""
        return (self.path(step) / layout.PINNED).exists()

    def pin(self, step: int, *, pinned: bool) -> None:
        """Pins `step`, or unpins it.

        Raises:
          CheckpointNotFoundError: when there is no such step.
        """
        self.existing(step)
        file = self.path(step) / layout.PINNED
        location.set_flag(file, pinned, fsync=self._fsync)

    def delete(self, step: int) -> None:
        """Deletes `step`.

        Raises:
          CheckpointNotFoundError: when there is no such step.
          StepPinnedError: when it is pinned.
        """
        self.existing(step)
        self.check_not_pinned(step)
        location.remove(self.path(step), fsync=self._fsync)
        self.forget(step)

    def check_not_pinned(self, step: int) -> None:
        """Refuses to delete or replace a pinned step.

        Raises:
          StepPinnedError: when `step` is pinned.
        """
        if self.is_pinned(step):
            raise StepPinnedError(
                f"step {step} of {self.directory} is pinned. Unpin it first: pin({step}, False)."
            )


def choose_metric(metrics: Mapping[str, float], metric: str | None) -> float | None:
    """The metric called `metric`; without a name the only one there is; otherwise `None`."""
    if metric is None:
        return next(iter(metrics.values())) if len(metrics) == 1 else None
    return _number(metrics, metric)


def _number(values: Mapping[Any, float], key: Any) -> float | None:
    """The value at `key`, unless it is missing or NaN."""
    value = values.get(key, math.nan)
    return None if math.isnan(value) else value
