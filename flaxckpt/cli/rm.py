"""`flaxckpt rm RUN ...`: deletes steps of a run; without `--yes` it is a dry run."""

from __future__ import annotations

import argparse

from flaxckpt import text
from flaxckpt.cli.command import (
    FINE,
    CliError,
    Output,
    add_metric,
    options_of,
    positive,
    step_number,
)
from flaxckpt.errors import CheckpointNotFoundError, InvalidMetricError, StepPinnedError
from flaxckpt.run.listing import ListedStep, open_run, ranking_of, steps_of
from flaxckpt.run.retention import Keep
from flaxckpt.run.run import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rm`."""
    parser.add_argument("run", metavar="RUN", help="path or URL of a run directory")
    parser.add_argument(
        "--step", metavar="N", type=step_number, nargs="+", help="delete these steps"
    )
    rules = parser.add_argument_group(
        "or delete all steps, except the newest, pinned steps, and steps that these rules keep"
    )
    rules.add_argument("--keep-last", metavar="N", type=positive, help="keep the newest N")
    rules.add_argument(
        "--keep-best", metavar="N", type=positive, help="keep the N with the best metric"
    )
    rules.add_argument(
        "--keep-every",
        metavar="N",
        type=positive,
        help="keep the first step at or after each multiple of N",
    )
    add_metric(parser)
    parser.add_argument(
        "--yes", action="store_true", help="delete the steps; without it, only list them"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Deletes steps, or lists the steps that it would delete."""
    rules = (args.keep_last, args.keep_best, args.keep_every)
    if (args.step is None) == (rules == (None, None, None)):
        raise CliError("pass either --step, or --keep-last, --keep-best or --keep-every")
    run = open_run(args.run, options_of(args))
    steps = {step.step: step for step in steps_of(run)}
    wanted = _named(args, run, steps) if args.step else _unkept(args, run, steps)
    done = [step for step in wanted if not args.yes or _delete(run, step, is_rule=not args.step)]
    kept = [step for step in steps if step not in done]
    nbytes = sum(steps[step].nbytes for step in done)
    out.document(
        {
            "run": str(run.directory),
            "done": args.yes,
            "deleted": done,
            "kept": kept,
            "pinned": [step for step in kept if steps[step].pinned],
            "nbytes": nbytes,
        }
    )
    word = "deleted" if args.yes else "would delete"
    out.lines(*(f"{word} step {step}  {text.size(steps[step].nbytes)}" for step in done))
    total = f"{text.plural(len(done), 'step')}, {text.size(nbytes)}"
    dry = "" if args.yes else "; dry run, nothing deleted: pass --yes to delete"
    out.lines(f"{total}{dry}" if done else "nothing to delete")
    return FINE


def _named(args: argparse.Namespace, run: Run, steps: dict[int, ListedStep]) -> list[int]:
    """The steps that `--step` names. Nothing is deleted if one of them is missing or pinned.

    Raises:
      CheckpointNotFoundError: if one is missing.
      StepPinnedError: if one is pinned.
    """
    wanted = sorted(set(args.step))
    for step in wanted:
        run.existing(step)
        if step in steps and steps[step].pinned:
            raise StepPinnedError(
                f"step {step} of {run.directory} is pinned. Unpin it first: "
                f"flaxckpt pin {args.run} {step} --unpin"
            )
    return wanted


def _unkept(args: argparse.Namespace, run: Run, steps: dict[int, ListedStep]) -> list[int]:
    """The steps that the rules do not keep.

    Raises:
      CliError: if `--keep-best` does not know how steps are ranked: it would delete all of them.
    """
    keep, metric = Keep(last=args.keep_last, every=args.keep_every), None
    if args.keep_best:
        try:
            metric, mode = ranking_of(run, list(steps.values()), args.metric, args.mode)
        except InvalidMetricError as error:
            raise CliError(f"--keep-best needs a ranking: {error}") from None
        keep = Keep(
            last=args.keep_last,
            every=args.keep_every,
            best=args.keep_best,
            metric=metric,
            mode=mode,
        )
    kept = keep.select(run.infos(metric))
    return [step for step in steps if step not in kept and not steps[step].pinned]


def _delete(run: Run, step: int, *, is_rule: bool) -> bool:
    """Deletes a step; returns whether this call deleted it."""
    try:
        run.delete(step)
    except (CheckpointNotFoundError, StepPinnedError):
        if is_rule:  # the run continues while steps are deleted
            return False
        raise
    return True
