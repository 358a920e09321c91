"""What a run restores from: its steps, and the hosts' own disks."""

from __future__ import annotations

import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, ItemError
from flaxckpt.inspecting import verify
from flaxckpt.items.item import ProcessRank
from flaxckpt.items.kind import WantedItems
from flaxckpt.multihost import SINGLE_PROCESS, ProcessGroup
from flaxckpt.options import Options
from flaxckpt.restoring.restore import Initialise, restore_tree
from flaxckpt.restoring.restore_plan import RestoreArguments
from flaxckpt.restoring.restore_report import RestoreReport
from flaxckpt.run.retention import Keep
from flaxckpt.run.run import Run, check_step
from flaxckpt.run.schedule import Every, Pacer
from flaxckpt.run.writer import Writer, log_removed
from flaxckpt.saving.save import SaveRequest
from flaxckpt.source.checkpoint import Checkpoint, open_checkpoint
from flaxckpt.store import layout
from flaxckpt.store.local import remove_abandoned
from flaxckpt.store.store import Location

# Going back to an older step when the newest is damaged: never silently.


Unreadable = CorruptCheckpointError | CheckpointNotFoundError
Restore = Callable[[Checkpoint], tuple[Any, RestoreReport]]
# The step, its tree, and what was done.
RestoredStep = tuple[int, Any, RestoreReport]
_UNREADABLE: dict[str, type[Unreadable]] = {
    kind.__name__: kind for kind in (CorruptCheckpointError, CheckpointNotFoundError)
}


def restore_intact(
    paths: Sequence[tuple[int, Location]], restore: Restore, options: Options, group: ProcessGroup
) -> RestoredStep:
    """Restores the first of some steps that is not damaged, the same on all processes of `group`.

    Args:
      paths: steps and where they are, the preferred first.
      restore: restores one of them.
      options: how to verify the steps after the first, before they are trusted.
      group: the processes that restore; what one of them cannot read, none of them takes.

    Returns:
      The step, its tree, and a report that names the steps that were passed over.

    Raises:
      CorruptCheckpointError: the error of the first step, when all are damaged.
      ProcessFailedError: when another process failed for another reason.
    """
    damaged: list[tuple[int, str]] = []
    first_error: Unreadable | None = None
    for left, (step, path) in zip(reversed(range(len(paths))), paths, strict=True):
        collective = group.collective(f"restoring {path}")
        with collective.sharing_errors():
            is_verified = bool(damaged) and group.is_process_0
            found, error = _tried(path, restore, options, is_verified=is_verified)
        error = _first(collective.all_gather(error and [type(error).__name__, str(error)]), error)
        if found is not None and error is None:
            return step, found[0], dataclasses.replace(found[1], damaged=tuple(damaged))
        if isinstance(error, CheckpointNotFoundError):
            if not damaged:
                raise error
            continue  # deleted since it was listed
        first_error = first_error or error
        damaged.append((step, str(error)))
        if left:
            warnings.warn(f"step {step} is damaged and passed over: {error}", stacklevel=3)
    assert first_error is not None, "the caller gives at least one step"
    raise first_error


def _tried(
    path: Location, restore: Restore, options: Options, *, is_verified: bool
) -> tuple[tuple[Any, RestoreReport] | None, Unreadable | None]:
    """What `restore` makes of the checkpoint at `path`, or why that cannot be read."""
    try:
        if is_verified:
            verify(path, strict=True, options=options)
        return restore(open_checkpoint(path, options)), None
    except (CorruptCheckpointError, CheckpointNotFoundError) as error:
        return None, error


def _first(told: Sequence[Any], ours: Unreadable | None) -> Unreadable | None:
    """Our own error; otherwise that of the first process that had one."""
    for index, found in enumerate(told):
        if found is not None and ours is None:
            kind = _UNREADABLE[found[0]]
            return kind(f"process {index}: {found[1]}")
    return ours


# Frequent saves to each host's own disk, beside the rarer ones to the store.
#
# Each process saves what its own devices hold, alone and without waiting for the others. So a local
# step is a part of a checkpoint, and only all of them, of one and the same save, are worth
# anything: a step is restored when every process has it, from the same save, and finds in it all
# that its devices need now. Otherwise the store has the step that counts.


logger = logging.getLogger("flaxckpt")

# One is being written while the others are still needed: processes are not always at one step.
KEEP = Keep(last=2)
# Gives what is to be saved, once a save is due.
RequestFn = Callable[[], SaveRequest]


