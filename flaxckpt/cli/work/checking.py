"""Verifying one checkpoint, of any format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from flaxckpt.cli.output import Clock
from flaxckpt.cli.work import blocks
from flaxckpt.cli.work.trees import format_of
from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError
from flaxckpt.leaves.lazy import total_nbytes
from flaxckpt.looking.verify import verify
from flaxckpt.opening import open_source
from flaxckpt.options import Options
from flaxckpt.restoring.lazy_reads import read_each
from flaxckpt.storage.location import Location

Advance = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found of one checkpoint.

    Attributes:
      path: where it is.
      format: what its format is called.
      leaves: how many leaves it has.
      nbytes: the size of its arrays.
      seconds: how long it took.
      problems: what is wrong, a line each.
    """

    path: str
    format: str
    leaves: int
    nbytes: int
    seconds: float
    problems: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {"ok": not self.problems, **dataclasses.asdict(self)}


def check(path: Location, options: Options, advance: Advance) -> Verdict:
    """Verifies a checkpoint of flaxckpt; damaged metadata are an answer, too.

    Raises:
      CheckpointNotFoundError: when there is none, or it was deleted meanwhile.
    """
    clock = Clock()
    try:
        report = verify(path, options=options, progress=advance)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        return Verdict(str(path), "flaxckpt", 0, 0, clock.seconds, (str(error),))
    found = (report.leaves, report.nbytes, clock.seconds, report.problems)
    return Verdict(report.path, "flaxckpt", *found)


def check_foreign(path: Location, options: Options, advance: Advance) -> Verdict:
    """Reads all of a checkpoint of another format, which has no checksums of ours.

    Raises:
      CheckpointNotFoundError: when there is none.
    """
    clock = Clock()
    try:
        source = open_source(path, options)
    except CheckpointNotFoundError:
        raise
    except CorruptCheckpointError as error:
        return Verdict(str(path), "?", 0, 0, clock.seconds, (str(error),))
    held: list[CorruptCheckpointError] = []
    nbytes = 0
    reads = blocks.reads(blocks.wanted(source.leaves))
    with source.unchanged():
        for values in read_each(source, reads, blocks.AHEAD_BYTES, held):
            nbytes += values.nbytes
            advance(values.nbytes)
    problems = tuple(dict.fromkeys(map(str, held)))
    found = (len(source.leaves), nbytes, clock.seconds, problems)
    return Verdict(str(source.path), format_of(source), *found)


def size_of(path: Location, options: Options) -> int | None:
    """The size of the arrays of a checkpoint, for a bar; `None` when that cannot be read."""
    try:
        leaves = open_source(path, options).leaves
    except (CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError):
        return None
    return total_nbytes(leaves)
