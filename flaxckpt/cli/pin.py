"""`flaxckpt pin RUN STEP`: keeps a step, whatever the rules of retention are."""

from __future__ import annotations

import argparse

from flaxckpt.cli.command import FINE, Output, options_of, step_number
from flaxckpt.run.listing import open_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `pin`."""
    parser.add_argument("run", metavar="RUN", help="path or URL of a run directory")
    parser.add_argument("step", metavar="STEP", type=step_number, help="the step to pin")
    parser.add_argument("--unpin", action="store_true", help="allow the step to be deleted again")


def run(args: argparse.Namespace, out: Output) -> int:
    """Pins a step, or unpins it."""
    run = open_run(args.run, options_of(args))
    run.pin(args.step, pinned=not args.unpin)
    word = "no longer pinned" if args.unpin else "pinned"
    out.document({"run": str(run.directory), "step": args.step, "pinned": not args.unpin})
    out.lines(f"step {args.step} of {run.directory} is {word}")
    return FINE
