"""`flaxckpt cp A B`: copies a checkpoint, or all steps of a run, between disks and buckets."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from flaxckpt.cli import text
from flaxckpt.cli.command import FINE, CliError, Command, add_writing, options_of
from flaxckpt.cli.output import Clock, Output

if TYPE_CHECKING:
    from flaxckpt.options import Options
    from flaxckpt.storage.location import Location


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("a", metavar="A", help="a checkpoint of flaxckpt or a run, or its URL")
    parser.add_argument("b", metavar="B", help="where the copy shall be, not what it shall be in")
    add_writing(parser)


def _run(args: argparse.Namespace, out: Output) -> int:
    """Copies what is at A to B."""
    from flaxckpt.cli.work.places import checkpoints_at
    from flaxckpt.storage.location import locate

    options = options_of(args)
    source, target = locate(args.a, options), locate(args.b, options)
    if str(source) == str(target):
        raise CliError(f"{source} cannot be copied to itself")
    found = checkpoints_at(source, options)
    if not found:
        raise _nothing(source, options)
    copied = []
    for step, place in found:
        final = target if step is None else target / str(step)
        copied.append(_one(place, final, options, out, args.overwrite, is_step=step is not None))
    out.document({"copies": copied})
    return FINE


def _nothing(source: Location, options: Options) -> Exception:
    """The error that nothing at a path can be copied."""
    from flaxckpt.errors import CheckpointNotFoundError
    from flaxckpt.opening import open_source

    try:
        open_source(source, options)
    except CheckpointNotFoundError as error:
        return error
    return CliError(f"{source} is of another format. Use flaxckpt convert, or a copy of its files.")


def _one(
    place: Location,
    final: Location,
    options: Options,
    out: Output,
    overwrite: bool,
    *,
    is_step: bool,
) -> dict[str, Any]:
    """Copies one checkpoint; says what became of it."""
    from flaxckpt.cli.work.copying import copy_checkpoint
    from flaxckpt.errors import CheckpointNotFoundError

    clock, total = Clock(), [0]

    def count(nbytes: int) -> None:
        total[0] += nbytes
        advance(nbytes)

    try:
        with out.progress(str(place), None) as advance:
            is_new = copy_checkpoint(
                place, final, options, count, overwrite=overwrite, with_pin=is_step
            )
        state = "copied" if is_new else "there already"
    except CheckpointNotFoundError:
        if not is_step:  # the run goes on meanwhile
            raise
        state = "deleted meanwhile"
    speed = f", {text.size(total[0])}, {text.size(int(total[0] / clock.seconds))}/s"
    out.lines(f"{place} -> {final}: {state}{speed if state == 'copied' else ''}")
    return {"from": str(place), "to": str(final), "state": state, "nbytes": total[0]}


COMMAND = Command(
    "cp", "copies a checkpoint or a run, between disks and buckets", _add_arguments, _run
)
