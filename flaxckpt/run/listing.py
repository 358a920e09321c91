"""What is in a run directory: steps, unfinished saves, checkpoints of other libraries.

Without a bucket and other formats it needs neither numpy nor jax.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import re
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, NamedTuple

from flaxckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidMetricError,
    UnsupportedFormatError,
)
from flaxckpt.metadata import step_metadata
from flaxckpt.metadata.step_metadata import CheckpointMetadata, Mode, Ranking
from flaxckpt.options import Options
from flaxckpt.run.run import Run
from flaxckpt.store import layout
from flaxckpt.store.locate import locate
from flaxckpt.store.store import Location, Stray

if TYPE_CHECKING:
    from etils import epath

# The steps of a run.


# A bucket is slow to answer, and answers many requests at once.
THREADS = 16


class ListedStep(NamedTuple):
    """A committed step.

    Attributes:
      step: the step.
      described: its times, metrics and metadata.
      nbytes: the size of its files; in a bucket, of its arrays and items.
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


def steps_of(run: Run) -> list[ListedStep]:
    """The committed steps of `run`, in order."""
    numbers = {layout.parse_step(name) for name in run.directory.store.checkpoints(run.directory)}
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        look = functools.partial(_look, run)
        found = list(pool.map(look, sorted(n for n in numbers if n is not None)))
    return [step for step in found if step is not None]


def _look(run: Run, step: int) -> ListedStep | None:
    """The step; `None` if it does not exist."""
    described = run.described(step)
    if described is None:
        return None
    return ListedStep(step, described, bytes_of(run.path(step), described), run.is_pinned(step))


def ranking_of(
    run: Run, steps: Iterable[ListedStep], metric: str | None, mode: Mode | None
) -> Ranking:
    """How steps are ranked: by `metric` and `mode`, or else as the run records.

    Raises:
      InvalidMetricError: if no step has the metric, or neither names the metric or the mode.
    """
    recorded = run.ranking()
    names = sorted({name for step in steps for name in step.described.metrics})
    if not names:
        raise InvalidMetricError(f"no step of {run.directory} has a metric.")
    if metric is not None and metric not in names:
        raise InvalidMetricError(
            f"no step of {run.directory} has the metric {metric}. The steps have "
            f"{', '.join(names)}. Choose one of them with --metric."
        )
    if recorded is not None and metric in (None, recorded.metric):
        return Ranking(recorded.metric, mode or recorded.mode)
    if metric is None and len(names) > 1:
        raise InvalidMetricError(
            f"the steps have the metrics {', '.join(names)}, and the run does not record which of "
            "them ranks steps. Choose one with --metric."
        )
    if mode is None:
        raise InvalidMetricError(
            f"the run does not record whether the smallest or the largest {metric or names[0]} is "
            "best. Pass --mode min or --mode max."
        )
    return Ranking(metric or names[0], mode)


def bytes_of(path: Location, described: CheckpointMetadata) -> int:
    """The size of the files of a checkpoint; in a bucket, of its arrays and items."""
    if path.store.can.sizes:
        return bytes_on_disk(path)
    trees = [layout.ITEM]
    for name, item in described.items.items():
        if item.tree is not None:
            trees.append(f"{name}/{item.tree}".rstrip("/"))
    files = sum(f.size for item in described.items.values() for f in item.files.values())
    return files + sum(_in_tree(path / tree) for tree in trees)


def bytes_on_disk(path: Location) -> int:
    """The size of all files below a directory, some of which may be deleted while it counts."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _in_tree(item: Location) -> int:
    """The size of the arrays of a tree; 0 if it is unreadable."""
    # Only a bucket needs it; without numpy, `ls` takes half the time.
    from flaxckpt.source.checkpoint import read_tree

    try:
        return sum(record.nbytes for record in read_tree(item).records)
    except (CorruptCheckpointError, CheckpointNotFoundError, UnsupportedFormatError, OSError):
        return 0


# Everything else in a run directory.


def strays(directory: Location, steps: Container[str]) -> list[Stray]:
    """Everything in `directory` except `steps`, the names of the committed steps."""
    return sorted(directory.store.strays(directory, steps))


# Checkpoints of other libraries in a run directory.


class OtherCheckpoint(NamedTuple):
    """A checkpoint of another library.

    Attributes:
      name: the name of its file or directory.
      format: the name of its format.
      seconds: the time of its last change, since 1970; `None` in a bucket.
      nbytes: the size of its files; `None` in a bucket.
    """

    name: str
    format: str
    seconds: float | None
    nbytes: int | None


def others(directory: Location, names: Iterable[str]) -> list[OtherCheckpoint]:
    """The checkpoints among `names` in `directory`, sorted by the numbers in their names.

    Raises:
      CheckpointNotFoundError: if `directory` itself is a checkpoint.
    """
    from flaxckpt.formats.detect import find_reader  # only here are numpy and TensorStore needed

    if (reader := find_reader(directory)) is not None:
        raise CheckpointNotFoundError(
            f"{directory} is a single checkpoint of {reader.NAME}, not a run. Use flaxckpt show "
            f"{directory}."
        )
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(functools.partial(_look_at_other, directory), sorted(names, key=_numbers))
        return [other for other in found if other is not None]


def _look_at_other(directory: Location, name: str) -> OtherCheckpoint | None:
    from flaxckpt.formats.detect import find_reader

    path = directory / name
    if (reader := find_reader(path)) is None:
        return None
    if not path.store.can.sizes or (about := path.store.stat(path)) is None:
        return OtherCheckpoint(name, reader.NAME, None, None)
    nbytes = bytes_on_disk(path) if about.is_directory else about.size
    return OtherCheckpoint(name, reader.NAME, about.seconds, nbytes)


def _numbers(name: str) -> list[str | int]:
    """A sort key that puts `step_9` before `step_10`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]


# A path: a run, a checkpoint, or neither.


def open_run(path: epath.PathLike, options: Options) -> Run:
    """The run at `path`.

    Raises:
      CheckpointNotFoundError: if there is nothing at `path`, or a single checkpoint.
    """
    directory = locate(path, options)
    if is_checkpoint(directory):
        raise CheckpointNotFoundError(
            f"{directory} is a single checkpoint, not a run. Use flaxckpt show {directory}, or the "
            f"run {directory.parent}."
        )
    found = directory.store.stat(directory)
    if not (found is not None and found.is_directory) and not directory.children():
        raise CheckpointNotFoundError(f"there is nothing at {directory}. Check the path.")
    return Run(directory)


def is_checkpoint(directory: Location) -> bool:
    """Whether `directory` is a committed checkpoint of flaxckpt, which may be damaged."""
    try:
        step_metadata.read(directory)
    except CheckpointNotFoundError:
        return False
    except (CorruptCheckpointError, UnsupportedFormatError):
        return True
    return True


def checkpoints_at(directory: Location, options: Options) -> list[tuple[int | None, Location]]:
    """The checkpoints of flaxckpt at a path: a single one, without a step, or a run's steps."""
    if is_checkpoint(directory):
        return [(None, directory)]
    run = Run(directory)
    return [(step, run.path(step)) for step in run.steps()]
