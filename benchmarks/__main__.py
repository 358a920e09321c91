"""Measures everything and writes RESULTS.md, results.svg and results.json: about an hour.

    python -m benchmarks [--quick] [--parts states,growth] [--states S,K] [--layouts single]

A run of some parts or states replaces only those in the files.
It saves to the directory of temporary files: set TMPDIR to a disk with 30 GB free.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

from benchmarks import layouts, plan, report, states

QUICK_STATES = ["S", "M"]


def some_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated `names`."""
    known = list(names)

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown} is none of {known}")
        return chosen

    return parse


def arguments() -> plan.Plan:
    """The plan that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small states; writes nothing")
    parser.add_argument("--parts", type=some_of(plan.PARTS), default=list(plan.PARTS))
    parser.add_argument("--states", type=some_of(states.NAMES), default=None)
    parser.add_argument("--layouts", type=some_of(layouts.DEVICES), default=list(layouts.DEVICES))
    parser.add_argument("--rounds", type=int, default=None, help="5; with --quick 1")
    chosen = parser.parse_args()
    return plan.Plan(
        chosen.parts,
        chosen.states or (QUICK_STATES if chosen.quick else list(states.NAMES)),
        chosen.layouts,
        chosen.rounds or (1 if chosen.quick else 5),
        chosen.quick,
    )


def main() -> None:
    """Measures; what there is so far is written after every part."""
    chosen = arguments()
    for results in plan.run(chosen):
        if not chosen.quick:
            report.write(results)
    print(report.markdown(results))


if __name__ == "__main__":
    main()
