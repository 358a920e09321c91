"""The steps of a run."""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flaxckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FlaxckptError,
    InvalidStepError,
    StepPinnedError,
    StoreError,
)
from flaxckpt.metadata import step_metadata
from flaxckpt.metadata.step_metadata import CheckpointMetadata, PastSave, Ranking
from flaxckpt.options import Options
from flaxckpt.run.retention import Metric, StepInfo
from flaxckpt.run.schedule import Pacer
from flaxckpt.store import layout
from flaxckpt.store.store import Location

if TYPE_CHECKING:
    from flaxckpt.source.checkpoint import Checkpoint

# The steps that a loop comes by, as it gives them.


def check_step(step: Any) -> int:
    """`step` as an int: Python, numpy and jax integers are accepted.

    Raises:
      InvalidStepError: for anything else, and for negative numbers.
    """
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)
    except TypeError:
        raise InvalidStepError(f"a step must be an integer, got {step!r}. Pass an int.") from None
    if number < 0:
        raise InvalidStepError(f"a step must not be negative, got {number}. Count from 0.")
    return number


def warn_jumped_over(pacer: Pacer, step: int) -> None:
    """Warns when the loop never came by a step at which a save was asked for."""
    if pacer.last is not None and (missed := pacer.every.jumped_over(step, last=pacer.last)):
        warnings.warn(
            f"the loop went from step {pacer.last} to {step} and never came by "
            f"{', '.join(map(str, missed))}, where a save was asked for; saving {step} instead",
            stacklevel=5,  # the loop, over `checked`, the call and the visit
        )


# Waiting for the steps of a run as somebody else commits them.


def follow(
    steps: Callable[[], Sequence[int]],
    clock: Callable[[], float],
    timeout_secs: float | None,
    poll_secs: float,
) -> Iterator[int]:
    """Yields each of `steps()` that is newer than the steps before it, as it appears.

    After a rollback, which takes the newest steps away, it yields the steps of the new timeline.

    Args:
      steps: lists the committed steps.
      clock: seconds.
      timeout_secs: ends after so many seconds without a new step; `None` for never.
      poll_secs: how often to look.
    """
    seen, since = -1, clock()
    while True:
        found = steps()
        seen = min(seen, found[-1] if found else -1)  # the run was rolled back
        for step in found:
            if step > seen:
                seen = step
                yield step
                since = clock()
        if timeout_secs is not None and clock() - since >= timeout_secs:
            return
        threading.Event().wait(poll_secs)


# The directory of a run: which steps are committed, what is known of them, and their deletion.


class Run:
    """The steps in a run directory.

    A step is a directory with a number for a name and our `_CHECKPOINT_METADATA` in it; it is
    committed when it has that name. Everything else in the directory is not looked at.
    """

    def __init__(self, directory: Location):
        """The run in `directory`, which need not exist."""
        self.directory = directory
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
        names = self.directory.store.checkpoints(self.directory)
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
            found = step_metadata.read(self.path(step))
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

    def ranking(self) -> Ranking | None:
        """How the run ranks its steps: what its newest readable step records."""
        steps = map(self.described, reversed(self._listed()))
        return next((step.ranking for step in steps if step and step.attempt), None)

    def infos(self, metric: Metric | None) -> list[StepInfo]:
        """What retention needs to know of every committed step, ranked by `metric`."""
        outside = metric() if callable(metric) else None
        known = [(step, self.described(step)) for step in self._listed()]
        found = [(step, described) for step, described in known if described is not None]
        if outside is None:
            assert not callable(metric), "it was called"
            values = {step: _choose_metric(d.metrics, metric) for step, d in found}
        else:
            values = {step: outside.get(step) for step, _ in found}
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
        file.store.set_flag(file, present=pinned)

    def delete(self, step: int) -> None:
        """Deletes `step`.

        Raises:
          CheckpointNotFoundError: when there is no such step.
          StepPinnedError: when it is pinned.
        """
        self.existing(step)
        self.check_not_pinned(step)
        self.directory.store.remove(self.path(step))
        self.forget(step)

    def later(self, step: int) -> list[int]:
        """The steps after `step`, which is there; none of them is pinned.

        Raises:
          CheckpointNotFoundError: if there is no such step.
          StepPinnedError: if a later step is pinned.
        """
        self.existing(step)
        later = [s for s in self.steps() if s > step]
        for pinned in later:
            self.check_not_pinned(pinned)
        return later

    def set_aside(self, steps: Sequence[int]) -> None:
        """Makes `steps` invisible to every reader, the newest first."""
        for step in sorted(steps, reverse=True):
            self.directory.store.set_aside(self.path(step))
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


def _choose_metric(metrics: Mapping[str, float], metric: str | None) -> float | None:
    """The metric called `metric`; without a name the only one there is; otherwise `None`."""
    if metric is None:
        return next(iter(metrics.values())) if len(metrics) == 1 else None
    return metrics.get(metric)


# What happened in a run, as its newest step remembers it: for people.


def history(run: Run, options: Options = Options()) -> Sequence[PastSave]:
    """The saves of `run` that its newest step knows of, and that one, in order.

    Those that `run.steps()` lacks have been deleted. It is empty when there is no step, or the
    newest cannot be read.
    """
    from flaxckpt.source.checkpoint import open_checkpoint  # `ls` does without TensorStore

    newest = run.latest()
    if newest is None:
        return ()
    try:
        checkpoint = open_checkpoint(run.path(newest), options)
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return ()
    return (*checkpoint.tree.past, as_past(checkpoint, newest))


def as_past(checkpoint: Checkpoint, step: int) -> PastSave:
    """A step as the one after it remembers it; for how long it blocked the loop is not known."""
    described, records = checkpoint.described, checkpoint.tree.records
    seconds = (described.committed_ns - described.started_ns) / 1e9
    time, metrics = described.committed_ns / 1e9, described.metrics
    nbytes = sum(record.nbytes for record in records)
    return PastSave(step, time, seconds, 0.0, len(records), nbytes, metrics)