@dataclasses.dataclass
class LocalTier:
    """The steps of one process on its host's own disk.

    Attributes:
      pacer: when they are saved.
      group: all processes of the job.
    """

    pacer: Pacer
    group: ProcessGroup
    _run: Run
    _writer: Writer

    def save_if_due(self, step: int, now: float, request_fn: RequestFn) -> None:
        """Saves what this process has of a state; a local step of that number is replaced.

        Args:
          step: of the state.
          now: the time in seconds.
          request_fn: gives what is to be saved.
        """
        if self.group.is_due(self.pacer, step, now):
            self._save(step, request_fn())
            self.pacer.saved(step, now)

    def _save(self, step: int, request: SaveRequest) -> None:
        """Saves now."""
        attempt = self.group.broadcast(f"saving step {step} locally", layout.new_attempt)
        request = dataclasses.replace(request, overwrite=self._run.described(step) is not None)
        rank = ProcessRank(self.group.index, self.group.count)
        self._writer.save(step, request, SINGLE_PROCESS, attempt=attempt, rank=rank)

    def wait(self) -> None:
        """Waits for the save in flight and raises its failure."""
        self._writer.wait()

    def restore(self, restore: Restore, at_least: int) -> RestoredStep | None:
        """The newest step that all processes can restore; `None` when the store has a newer one.

        Args:
          restore: restores a checkpoint.
          at_least: the newest step of the store, or -1.
        """
        self.wait()
        step = self.newest()
        if step is None or step < at_least:
            return None
        collective = self.group.collective(f"restoring local step {step}")
        with collective.sharing_errors():
            found, problem = self._tried(step, restore)
        problems = collective.all_gather(problem)
        if found is not None and not any(problems):
            return step, *found
        index, text = next((i, text) for i, text in enumerate(problems) if text)
        logger.warning(
            "local step %d is not used, process %d cannot restore it: %s", step, index, text
        )
        return None

    def newest(self) -> int | None:
        """The newest step that every process has, of the same save."""
        ours = [[step, self._attempt(step)] for step in self._run.steps()]
        told = self.group.collective("listing local steps").all_gather(ours)
        common = set.intersection(*({(step, attempt) for step, attempt in steps} for steps in told))
        return max((step for step, _ in common), default=None)

    def _attempt(self, step: int) -> str:
        """The id of the save that wrote `step`."""
        described = self._run.described(step)
        return described.attempt if described else ""

    def _tried(self, step: int, restore: Restore) -> tuple[tuple[Any, RestoreReport] | None, str]:
        """What `restore` makes of `step`, or why this process has not all that it needs."""
        try:
            return restore(open_checkpoint(self._run.path(step), is_part=True)), ""
        except (CorruptCheckpointError, CheckpointNotFoundError, ItemError) as error:
            return None, str(error)


def open_tier(
    directory: Path, every: Every, group: ProcessGroup, options: Options, *, async_: bool
) -> LocalTier:
    """The tier of this process below `directory`; what a writer that died left is removed."""
    own = directory / f"process_{group.index}"
    own.mkdir(parents=True, exist_ok=True)
    log_removed(remove_abandoned(own, claims=False))
    run = Run(own, fsync=options.fsync)
    writer = Writer(run, KEEP, options, async_=async_)
    return LocalTier(Pacer(every), group, run, writer)


# Where a restore finds its step: on the hosts' own disks, or in the run.


@dataclasses.dataclass(frozen=True)
class Sources:
    """The run and, if there is one, the tier on the hosts' own disks, to all processes alike."""

    run: Run
    local: LocalTier | None
    group: ProcessGroup
    options: Options

    def restore(self, restore: Restore, step: int | None, *, older: bool) -> RestoredStep:
        """Restores `step`, or the newest one, wherever that is.

        Args:
          restore: restores a checkpoint.
          step: which one, of the run; `None` for the newest of both.
          older: whether a step of the run before it will do when it is damaged.

        Raises:
          CheckpointNotFoundError: when there is no such step.
          CorruptCheckpointError: when it is damaged, with `older` all are.
        """
        if step is None and self.local is not None:
            newest = self._newest()
            found = self.local.restore(restore, -1 if newest is None else newest)
            if found is not None:
                return found
        title = f"choosing the step of {self.run.directory} to restore"
        steps = self.group.broadcast(title, lambda: self.run.candidates(step, older=older))
        paths = [(s, self.run.path(s)) for s in steps]
        return restore_intact(paths, restore, self.options, self.group)

    def is_empty(self) -> bool:
        """Whether there is nothing to restore."""
        return self._newest() is None and (self.local is None or self.local.newest() is None)

    def _newest(self) -> int | None:
        """The newest step of the run."""
        return self.group.broadcast(f"looking into {self.run.directory}", self.run.latest)


# What is to be restored of a run, and doing it.


OnCorrupt = Literal["raise", "previous"]


class Restored(NamedTuple):
    """What was restored: the step, its tree, what was done, and the items that were asked for."""

    step: int
    tree: Any
    report: RestoreReport
    items: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Restoration:
    """A restore that a manager is asked for; the attributes are the arguments of its `restore`.

    What the step lacks may be made by `initialise`.

    Raises:
      ValueError: when `on_corrupt` is something else.
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

    def carry_out(self, sources: Sources) -> Restored:
        """Restores the tree and the items: both of one step, or neither."""
        restore = functools.partial(
            restore_tree,
            target=self.target,
            how=self.how,
            options=sources.options,
            initialise=self.initialise,
        )
        rank = ProcessRank(sources.group.index, sources.group.count)
        items = WantedItems(self.items or {}, rank, sources.options)
        step = self.step if self.step is None else check_step(self.step)
        older = self.on_corrupt == "previous"
        found = sources.restore(items.with_tree(restore), step, older=older)
        return Restored(*found, items.finish())
