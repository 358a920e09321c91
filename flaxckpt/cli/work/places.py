"""What is at a path: a run, a checkpoint, or neither."""

from __future__ import annotations

from pathlib import Path

from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError
from flaxckpt.metadata import checkpoint as checkpoint_metadata
from flaxckpt.options import Options
from flaxckpt.runs.run import Run
from flaxckpt.storage import location
from flaxckpt.storage.location import Location, PathLike, locate


def open_run(path: PathLike, options: Options) -> Run:
    """The run at `path`.

    Raises:
      CheckpointNotFoundError: when there is nothing, or one checkpoint.
    """
    directory = locate(path, options)
    if is_checkpoint(directory):
        raise CheckpointNotFoundError(
            f"{directory} is one checkpoint, and no run. Use flaxckpt show {directory}, or the "
            f"run {directory.parent}."
        )
    if not _exists(directory):
        raise CheckpointNotFoundError(f"there is nothing at {directory}. Check the path.")
    return Run(directory, fsync=options.fsync)


def is_checkpoint(directory: Location) -> bool:
    """Whether there is a committed checkpoint of flaxckpt, be it damaged."""
    try:
        checkpoint_metadata.read(directory)
    except CheckpointNotFoundError:
        return False
    except (CorruptCheckpointError, UnsupportedFormatError):
        return True
    return True


def checkpoints_at(directory: Location, options: Options) -> list[tuple[int | None, Location]]:
    """The checkpoints of flaxckpt at a path: the one that is there, or the steps of a run.

    One alone has no step.
    """
    if is_checkpoint(directory):
        return [(None, directory)]
    run = Run(directory, fsync=options.fsync)
    return [(step, run.path(step)) for step in run.steps()]


def _exists(directory: Location) -> bool:
    """Whether there is a directory, or any object below a name."""
    return directory.is_dir() if isinstance(directory, Path) else bool(location.files(directory))
