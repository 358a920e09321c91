"""Where a restore finds its step: on the hosts' own disks, or in the run."""

from __future__ import annotations

import dataclasses

from flaxckpt.agreement import Group
from flaxckpt.options import Options
from flaxckpt.runs.fallback import Restore, Restored, restore_intact
from flaxckpt.runs.local_tier import LocalTier
from flaxckpt.runs.run import Run


@dataclasses.dataclass(frozen=True)
class Sources:
    """The run and, if there is one, the tier on the hosts' own disks, to all processes alike."""

    run: Run
    local: LocalTier | None
    group: Group
    options: Options

    def restore(self, restore: Restore, step: int | None, *, older: bool) -> Restored:
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
        steps = self.group.decide(title, lambda: self.run.candidates(step, older=older))
        paths = [(s, self.run.path(s)) for s in steps]
        return restore_intact(paths, restore, self.options, self.group)

    def is_empty(self) -> bool:
        """Whether there is nothing to restore."""
        return self._newest() is None and (self.local is None or self.local.newest() is None)

    def _newest(self) -> int | None:
        """The newest step of the run."""
        return self.group.decide(f"looking into {self.run.directory}", self.run.latest)
