"""Opening what is at a path, whoever wrote it."""

from __future__ import annotations

from flaxckpt.checkpoint import open_checkpoint
from flaxckpt.errors import CheckpointNotFoundError
from flaxckpt.options import Options
from flaxckpt.restoring.source import Source
from flaxckpt.storage.location import PathLike, locate


def open_source(path: PathLike, options: Options) -> Source:
    """Opens the checkpoint at `path`, of flaxckpt or of any format that has a reader.

    Raises:
      CheckpointNotFoundError: when there is none.
      CorruptCheckpointError: when it is damaged.
    """
    location = locate(path, options)
    try:
        return open_checkpoint(location, options)
    except CheckpointNotFoundError as error:
        # Only now: the readers take their time to be imported.
        from flaxckpt.formats.foreign import open_foreign

        return open_foreign(location, error)
