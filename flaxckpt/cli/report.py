"""`flaxckpt report RUN`: an HTML page about a run."""

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
from flaxckpt.run.listing import open_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `report`."""
    parser.add_argument("run", metavar="RUN", help="path or URL of a run directory")
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        default=Path("report.html"),
        help="the page; by default report.html",
    )
    parser.add_argument(
        "--pairs",
        metavar="N",
        type=positive,
        default=10,
        help="compare the newest N + 1 steps with each other",
    )
    parser.add_argument(
        "--max-bytes",
        metavar="SIZE",
        type=byte_count,
        default="20GB",
        help="compare no steps if more than SIZE would have to be read",
    )
    add_metric(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Writes the page."""
    from flaxckpt.report.page import write_report

    options = options_of(args)
    run = open_run(args.run, options)
    with out.progress(f"reading {run.directory}", None) as progress:
        try:
            facts = write_report(
                run,
                args.out,
                metric=args.metric,
                mode=args.mode,
                pairs=args.pairs,
                max_bytes=args.max_bytes,
                options=options,
                progress=progress,
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
