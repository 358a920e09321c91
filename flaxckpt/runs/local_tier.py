"""Frequent saves to each host's own disk, beside the rarer ones to the store.

Each process saves what its own devices hold, alone and without waiting for the others. So a local
step is a part of a checkpoint, and only all of them, of one and the same save, are worth anything:
a step is restored when every process has it, from the same save, and finds in it all that its
devices need now. Otherwise the store has the step that counts.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flaxckpt.agreement import ALONE, Group
from flaxckpt.checkpoint import open_checkpoint
from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, ItemError
from flaxckpt.items.encoded import Place
from flaxckpt.options import Options
from flaxckpt.restoring.report import RestoreReport
from flaxckpt.retention import Keep
from flaxckpt.runs.fallback import Restore, Restored
from flaxckpt.runs.run import Run
from flaxckpt.runs.writer import Retention, Writer, log_removed
from flaxckpt.schedule import Every, Pacer
from flaxckpt.storage import layout
from flaxckpt.storage.commit import remove_abandoned

logger = logging.getLogger("flaxckpt")

# One is being written while the others are still needed: processes are not always at one step.
KEEP = Keep(last=2)
# Gives what is saved, when it is: the state and the items.
SavedFn = Callable[[], tuple[Any, Mapping[str, Any]]]


@dataclasses.dataclass
class LocalTier:
    """The steps of one process on its host's own disk.

    Attributes:
      pacer: when they are saved.
      group: all processes of the job.
    """

    pacer: Pacer
    group: Group
    _run: Run
    _writer: Writer

    def save_if_due(self, step: int, now: float, saved_fn: SavedFn) -> None:
        """Saves what this process has of a state; a local step of that number is replaced.

        Args:
          step: of the state.
          now: the time in seconds.
          saved_fn: gives the state and the items.
        """
        if self.group.paced(self.pacer, step, now):
            self._save(step, *saved_fn())
            self.pacer.saved(step, now)

    def _save(self, step: int, state: Any, items: Mapping[str, Any]) -> None:
        """Saves now."""
        attempt = self.group.decide(f"saving step {step} locally", layout.new_attempt)
        overwrite = self._run.described(step) is not None
        place = Place(self.group.index, self.group.count)
        how: dict[str, Any] = {"group": ALONE, "attempt": attempt, "place": place}
        self._writer.save(step, state, {}, {}, overwrite=overwrite, items=items, **how)

    def wait(self) -> None:
        """Waits for the save in flight and raises its failure."""
        self._writer.wait()

    def restore(self, restore: Restore, at_least: int) -> Restored | None:
        """The newest step that all processes can restore; `None` when the store has a newer one.

        Args:
          restore: restores a checkpoint.
          at_least: the newest step of the store, or -1.
        """
        self.wait()
        step = self.newest()
        if step is None or step < at_least:
            return None
        meeting = self.group.meet(f"restoring local step {step}")
        with meeting.reporting():
            found, problem = self._tried(step, restore)
        problems = meeting.together(problem)
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
        told = self.group.meet("listing local steps").together(ours)
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
    directory: Path, every: Every, group: Group, options: Options, *, async_: bool
) -> LocalTier:
    """The tier of this process below `directory`; what a writer that died left is removed."""
    own = directory / f"process_{group.index}"
    own.mkdir(parents=True, exist_ok=True)
    log_removed(remove_abandoned(own, claims=False))
    run = Run(own, fsync=options.fsync)
    writer = Writer(run, Retention(KEEP, None, "min"), options, async_=async_)
    return LocalTier(Pacer(every), group, run, writer)
