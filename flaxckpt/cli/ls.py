"""`flaxckpt ls RUN`: the steps of a run."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flaxckpt.cli import text
from flaxckpt.cli.command import FINE, CliError, Command, add_metric, options_of
from flaxckpt.cli.output import Column, Output

if TYPE_CHECKING:
    from flaxckpt.cli.work.steps import Step
    from flaxckpt.cli.work.strays import Stray
    from flaxckpt.runs.run import Run

_COLUMNS = (
    Column("STEP", right=True),
    Column("AGE", right=True),
    Column("SIZE", right=True),
    Column("METRICS"),
    Column("NOTES"),
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("run", metavar="RUN", help="the directory of a run, or its URL")
    add_metric(parser)


def _run(args: argparse.Namespace, out: Output) -> int:
    """Lists the steps, and what else is there."""
    from flaxckpt.cli.work.places import open_run
    from flaxckpt.cli.work.steps import steps_of
    from flaxckpt.cli.work.strays import strays

    run = open_run(args.run, options_of(args))
    steps = steps_of(run)
    best = best_step(run, steps, args.metric, args.mode)
    others = strays(run.directory, {str(step.step) for step in steps})
    now = time.time()
    out.document(_document(run, steps, best, others, now))
    out.table(_COLUMNS, [_row(step, best, now) for step in steps])
    if not steps:
        out.lines(f"{run.directory} has no steps of flaxckpt.")
    out.lines(*(f"unfinished: {o.name} ({o.unfinished})" for o in others if o.unfinished))
    foreign = [o.name for o in others if not o.unfinished]
    out.lines(f"not flaxckpt's: {text.join(foreign)}" if foreign else "")
    return FINE


def best_step(run: Run, steps: Sequence[Step], metric: str | None, mode: Any) -> int | None:
    """The step with the best metric; `None` when nothing says which metric that is.

    Raises:
      CliError: when no step has the metric that was asked for.
    """
    from flaxckpt.retention import best_first

    known = {name: None for step in steps for name in step.described.metrics}
    if metric is not None and metric not in known:
        there = f"There are {', '.join(known)}." if known else "There are none."
        raise CliError(f"no step of {run.directory} has the metric {metric}. {there}")
    ranked = best_first(run.infos(metric), mode)
    return ranked[0].step if ranked else None


def _row(step: Step, best: int | None, now: float) -> list[str]:
    """The cells of a step."""
    notes = {"best": step.step == best, "pinned": step.pinned, "damaged": step.damaged}
    return [
        str(step.step),
        "-" if step.damaged else text.age(now - step.described.committed_ns / 1e9),
        text.size(step.nbytes),
        text.metrics(step.described.metrics),
        ", ".join(note for note, is_so in notes.items() if is_so),
    ]


def _document(
    run: Run, steps: Sequence[Step], best: int | None, others: Sequence[Stray], now: float
) -> dict[str, Any]:
    """The answer for programs."""
    return {
        "run": str(run.directory),
        "latest": steps[-1].step if steps else None,
        "best": best,
        "steps": [_step(run, step, best, now) for step in steps],
        "unfinished": [{"name": o.name, "state": o.unfinished} for o in others if o.unfinished],
        "foreign": [o.name for o in others if not o.unfinished],
    }


def _step(run: Run, step: Step, best: int | None, now: float) -> dict[str, Any]:
    """A step for programs."""
    described = step.described
    seconds = described.committed_ns / 1e9
    return {
        "step": step.step,
        "path": str(run.path(step.step)),
        "time": None if step.damaged else seconds,
        "age_seconds": None if step.damaged else now - seconds,
        "nbytes": step.nbytes,
        "metrics": dict(described.metrics),
        "metadata": dict(described.metadata),
        "items": list(described.items),
        "best": step.step == best,
        "pinned": step.pinned,
        "damaged": step.damaged,
    }


COMMAND = Command("ls", "lists the steps of a run", _add_arguments, _run)
