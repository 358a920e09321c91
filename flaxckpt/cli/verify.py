"""`flaxckpt verify PATH...`: reads every byte and checks every checksum."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from flaxckpt.cli import text
from flaxckpt.cli.command import BAD, FINE, Command, options_of
from flaxckpt.cli.output import Output

if TYPE_CHECKING:
    from flaxckpt.cli.work.checking import Verdict
    from flaxckpt.options import Options
    from flaxckpt.storage.location import Location


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", help="checkpoints of any format, or runs of flaxckpt"
    )


def _run(args: argparse.Namespace, out: Output) -> int:
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
    from flaxckpt.cli.work.checking import check_foreign
    from flaxckpt.cli.work.places import checkpoints_at
    from flaxckpt.storage.location import locate

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
    from flaxckpt.cli.work.checking import check
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
    from flaxckpt.cli.work.checking import size_of

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


COMMAND = Command(
    "verify", "reads every byte of checkpoints and checks every checksum", _add_arguments, _run
)
