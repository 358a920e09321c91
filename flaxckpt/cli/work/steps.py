"""What `ls` knows of the steps of a run. It needs no jax."""

from __future__ import annotations

import concurrent.futures
import functools
import os
from pathlib import Path
from typing import NamedTuple

from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError
from flaxckpt.metadata.checkpoint import CheckpointMetadata
from flaxckpt.runs.run import Run
from flaxckpt.storage import layout, location
from flaxckpt.storage.location import Location

# A bucket takes its time to answer, and answers many at once.
THREADS = 16


class Step(NamedTuple):
    """A committed step.

    Attributes:
      step: its number.
      described: what is known of it.
      nbytes: the size of its files; in a bucket, of what they hold.
      pinned: whether it is pinned.
    """

    step: int
    described: CheckpointMetadata
    nbytes: int
    pinned: bool

    @property
    def damaged(self) -> bool:
        """Whether its metadata cannot be read."""
        return not self.described.attempt


def steps_of(run: Run) -> list[Step]:
    """The committed steps of `run`, in order."""
    numbers = {layout.parse_step(name) for name in location.listed(run.directory)}
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        look = functools.partial(_look, run)
        found = list(pool.map(look, sorted(n for n in numbers if n is not None)))
    return [step for step in found if step is not None]


def _look(run: Run, step: int) -> Step | None:
    """What is known of a step; `None` when there is none."""
    described = run.described(step)
    if described is None:
        return None
    return Step(step, described, bytes_of(run.path(step), described), run.is_pinned(step))


def bytes_of(path: Location, described: CheckpointMetadata) -> int:
    """The size of a checkpoint: of its files or, where a list has no sizes, of its arrays."""
    if isinstance(path, Path):
        return bytes_on_disk(path)
    trees = [layout.ITEM]
    for name, item in described.items.items():
        if item.tree is not None:
            trees.append(f"{name}/{item.tree}".rstrip("/"))
    files = sum(f.size for item in described.items.values() for f in item.files.values())
    return files + sum(_in_tree(path / tree) for tree in trees)


def bytes_on_disk(path: Path) -> int:
    """The size of all files below a directory; some may be deleted meanwhile."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _in_tree(item: Location) -> int:
    """The size of the arrays of a tree; nothing when that cannot be read."""
    # On a disk nobody needs to know it, nor numpy, without which `ls` takes half the time.
    from flaxckpt.checkpoint import read_tree
    from flaxckpt.leaves.lazy import total_nbytes

    try:
        return total_nbytes(read_tree(item).records)
    except (CorruptCheckpointError, CheckpointNotFoundError, UnsupportedFormatError, OSError):
        return 0
