"""flaxckpt verify."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flaxckpt import comparing, text
from flaxckpt.cli.command import BAD, FINE, Clock, Output, options_of
from flaxckpt.comparing import format_of
from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError
from flaxckpt.formats.opening import open_source
from flaxckpt.inspecting import verify
from flaxckpt.options import Options
from flaxckpt.source.chunk_reads import read_each
from flaxckpt.store.store import Location

# Verifying one checkpoint, of any format.


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
    reads = comparing.reads(comparing.wanted_blocks(source.leaves))
    with source.unchanged():
        for values in read_each(reads, comparing.AHEAD_BYTES, held):
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
    return sum(leaf.nbytes for leaf in leaves)


# `flaxckpt verify PATH...`: reads every byte and checks every checksum.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", help="checkpoints of any format, or runs of flaxckpt"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Verifies checkpoints, and all steps of runs."""
    options = options_of(args)
    verdicts = []
    for path in args.paths:
        for verdict in _verdicts(path, options, out):
            verdicts.append(verdict)
            out.lines(*_lines(verdict))
    is_fine = not any(verdict.problems for verdict in verdicts)
    out.document({"ok": is_fine, "checkpoints": [verdict.document() for verdict in verdicts]})
    return FINE if is_fine else BAD


def _verdicts(path: str, options: Options, out: Output) -> Iterator[Verdict]:
    """What is found at a path: of one checkpoint, or of each step of a run."""
    from flaxckpt.run.listing import checkpoints_at
    from flaxckpt.store.store import locate

    directory = locate(path, options)
    found = checkpoints_at(directory, options)
    if not found:
        with out.progress(str(directory), _size(directory, options)) as advance:
            verdict = check_foreign(directory, options, advance)
        yield verdict
    for step, place in found:
        yield from _own(place, options, out, is_step=step is not None)


def _own(place: Location, options: Options, out: Output, *, is_step: bool) -> Sequence[Verdict]:
    """What is found of one checkpoint of flaxckpt; nothing of a step that is gone meanwhile."""
    from flaxckpt.errors import CheckpointNotFoundError

    try:
        with out.progress(str(place), _size(place, options)) as advance:
            return [check(place, options, advance)]
    except CheckpointNotFoundError:
        if not is_step:
            raise
        out.lines(f"gone  {place}: deleted meanwhile")
        return []


def _size(place: Location, options: Options) -> int | None:
    """How much there is to read, for the bar; nobody asks without one."""
    return size_of(place, options) if sys.stderr.isatty() else None


def _lines(verdict: Verdict) -> list[str]:
    """What is said of one checkpoint."""
    if verdict.problems:
        return [f"BAD   {verdict.path}", *(f"      {problem}" for problem in verdict.problems)]
    speed = text.size(int(verdict.nbytes / verdict.seconds))
    what = f"{text.plural(verdict.leaves, 'leaf')}, {text.size(verdict.nbytes)}, {speed}/s"
    is_ours = verdict.format == "flaxckpt"
    note = "" if is_ours else f"; {verdict.format} has no checksums: all of it can be read"
    return [f"ok    {verdict.path}: {what}{note}"]
