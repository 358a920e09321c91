"""`flaxckpt verify PATH...`: reads every byte and checks every checksum."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator

from flaxckpt import text
from flaxckpt.cli.command import BAD, FINE, Clock, Output, options_of
from flaxckpt.comparing import blocks_of, read_blocks
from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError
from flaxckpt.formats.opening import open_source
from flaxckpt.inspecting import format_of, verify
from flaxckpt.options import Options
from flaxckpt.run.listing import checkpoints_at
from flaxckpt.store.locate import locate
from flaxckpt.store.store import Location


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result for one checkpoint.

    Attributes:
      path: the checkpoint.
      format: the name of its format.
      leaves: the number of its leaves.
      nbytes: the size of its arrays, in bytes.
      seconds: how long the check took.
      problems: one line for each damaged leaf or file.
    """

    path: str
    format: str
    leaves: int
    nbytes: int
    seconds: float
    problems: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `verify`."""
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", help="checkpoints of any format, or flaxckpt runs"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Verifies checkpoints, and all steps of runs; the exit code is 1 if one is damaged."""
    options, verdicts = options_of(args), []
    for path in args.paths:
        for verdict in _verdicts(locate(path, options), options, out):
            verdicts.append(verdict)
            out.lines(*_lines(verdict))
    is_fine = not any(verdict.problems for verdict in verdicts)
    checked = [{"ok": not v.problems, **dataclasses.asdict(v)} for v in verdicts]
    out.document({"ok": is_fine, "checkpoints": checked})
    return FINE if is_fine else BAD


def _verdicts(directory: Location, options: Options, out: Output) -> Iterator[Verdict]:
    """The verdict of one checkpoint, or of each step of a run."""
    found = checkpoints_at(directory, options)
    if not found:
        yield _verified(directory, options, out, is_ours=False)
    for step, place in found:
        try:
            yield _verified(place, options, out, is_ours=True)
        except CheckpointNotFoundError:
            if step is None:
                raise
            out.lines(f"gone  {place}: deleted during the check")


def _verified(path: Location, options: Options, out: Output, *, is_ours: bool) -> Verdict:
    """Reads all of a checkpoint. Only flaxckpt's has checksums that can be verified."""
    clock = Clock()
    try:
        with out.progress(str(path), _size(path, options)) as advance:
            if is_ours:
                report = verify(path, options=options, progress=advance)
                known = (report.leaves, report.nbytes, clock.seconds, report.problems)
                return Verdict(str(report.path), "flaxckpt", *known)
            source = open_source(path, options)
            held: list[CorruptCheckpointError] = []
            nbytes = 0
            with source.unchanged():
                for block in read_blocks(blocks_of(source.leaves), held=held):
                    nbytes += block.values.nbytes
                    advance(block.values.nbytes)
    except CheckpointNotFoundError:
        raise
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        name = "flaxckpt" if is_ours else "?"
        return Verdict(str(path), name, 0, 0, clock.seconds, (str(error),))
    problems = tuple(dict.fromkeys(map(str, held)))
    found = (len(source.leaves), nbytes, clock.seconds, problems)
    return Verdict(str(source.path), format_of(source), *found)


def _size(path: Location, options: Options) -> int | None:
    """The size of the arrays of a checkpoint, for a progress bar; `None` if it is unreadable."""
    if not sys.stderr.isatty():
        return None
    try:
        return sum(leaf.nbytes for leaf in open_source(path, options).leaves)
    except (CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError):
        return None


def _lines(verdict: Verdict) -> list[str]:
    if verdict.problems:
        return [f"BAD   {verdict.path}", *(f"      {problem}" for problem in verdict.problems)]
    speed = text.size(int(verdict.nbytes / verdict.seconds))
    done = f"{text.plural(verdict.leaves, 'leaf')}, {text.size(verdict.nbytes)}, {speed}/s"
    is_ours = verdict.format == "flaxckpt"
    note = "" if is_ours else f"; fully readable ({verdict.format} has no checksums)"
    return [f"ok    {verdict.path}: {done}{note}"]
