"""What is measured, and in which order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import (
    costs,
    fresh,
    growth,
    layouts,
    long_run,
    machine,
    peak,
    process,
    rounds,
    snapshot_cost,
    stages,
    train_loop,
)
from benchmarks.sides import SIDES

Results = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
      parts: names of `PARTS`.
      states: names of states.
      layouts: `single`, `sharded` or both.
      rounds: of everything that is a median.
      quick: whether the states are small.
    """

    parts: list[str]
    states: list[str]
    layouts: list[str]
    rounds: int
    quick: bool


def say(text: str) -> None:
    """Tells who waits what is measured now."""
    print(text, file=sys.stderr, flush=True)


def few(plan: Plan, states: Sequence[str]) -> list[str]:
    """Those of `states` that were asked for; only one for `--quick`, as they take processes."""
    chosen = [state for state in states if state in plan.states]
    return chosen[:1] if plan.quick else chosen


def measure_states(plan: Plan, results: Results) -> Iterator[None]:
    """Every state in every layout."""
    found = results["states"] = {}
    for state in plan.states:
        for layout in plan.layouts:
            # A small one has a name that no target is given for.
            name = f"{state} {layout}" + (", small" if plan.quick and state != "S" else "")
            say(name)
            arguments = state, layout, plan.rounds, plan.quick
            measured = process.call(rounds.measure, *arguments, devices=layouts.DEVICES[layout])
            if not plan.quick or not found:  # it takes four processes
                peaks = {side: peak.measure(side, state, layout, plan.quick) for side in SIDES}
                measured["peak"] = peaks
            found[name] = measured
            yield


def measure_fresh(plan: Plan, results: Results) -> Iterator[None]:
    """What only a new process shows."""
    results["fresh"] = fresh.measure(few(plan, fresh.STATES), plan.rounds, plan.quick)
    yield


def measure_long_run(plan: Plan, results: Results) -> Iterator[None]:
    """Runs with many steps."""
    steps = long_run.QUICK_EXISTING if plan.quick else long_run.EXISTING
    sides = {side: process.call(long_run.measure, side, plan.quick) for side in SIDES}
    results["long_run"] = {"steps": steps, "sides": sides}
    yield


def measure_train_loop(plan: Plan, results: Results) -> Iterator[None]:
    """A train loop."""
    results["train_loop"] = process.call(train_loop.measure, plan.quick)
    yield


def measure_costs(plan: Plan, results: Results) -> Iterator[None]:
    """What safety costs."""
    found = results["costs"] = {}
    for state in few(plan, costs.STATES):
        found[state] = process.call(costs.measure, state, plan.rounds, plan.quick)
        yield


def measure_growth(plan: Plan, results: Results) -> Iterator[None]:
    """Ever more leaves."""
    found = results["growth"] = {}
    for leaves in growth.QUICK_LEAVES if plan.quick else growth.LEAVES:
        found[str(leaves)] = process.call(growth.measure, leaves)
        yield


def measure_snapshot(plan: Plan, results: Results) -> Iterator[None]:
    """Views and copies of what a loop donates."""
    results["snapshot"] = process.call(snapshot_cost.measure, plan.rounds, plan.quick)
    yield


def measure_stages(plan: Plan, results: Results) -> Iterator[None]:
    """Where the time goes."""
    found = results["stages"] = {}
    for state in few(plan, stages.STATES):
        found[state] = process.call(stages.measure, state, plan.rounds, plan.quick)
        yield


PARTS: dict[str, Callable[[Plan, Results], Iterator[None]]] = {
    "states": measure_states,
    "fresh": measure_fresh,
    "long_run": measure_long_run,
    "train_loop": measure_train_loop,
    "costs": measure_costs,
    "snapshot": measure_snapshot,
    "stages": measure_stages,
    "growth": measure_growth,
}


def run(plan: Plan) -> Iterator[Results]:
    """The results so far, each time that there are more."""
    results: Results = {"machine": machine.describe(), "rounds": plan.rounds}
    for part in plan.parts:
        say(part)
        for _ in PARTS[part](plan, results):
            yield results
