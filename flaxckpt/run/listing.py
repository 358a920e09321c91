"""What lies in a directory: steps, leftovers, other checkpoints."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import re
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, NamedTuple

from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError
from flaxckpt.metadata import step_metadata
from flaxckpt.metadata.step_metadata import CheckpointMetadata
from flaxckpt.options import Options
from flaxckpt.run.run import Run
from flaxckpt.store import layout
from flaxckpt.store.locate import locate
from flaxckpt.store.store import Location, Stray

if TYPE_CHECKING:
    from etils import epath

# What `ls` knows of the steps of a run. It needs no jax.


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
    numbers = {layout.parse_step(name) for name in run.directory.store.checkpoints(run.directory)}
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
    if path.store.can.sizes:
        return bytes_on_disk(path)
    trees = [layout.ITEM]
    for name, item in described.items.items():
        if item.tree is not None:
            trees.append(f"{name}/{item.tree}".rstrip("/"))
    files = sum(f.size for item in described.items.values() for f in item.files.values())
    return files + sum(_in_tree(path / tree) for tree in trees)


def bytes_on_disk(path: Location) -> int:
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
    from flaxckpt.source.checkpoint import read_tree

    try:
        return sum(record.nbytes for record in read_tree(item).records)
    except (CorruptCheckpointError, CheckpointNotFoundError, UnsupportedFormatError, OSError):
        return 0


# What lies in the directory of a run and is no committed step of it. It needs no jax.


def strays(directory: Location, steps: Container[str]) -> list[Stray]:
    """All that is in `directory` beside `steps`, the names of the committed steps."""
    return sorted(directory.store.strays(directory, steps))


# Checkpoints of other libraries in the directory of a run. It needs no jax.


class Other(NamedTuple):
    """A checkpoint of another library.

    Attributes:
      name: of its file or directory.
      format: what its format is called.
      seconds: when it was last changed, since 1970; `None` in a bucket.
      nbytes: the size of its files; `None` in a bucket.
    """

    name: str
    format: str
    seconds: float | None
    nbytes: int | None


def others(directory: Location, names: Iterable[str]) -> list[Other]:
    """Those of `names` in `directory` that a reader knows, in the order of the numbers in them.

    Raises:
      CheckpointNotFoundError: when `directory` itself is a checkpoint.
    """
    from flaxckpt.formats.detect import find_reader  # only here are numpy and TensorStore needed

    if (reader := find_reader(directory)) is not None:
        raise CheckpointNotFoundError(
            f"{directory} is one checkpoint of {reader.NAME}, and no run. Use flaxckpt show "
            f"{directory}."
        )
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(functools.partial(_look_at_other, directory), sorted(names, key=_numbers))
        return [other for other in found if other is not None]


def _look_at_other(directory: Location, name: str) -> Other | None:
    """What is at `name`, if that is a checkpoint."""
    from flaxckpt.formats.detect import find_reader

    path = directory / name
    if (reader := find_reader(path)) is None:
        return None
    if not path.store.can.sizes or (about := path.store.stat(path)) is None:
        return Other(name, reader.NAME, None, None)
    nbytes = bytes_on_disk(path) if about.is_directory else about.size
    return Other(name, reader.NAME, about.seconds, nbytes)


def _numbers(name: str) -> list[str | int]:
    """A key to sort by that puts `step_9` before `step_10`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]


# What is at a path: a run, a checkpoint, or neither.


def open_run(path: epath.PathLike, options: Options) -> Run:
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
    found = directory.store.stat(directory)
    if not (found is not None and found.is_directory) and not directory.children():
        raise CheckpointNotFoundError(f"there is nothing at {directory}. Check the path.")
    return Run(directory)


def is_checkpoint(directory: Location) -> bool:
    """Whether there is a committed checkpoint of flaxckpt, be it damaged."""
    try:
        step_metadata.read(directory)
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
    run = Run(directory)
    return [(step, run.path(step)) for step in run.steps()]
