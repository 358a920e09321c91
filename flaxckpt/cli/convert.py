"""`flaxckpt convert A B`: a checkpoint of any format as one of flaxckpt."""

from __future__ import annotations

import argparse

from flaxckpt.cli import text
from flaxckpt.cli.command import FINE, Command, add_writing, options_of
from flaxckpt.cli.output import Clock, Output


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("a", metavar="A", help="a checkpoint of any format, or its URL")
    parser.add_argument("b", metavar="B", help="where that of flaxckpt shall be")
    add_writing(parser)


def _run(args: argparse.Namespace, out: Output) -> int:
    """Writes what is at A to B."""
    from flaxckpt.cli.work.converting import convert_checkpoint
    from flaxckpt.cli.work.trees import format_of
    from flaxckpt.leaves.lazy import total_nbytes
    from flaxckpt.opening import open_source
    from flaxckpt.storage.location import locate

    options, clock = options_of(args), Clock()
    source, final = open_source(args.a, options), locate(args.b, options)
    nbytes = total_nbytes(source.leaves)
    with out.progress(str(source.path), nbytes) as advance:
        count = convert_checkpoint(source, final, options, advance, overwrite=args.overwrite)
    out.document(
        {
            "from": str(source.path),
            "to": str(final),
            "format": format_of(source),
            "leaves": count,
            "nbytes": nbytes,
        }
    )
    speed = f"{text.size(nbytes)}, {text.size(int(nbytes / clock.seconds))}/s"
    what = f"{text.plural(count, 'leaf')}, {speed}"
    out.lines(f"{source.path} ({format_of(source)}) -> {final}: {what}")
    return FINE


COMMAND = Command(
    "convert", "rewrites a checkpoint of any format as flaxckpt's", _add_arguments, _run
)
