"""Frequent saves to each host's own disk, beside the rarer ones to the store.

Each process saves what its own devices hold, alone and without waiting for the others. So a local
step is a part of a checkpoint, and only all parts of one and the same save are a checkpoint: a
step is restored if every process has it, from the same save, and finds in it all that its devices
need now. Otherwise the newest step of the store counts.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TypeVar

from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, ItemError
from flaxckpt.items.item import ProcessRank
from flaxckpt.multihost import SINGLE_PROCESS, ProcessGroup
from flaxckpt.options import Options
from flaxckpt.run.retention import Keep
from flaxckpt.run.run import Run
from flaxckpt.run.schedule import Every, Pacer
from flaxckpt.run.writer import Writer, log_removed
from flaxckpt.saving.save import SaveRequest
from flaxckpt.source.checkpoint import Checkpoint, open_checkpoint
from flaxckpt.store import layout
from flaxckpt.store.store import Location

logger = logging.getLogger("flaxckpt")
T = TypeVar("T")

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
        """Saves this process's part of a state, and replaces a local step of that number.

        Args:
          step: of the state.
          now: the time in seconds.
          request_fn: gives what is to be saved.
        """
        if not self.pacer.decide_together(self.group, step, now):
            return
        attempt = self.group.broadcast(f"saving step {step} locally", layout.new_attempt)
        is_there = self._run.described(step) is not None
        request = dataclasses.replace(request_fn(), overwrite=is_there)
        rank = ProcessRank(self.group.index, self.group.count)
        self._writer.save(step, request, SINGLE_PROCESS, attempt=attempt, rank=rank)
        self.pacer.saved(step, now)

    def wait(self) -> None:
        """Waits for the save in flight and raises its failure."""
        self._writer.wait()

    def restore(self, read: Callable[[Checkpoint], T], *, at_least: int) -> tuple[int, T] | None:
        """Reads the newest step that all processes have; `None` if any cannot, or it is too old.

        Args:
          read: reads a checkpoint.
          at_least: the newest step of the store, or -1.
        """
        self.wait()
        step = self.newest()
        if step is None or step < at_least:
            return None
        collective = self.group.collective(f"restoring local step {step}")
        found, problem = None, ""
        with collective.sharing_errors():
            try:
                found = step, read(open_checkpoint(self._run.path(step), is_part=True))
            except (CorruptCheckpointError, CheckpointNotFoundError, ItemError) as error:
                problem = str(error)
        problems = collective.all_gather(problem)
        for index, text in enumerate(problems):
            if text:
                logger.warning(
                    "local step %d is not used, process %d cannot restore it: %s", step, index, text
                )
                return None
        return found

    def rollback(self, step: int) -> None:
        """Sets the steps after `step` aside, on every host."""
        self.wait()
        collective = self.group.collective(f"setting local steps after {step} aside")
        with collective.sharing_errors():
            self._run.set_aside([s for s in self._run.steps() if s > step])
            self._writer.may_have_aside = True
        collective.all_gather(None)

    def newest(self) -> int | None:
        """The newest step that every process has, of the same save."""
        known = ((step, self._run.described(step)) for step in self._run.steps())
        ours = [[step, described.attempt if described else ""] for step, described in known]
        told = self.group.collective("listing local steps").all_gather(ours)
        common = set.intersection(*({(step, attempt) for step, attempt in steps} for steps in told))
        return max((step for step, _ in common), default=None)


def open_tier(
    directory: Location, every: Every, group: ProcessGroup, options: Options, *, async_: bool
) -> LocalTier:
    """The tier of this process below `directory`, without what a dead writer left there."""
    own = directory / f"process_{group.index}"
    own.store.make_directory(own)
    log_removed(own.store.take_over(own))
    run = Run(own)
    return LocalTier(Pacer(every), group, run, Writer(run, KEEP, options, async_=async_))
