"""What happened in a run, as its newest step remembers it: for people."""

from __future__ import annotations

from collections.abc import Sequence

from flaxckpt.checkpoint import Checkpoint, open_checkpoint
from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from flaxckpt.leaves.lazy import total_nbytes
from flaxckpt.metadata.past import PastSave
from flaxckpt.options import Options
from flaxckpt.runs.run import Run


def history(run: Run, options: Options = Options()) -> Sequence[PastSave]:
    """The saves of `run` that its newest step knows of, and that one, in order.

    Those that `run.steps()` lacks have been deleted. It is empty when there is no step, or the
    newest cannot be read.
    """
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
    return PastSave(step, time, seconds, 0.0, len(records), total_nbytes(records), metrics)
