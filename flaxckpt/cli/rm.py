"""`flaxckpt rm RUN ...`: deletes steps of a run; without `--yes` it only says which."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from flaxckpt.run.listing import Step
    from flaxckpt.run.run import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("run", metavar="RUN", help="the directory of a run, or its URL")
    parser.add_argument("--step", metavar="N", type=step_number, nargs="+", help="these steps")
    rules = parser.add_argument_group("or all steps but these, the newest and pinned ones")
    rules.add_argument("--keep-last", metavar="N", type=positive, help="the newest N")
    rules.add_argument("--keep-best", metavar="N", type=positive, help="the N with the best metric")
    rules.add_argument("--keep-every", metavar="N", type=positive, help="multiples of N")
    add_metric(parser)
    parser.add_argument(
        "--yes", action="store_true", help="deletes them; otherwise nothing is done"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Deletes steps, or says which it would."""
    from flaxckpt.run.listing import open_run, steps_of

    rules = (args.keep_last, args.keep_best, args.keep_every)
    if (args.step is None) == (rules == (None, None, None)):
        raise CliError("rm wants either --step, or --keep-last, --keep-best or --keep-every")
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
    out.lines(*_lines(args, [steps[step] for step in done], nbytes))
    return FINE


def _named(args: argparse.Namespace, run: Run, steps: dict[int, Step]) -> list[int]:
    """The steps that were named.

    Raises:
      CheckpointNotFoundError: when one is not there.
      StepPinnedError: when one is pinned. Nothing was deleted then.
    """
    from flaxckpt.errors import StepPinnedError

    wanted = sorted(set(args.step))
    for step in wanted:
        run.existing(step)
        if step in steps and steps[step].pinned:
            raise StepPinnedError(
                f"step {step} of {run.directory} is pinned. Unpin it first: "
                f"flaxckpt pin {args.run} {step} --unpin"
            )
    return wanted


def _unkept(args: argparse.Namespace, run: Run, steps: dict[int, Step]) -> list[int]:
    """The steps that the rules do not keep."""
    from flaxckpt.run.retention import Keep

    if args.keep_best:
        _check_metric(args, run, list(steps.values()))
    ranking = {"metric": args.metric, "mode": args.mode}
    keep = Keep(last=args.keep_last, best=args.keep_best, every=args.keep_every, **ranking)
    kept = keep.select(run.infos(args.metric))
    return [step for step in steps if step not in kept and not steps[step].pinned]


def _check_metric(args: argparse.Namespace, run: Run, steps: Sequence[Step]) -> None:
    """Refuses to keep the best steps when nothing says which they are: they would all go.

    Raises:
      CliError: in that case.
    """
    from flaxckpt.cli.ls import best_step

    names = {name: None for step in steps for name in step.described.metrics}
    if best_step(run, steps, args.metric, args.mode) is None or (
        args.metric is None and len(names) > 1
    ):
        there = f"there are {', '.join(names)}" if names else "there are none"
        raise CliError(f"--keep-best needs a metric, and {there}: say which by --metric")


def _delete(run: Run, step: int, *, is_rule: bool) -> bool:
    """Deletes a step; returns whether it is gone by that."""
    from flaxckpt.errors import CheckpointNotFoundError, StepPinnedError

    try:
        run.delete(step)
    except (CheckpointNotFoundError, StepPinnedError):
        if is_rule:  # the run goes on meanwhile
            return False
        raise
    return True


def _lines(args: argparse.Namespace, steps: Sequence[Step], nbytes: int) -> list[str]:
    """What is said to people."""
    if not steps:
        return ["nothing to delete"]
    word = "deleted" if args.yes else "would delete"
    each: list[Any] = [f"{word} step {s.step}  {text.size(s.nbytes)}" for s in steps]
    total = f"{text.plural(len(steps), 'step')}, {text.size(nbytes)}"
    return [*each, total if args.yes else f"{total}; nothing was done: pass --yes to delete them"]
