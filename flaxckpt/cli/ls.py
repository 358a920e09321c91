"""`flaxckpt ls RUN`: the steps of a run."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flaxckpt import text
from flaxckpt.cli.command import FINE, CliError, Column, Output, add_metric, options_of

if TYPE_CHECKING:
    from flaxckpt.run.listing import Other, Step
    from flaxckpt.run.run import Run
    from flaxckpt.store.store import Stray


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
    """Its arguments."""
    parser.add_argument("run", metavar="RUN", help="the directory of a run, or its URL")
    add_metric(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Lists the steps, and what else is there."""
    from flaxckpt.run.listing import open_run, steps_of, strays

    run = open_run(args.run, options_of(args))
    steps = steps_of(run)
    best = best_step(run, steps, args.metric, args.mode)
    found = strays(run.directory, {str(step.step) for step in steps})
    foreign = [stray.name for stray in found if not stray.unfinished]
    others = [] if steps else _others(run, foreign)
    now = time.time()
    out.document(_document(run, steps, best, found, others, now))
    out.table(_COLUMNS, [_row(step, best, now) for step in steps])
    if not steps:
        out.lines(f"{run.directory} has no steps of flaxckpt{', but' if others else '.'}")
    out.table(_COLUMNS_OF_OTHERS, [_row_of_other(other, now) for other in others])
    out.lines(*(f"unfinished: {s.name} ({s.unfinished})" for s in found if s.unfinished))
    named = {other.name for other in others}
    rest = [name for name in foreign if name not in named]
    out.lines(f"not flaxckpt's: {text.join(rest)}" if rest else "")
    return FINE


def _others(run: Run, foreign: Sequence[str]) -> Sequence[Other]:
    """The checkpoints of other libraries in a run that is theirs.

    Raises:
      CheckpointNotFoundError: when it is one checkpoint.
    """
    # The readers take their time to be imported, which a run of flaxckpt's has no need of.
    from flaxckpt.run.listing import others

    return others(run.directory, foreign)


def best_step(run: Run, steps: Sequence[Step], metric: str | None, mode: Any) -> int | None:
    """The step with the best metric; `None` when nothing says which metric that is.

    Raises:
      CliError: when no step has the metric that was asked for.
    """
    from flaxckpt.run.retention import best_first

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


def _row_of_other(other: Other, now: float) -> list[str]:
    """The cells of a checkpoint of another library."""
    age = "-" if other.seconds is None else text.age(now - other.seconds)
    size = "-" if other.nbytes is None else text.size(other.nbytes)
    return [other.name, age, size, other.format]


def _document(
    run: Run,
    steps: Sequence[Step],
    best: int | None,
    found: Sequence[Stray],
    others: Sequence[Other],
    now: float,
) -> dict[str, Any]:
    """The answer for programs."""
    return {
        "run": str(run.directory),
        "latest": steps[-1].step if steps else None,
        "best": best,
        "steps": [_step(run, step, best, now) for step in steps],
        "unfinished": [{"name": s.name, "state": s.unfinished} for s in found if s.unfinished],
        "foreign": [stray.name for stray in found if not stray.unfinished],
        "others": [_other(run, other) for other in others],
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


def _other(run: Run, other: Other) -> dict[str, Any]:
    """A checkpoint of another library for programs."""
    return {
        "name": other.name,
        "path": str(run.directory / other.name),
        "format": other.format,
        "time": other.seconds,
        "nbytes": other.nbytes,
    }
