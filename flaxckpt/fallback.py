"""Going back to an older step when the newest is damaged: never silently."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flaxckpt.checkpoint import Checkpoint, open_checkpoint
from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from flaxckpt.options import Options
from flaxckpt.restore import RestoreReport
from flaxckpt.verify import verify

Restore = Callable[[Checkpoint], tuple[Any, RestoreReport]]


def restore_intact(
    paths: Sequence[tuple[int, Path]], restore: Restore, options: Options
) -> tuple[int, Any, RestoreReport]:
    """Restores the first of some steps that is not damaged.

    Args:
      paths: steps and where they are, the preferred first.
      restore: restores one of them.
      options: how to verify the steps after the first, before they are trusted.

    Returns:
      The step, its tree, and a report that names the steps that were passed over.

    Raises:
      CorruptCheckpointError: the error of the first step, when all are damaged.
    """
    damaged: list[tuple[int, str]] = []
    first_error: CorruptCheckpointError | None = None
    for left, (step, path) in zip(reversed(range(len(paths))), paths, strict=True):
        try:
            if damaged:
                verify(path, strict=True, options=options)
            tree, report = restore(open_checkpoint(path))
        except CorruptCheckpointError as error:
            first_error = first_error or error
            damaged.append((step, str(error)))
            if left:
                warnings.warn(f"step {step} is damaged and passed over: {error}", stacklevel=3)
            continue
        except CheckpointNotFoundError:
            if not damaged:
                raise
            continue  # deleted since it was listed
        return step, tree, dataclasses.replace(report, damaged=tuple(damaged))
    assert first_error is not None, "the caller gives at least one step"
    raise first_error
