"""What lies in a directory: steps, leftovers, other checkpoints."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import re
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError
from flaxckpt.metadata import step_metadata
from flaxckpt.metadata.step_metadata import CheckpointMetadata
from flaxckpt.options import Options
from flaxckpt.run.run import Run
from flaxckpt.store import layout, local, store
from flaxckpt.store.bucket import BucketPath
from flaxckpt.store.store import Location, PathLike, locate

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
    numbers = {layout.parse_step(name) for name in store.listed(run.directory)}
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
    from flaxckpt.source.checkpoint import read_tree

    try:
        return sum(record.nbytes for record in read_tree(item).records)
    except (CorruptCheckpointError, CheckpointNotFoundError, UnsupportedFormatError, OSError):
        return 0


# What lies in the directory of a run and is no committed step of it. It needs no jax.


class Stray(NamedTuple):
    """Something that is no step.

    Attributes:
      name: what it is called.
      unfinished: what is known of a checkpoint that is not committed; empty for what is foreign.
    """

    name: str
    unfinished: str = ""


def strays(directory: Location, steps: Container[str]) -> list[Stray]:
    """All that is in `directory` beside `steps`, the names of the committed steps."""
    if isinstance(directory, Path):
        found = _on_disk(directory, steps)
    else:
        found = _in_bucket(directory, steps)
    return sorted(stray for stray in found if stray.name != layout.CLAIMS)


def _on_disk(directory: Path, steps: Container[str]) -> Iterator[Stray]:
    """As `strays`, in a directory."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name in steps:
                continue
            path = directory / entry.name
            unfinished = layout.parse_temporary(entry.name)
            if unfinished is None and entry.is_dir(follow_symlinks=False):
                unfinished = local.unfinished_marked(path)
            yield Stray(entry.name, "" if unfinished is None else _writer(path, unfinished[1]))


def _writer(path: Path, host: str) -> str:
    """Who writes an unfinished checkpoint, as far as that can be seen from here."""
    if host != layout.host_name():
        return f"of {host}, which may be writing it"
    try:
        return "being written" if local.is_locked(path) else "its writer is gone"
    except OSError:
        return "gone meanwhile, or not to be read"


def _in_bucket(directory: BucketPath, steps: Container[str]) -> Iterator[Stray]:
    """As `strays`, in a bucket."""
    names = directory.names()
    claims = {n.partition("/")[2] for n in names if n.startswith(f"{layout.CLAIMS}/")}
    others = {name.partition("/")[0] for name in names} - claims
    for name in claims:
        if name not in steps:
            yield Stray(name, _claim(directory / layout.CLAIMS / name))
    for name in others:
        if name not in steps:
            yield Stray(name, _left_by(name))


def _claim(claim: BucketPath) -> str:
    """What the claim to a step says."""
    state = (claim.read() or b"").decode(errors="replace").partition(" ")[2]
    words = {"writing": "being written, or its writer is gone", "removing": "being removed"}
    return words.get(state, "damaged")


def _left_by(name: str) -> str:
    """What is known of objects of flaxckpt's that are no step."""
    is_ours = name.startswith(layout.PROBE) or layout.parse_temporary(name) is not None
    return "left by a process, or in use" if is_ours else ""


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
    if not isinstance(path, Path):
        return Other(name, reader.NAME, None, None)
    about = path.stat()
    nbytes = bytes_on_disk(path) if path.is_dir() else about.st_size
    return Other(name, reader.NAME, about.st_mtime, nbytes)


def _numbers(name: str) -> list[str | int]:
    """A key to sort by that puts `step_9` before `step_10`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]


# What is at a path: a run, a checkpoint, or neither.


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
    run = Run(directory, fsync=options.fsync)
    return [(step, run.path(step)) for step in run.steps()]


def _exists(directory: Location) -> bool:
    """Whether there is a directory, or any object below a name."""
    return directory.is_dir() if isinstance(directory, Path) else bool(store.files(directory))
