"""`flaxckpt report RUN`: one page about a run, for a browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from flaxckpt import text
from flaxckpt.cli.command import (
    FINE,
    CliError,
    Output,
    add_metric,
    byte_count,
    options_of,
    positive,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("run", metavar="RUN", help="the directory of a run, or its URL")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("report.html"), help="report.html"
    )
    parser.add_argument(
        "--pairs",
        metavar="N",
        type=positive,
        default=10,
        help="differences of the newest N + 1 steps",
    )
    parser.add_argument(
        "--max-bytes",
        metavar="SIZE",
        type=byte_count,
        default="20GB",
        help="leaves the differences out when more had to be read for them",
    )
    add_metric(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Writes the page."""
    from flaxckpt.report.build import write_report
    from flaxckpt.run.listing import open_run

    options = options_of(args)
    run = open_run(args.run, options)
    how = {"metric": args.metric, "mode": args.mode, "pairs": args.pairs}
    with out.progress(f"reading {run.directory}", None) as progress:
        try:
            facts = write_report(
                run, args.out, **how, max_bytes=args.max_bytes, options=options, progress=progress
            )
        except ModuleNotFoundError as error:
            raise CliError(str(error)) from None
    nbytes = args.out.stat().st_size
    kept = [step.step for step in facts.kept]
    out.document(
        {"run": str(run.directory), "report": str(args.out), "nbytes": nbytes, "steps": kept}
    )
    out.lines(f"{args.out}  {text.size(nbytes)}, {text.plural(len(kept), 'step')}")
    return FINE
