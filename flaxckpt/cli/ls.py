"""`flaxckpt ls RUN`: the steps of a run."""

from __future__ import annotations

import argparse
import time

from flaxckpt import text
from flaxckpt.cli.command import FINE, Column, Output, add_metric, options_of
from flaxckpt.errors import InvalidMetricError
from flaxckpt.run.listing import ListedStep, open_run, others, ranking_of, steps_of, strays
from flaxckpt.run.retention import best_first
from flaxckpt.run.run import Run

_COLUMNS = (
    Column("STEP", right=True),
    Column("AGE", right=True),
    Column("SIZE", right=True),
    Column("METRICS"),
    Column("NOTES"),
)
_COLUMNS_OF_OTHERS = (
    Column("NAME"),
    Column("AGE", right=True),
    Column("SIZE", right=True),
    Column("FORMAT"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `ls`."""
    parser.add_argument("run", metavar="RUN", help="path or URL of a run directory")
    add_metric(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Lists the steps, checkpoints of other libraries, and other files."""
    run = open_run(args.run, options_of(args))
    steps, now = steps_of(run), time.time()
    best, why_not = _best(args, run, steps)
    found = strays(run.directory, {str(step.step) for step in steps})
    foreign = [stray.name for stray in found if not stray.unfinished]
    known = [] if steps else others(run.directory, foreign)
    documents = [_document(run, step, best, now) for step in steps]
    out.document(
        {
            "run": str(run.directory),
            "latest": steps[-1].step if steps else None,
            "best": best,
            "steps": documents,
            "unfinished": [{"name": s.name, "state": s.unfinished} for s in found if s.unfinished],
            "foreign": foreign,
            "others": [
                {
                    "name": other.name,
                    "path": str(run.directory / other.name),
                    "format": other.format,
                    "time": other.seconds,
                    "nbytes": other.nbytes,
                }
                for other in known
            ],
        }
    )
    rows = [
        [
            str(step.step),
            "-" if step.damaged else text.age(now - step.described.committed_ns / 1e9),
            text.size(step.nbytes),
            text.metrics(step.described.metrics),
            ", ".join(note for note in ("best", "pinned", "damaged") if found[note]),
        ]
        for step, found in zip(steps, documents, strict=True)
    ]
    out.table(_COLUMNS, rows)
    if not steps:
        out.lines(f"{run.directory} has no steps of flaxckpt{', but' if known else '.'}")
    other_rows = [
        [
            other.name,
            "-" if other.seconds is None else text.age(now - other.seconds),
            "-" if other.nbytes is None else text.size(other.nbytes),
            other.format,
        ]
        for other in known
    ]
    out.table(_COLUMNS_OF_OTHERS, other_rows)
    out.lines(*(f"unfinished: {s.name} ({s.unfinished})" for s in found if s.unfinished))
    rest = [name for name in foreign if name not in {other.name for other in known}]
    out.lines(f"other files: {text.join(rest)}" if rest else "")
    out.lines(f"best unknown: {why_not}" if why_not else "")
    return FINE


def _best(args: argparse.Namespace, run: Run, steps: list[ListedStep]) -> tuple[int | None, str]:
    """The best step, or why it is unknown although there are metrics.

    Raises:
      InvalidMetricError: if the arguments ask for a ranking that is not possible.
    """
    try:
        ranking = ranking_of(run, steps, args.metric, args.mode)
    except InvalidMetricError as error:
        if args.metric or args.mode:
            raise
        return None, str(error) if any(step.described.metrics for step in steps) else ""
    ranked = best_first(run.infos(ranking.metric), ranking.mode)
    return (ranked[0].step if ranked else None), ""


def _document(run: Run, step: ListedStep, best: int | None, now: float) -> dict[str, object]:
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
