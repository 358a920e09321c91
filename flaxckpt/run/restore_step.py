"""Restoring a step of a run: from which place, and which step instead if it is damaged."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from flaxckpt.inspecting import verify
from flaxckpt.items.item import ProcessRank
from flaxckpt.items.item_kinds import Finish, finish, read_items
from flaxckpt.multihost import ProcessGroup
from flaxckpt.options import Options
from flaxckpt.restoring.restore import Initialise, restore_tree
from flaxckpt.restoring.restore_plan import RestoreArguments
from flaxckpt.restoring.restore_report import RestoreReport
from flaxckpt.run.local_tier import LocalTier
from flaxckpt.run.run import Run, check_step
from flaxckpt.source.checkpoint import Checkpoint, open_checkpoint
from flaxckpt.store.store import Location

OnCorrupt = Literal["raise", "previous"]
_Unreadable = CorruptCheckpointError | CheckpointNotFoundError
_UNREADABLE: dict[str, type[_Unreadable]] = {
    kind.__name__: kind for kind in (CorruptCheckpointError, CheckpointNotFoundError)
}


@dataclasses.dataclass(frozen=True)
class RestoreRequest:
    """The arguments of one restore from a run.

    `initialise` makes what the step lacks.

    Raises:
      ValueError: if `on_corrupt` is neither `raise` nor `previous`.
    """

    target: Any
    how: RestoreArguments
    step: int | None
    on_corrupt: OnCorrupt
    items: Mapping[str, Any] | None
    initialise: Initialise | None = None

    def __post_init__(self) -> None:
        """Checks `on_corrupt`."""
        if self.on_corrupt not in ("raise", "previous"):
            raise ValueError(f"on_corrupt={self.on_corrupt!r} must be raise or previous")


class RestoredStep(NamedTuple):
    """A restored step: its number, its tree, what was done, and the requested items."""

    step: int
    tree: Any
    report: RestoreReport
    items: dict[str, Any]


class _ReadStep(NamedTuple):
    """A step that was read and checked; its items are not put into their targets yet."""

    tree: Any
    report: RestoreReport
    items: dict[str, Finish]


@dataclasses.dataclass(frozen=True)
class StepSources:
    """The run and, if there is one, the tier on the hosts' own disks.

    A restore takes the newest step of both. A step that is asked for by number is one of the run,
    as the steps of the local tier come and go. All processes of `group` take the same step.
    """

    run: Run
    local: LocalTier | None
    group: ProcessGroup
    options: Options

    def restore(self, request: RestoreRequest) -> RestoredStep:
        """Restores the tree and the items of one step, or neither.

        Raises:
          CheckpointNotFoundError: if there is no such step, or it lacks an item.
          CorruptCheckpointError: if the step is damaged; with `on_corrupt="previous"`, if all are.
        """
        read = functools.partial(self._read, request)
        step = None if request.step is None else check_step(request.step)
        found = None
        if step is None and self.local is not None:
            newest = self._newest()
            found = self.local.restore(read, at_least=-1 if newest is None else newest)
        if found is None:
            title = f"choosing the step of {self.run.directory} to restore"
            older = request.on_corrupt == "previous"
            steps = self.group.broadcast(title, lambda: self.run.candidates(step, older=older))
            found = self._read_intact([(s, self.run.path(s)) for s in steps], request)
        number, done = found
        return RestoredStep(number, done.tree, done.report, finish(done.items))

    def is_empty(self) -> bool:
        """Whether there is nothing to restore."""
        return self._newest() is None and (self.local is None or self.local.newest() is None)

    def _newest(self) -> int | None:
        """The newest step of the run."""
        return self.group.broadcast(f"looking into {self.run.directory}", self.run.latest)

    def _read(self, request: RestoreRequest, checkpoint: Checkpoint) -> _ReadStep:
        """Reads what is requested of an open checkpoint."""
        options, rank = self.options, ProcessRank(self.group.index, self.group.count)
        restored = restore_tree(
            checkpoint, request.target, request.how, options, request.initialise
        )
        return _ReadStep(*restored, read_items(checkpoint, request.items or {}, rank, options))

    def _read_intact(
        self, paths: Sequence[tuple[int, Location]], request: RestoreRequest
    ) -> tuple[int, _ReadStep]:
        """Reads the first of some steps that no process finds damaged; warns of those before.

        Args:
          paths: steps and their directories, the preferred first.
          request: what to read of it.

        Raises:
          CorruptCheckpointError: the error of the first step, if all are damaged.
          ProcessFailedError: if another process failed for another reason.
        """
        damaged: list[tuple[int, str]] = []
        first_error: _Unreadable | None = None
        for left, (step, path) in zip(reversed(range(len(paths))), paths, strict=True):
            collective = self.group.collective(f"restoring {path}")
            found: _ReadStep | None = None
            ours: _Unreadable | None = None
            with collective.sharing_errors():
                try:
                    if damaged and self.group.is_process_0:  # trusted only if all of it verifies
                        verify(path, strict=True, options=self.options)
                    found = self._read(request, open_checkpoint(path, self.options))
                except (CorruptCheckpointError, CheckpointNotFoundError) as error:
                    ours = error
            told = collective.all_gather(ours and [type(ours).__name__, str(ours)])
            failure = ours or _error_of_another(told)
            if found is not None and failure is None:
                report = dataclasses.replace(found.report, damaged=tuple(damaged))
                return step, found._replace(report=report)
            if isinstance(failure, CheckpointNotFoundError):
                if not damaged:
                    raise failure
                continue  # deleted since it was listed
            first_error = first_error or failure
            damaged.append((step, str(failure)))
            if left:
                warnings.warn(f"skipping damaged step {step}: {failure}", stacklevel=5)
        assert first_error is not None, "there is at least one step"
        raise first_error


def _error_of_another(told: Sequence[Any]) -> _Unreadable | None:
    """The error of the first process that had one."""
    failed = ((index, found) for index, found in enumerate(told) if found is not None)
    return next((_UNREADABLE[kind](f"process {i}: {text}") for i, (kind, text) in failed), None)
