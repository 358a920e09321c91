"""Opening a checkpoint of any format, without jax if flaxckpt wrote it."""

from __future__ import annotations

from flaxckpt.errors import CheckpointNotFoundError
from flaxckpt.options import Options
from flaxckpt.source.checkpoint import Source, open_checkpoint
from flaxckpt.store.store import PathLike, locate


def open_source(path: PathLike, options: Options) -> Source:
    """Opens the checkpoint at `path`, of flaxckpt or of any format that has a reader.

    Raises:
      CheckpointNotFoundError: if there is no checkpoint at `path`.
      CorruptCheckpointError: if its metadata is damaged.
    """
    location = locate(path, options)
    try:
        return open_checkpoint(location, options)
    except CheckpointNotFoundError as error:
        # Imported only here, because the readers of other formats are slow to import.
        from flaxckpt.formats.detect import open_foreign

        return open_foreign(location, error)
