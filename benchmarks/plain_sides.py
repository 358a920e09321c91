"""What a train loop loses anyway when a file is written beside it, and when its state is held."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np

PIECE = 8 << 20
# About as long as a save of the state of the loop takes.
HELD_SECS = 2.0


class PlainWrite:
    """A thread that writes and fsyncs as many bytes as the state has, from memory that it has."""

    def __init__(self, directory: Path):
        """Writes to a file in `directory`."""
        self._path = directory / "plain"
        self._piece = np.ones(PIECE, np.uint8).data
        self._thread = threading.Thread()

    def save(self, step: int, tree: Any) -> None:
        """Starts writing."""
        del step
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if hasattr(leaf, "nbytes"))
        self._thread = threading.Thread(target=self._write, args=(nbytes,))
        self._thread.start()

    def _write(self, nbytes: int) -> None:
        """Writes `nbytes`."""
        with open(self._path, "wb", buffering=0) as file:
            for start in range(0, nbytes, PIECE):
                file.write(self._piece[: nbytes - start])
            os.fsync(file.fileno())

    def wait(self) -> None:
        """Returns when all is on the disk."""
        self._thread.join()

    def delete(self, step: int) -> None:
        """Deletes the file."""
        del step
        self._path.unlink()


class HeldViews:
    """Views of the state, kept for some time, and nothing else."""

    def __init__(self, directory: Path):
        """Needs no directory."""
        del directory
        self._views: list[np.ndarray] = []
        self._timer = threading.Timer(HELD_SECS, self._views.clear)

    def save(self, step: int, tree: Any) -> None:
        """Takes the views."""
        del step
        self._views += [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        self._timer = threading.Timer(HELD_SECS, self._views.clear)
        self._timer.start()

    def wait(self) -> None:
        """Drops what is still held."""
        self._timer.cancel()
        self._views.clear()

    def delete(self, step: int) -> None:
        """There is nothing to delete."""
        del step
