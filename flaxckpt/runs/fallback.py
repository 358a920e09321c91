"""Going back to an older step when the newest is damaged: never silently."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from flaxckpt.agreement import Group
from flaxckpt.checkpoint import Checkpoint, open_checkpoint
from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from flaxckpt.looking.verify import verify
from flaxckpt.options import Options
from flaxckpt.restoring.report import RestoreReport
from flaxckpt.storage.location import Location

Unreadable = CorruptCheckpointError | CheckpointNotFoundError
Restore = Callable[[Checkpoint], tuple[Any, RestoreReport]]
# The step, its tree, and what was done.
Restored = tuple[int, Any, RestoreReport]
_UNREADABLE: dict[str, type[Unreadable]] = {
    kind.__name__: kind for kind in (CorruptCheckpointError, CheckpointNotFoundError)
}


def restore_intact(
    paths: Sequence[tuple[int, Location]], restore: Restore, options: Options, group: Group
) -> Restored:
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
        meeting = group.meet(f"restoring {path}")
        with meeting.reporting():
            is_verified = bool(damaged) and group.is_leader
            found, error = _tried(path, restore, options, is_verified=is_verified)
        error = _first(meeting.together(error and [type(error).__name__, str(error)]), error)
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
