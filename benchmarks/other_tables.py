"""The tables of all that is not a state and its layout."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks import growth, train_loop
from benchmarks.table import Row, Table
from benchmarks.targets import row

Times = dict[str, list[float]]


def fresh(found: dict[str, Times]) -> Table:
    """The first of everything."""
    title = "Fresh process"
    rows = [
        row(title, f"{what}, ms", median(ours) * 1e3, median(found["Orbax"][what]) * 1e3)
        for what, ours in found["flaxckpt"].items()
    ]
    note = "The import over that of jax, flax and tensorstore; the others without the import."
    return Table(title, rows, note)


def long_run(found: dict[str, Any]) -> Table:
    """A run with one step, and one with many."""
    steps, sides = found["steps"], found["sides"]
    rows = [
        Row(f"{what}, {run} run, ms", *(cost(sides[side][run][what]) for side in sides))
        for what in ("open", "save")
        for run in ("short", "long")
    ]
    return Table("Long run", rows, f"The long run has {steps:,} steps; saves of one tiny array.")


def cost(seconds: list[float]) -> float:
    """The median, in ms."""
    return median(seconds) * 1e3


def costs(found: dict[str, Times]) -> Table:
    """What fsync and checksums are of a save."""
    rows = [
        Row(f"{state}: {what}, ms", cost(times), cost(found[state]["save"]))
        for state, measured in found.items()
        for what, times in measured.items()
        if what != "save"
    ]
    return Table("What safety costs", rows, sides=("alone", "save by default"))


def snapshots(found: dict[str, list[float]]) -> Table:
    """Views and copies."""
    rows = [
        Row(f"{what}, ms", cost(times), cost(found["a step"]))
        for what, times in found.items()
        if what != "a step"
    ]
    note = (
        f"64 arrays of 4 MiB, all donated to the step, which takes {cost(found['a step']):.1f} ms."
    )
    return Table("Snapshots on the CPU", rows, note, sides=("alone", "a step"))


def profile(found: dict[str, dict[str, dict[str, float]]]) -> Table:
    """Stages."""
    rows = [
        Row(f"{state}, {what}: {stage}, ms", seconds * 1e3, stages["all"] * 1e3)
        for state, by in found.items()
        for what, stages in by.items()
        for stage, seconds in stages.items()
        if stage != "all"
    ]
    note = "Each stage has those below it with a dash in it; threads run side by side."
    return Table("Where the time goes", rows, note, sides=("stage", "all"))


def growing(found: dict[str, Times]) -> Table:
    """Times a leaf."""
    fewest = min(found, key=int)
    rows = [
        Row(
            f"{what}, {int(leaves):,} leaves, us a leaf",
            cost(times) * 1e3 / int(leaves),
            cost(found[fewest][what]) * 1e3 / int(fewest),
        )
        for leaves, measured in found.items()
        for what, times in measured.items()
    ]
    note = f"Leaves of {growth.FLOATS} floats."
    return Table("Growth", rows, note, sides=("flaxckpt", f"with {int(fewest):,}"))


def training(found: dict[str, Any]) -> Table:
    """What checkpoints cost a train loop."""
    seconds = {side: sum(times) for side, times in found["seconds"].items()}
    without = seconds[train_loop.WITHOUT]
    title, steps = found["title"], found["steps"]
    lost = {side: 100 * (1 - without / total) for side, total in seconds.items()}
    rows = [
        row(title, "steps a second", steps / seconds["flaxckpt"], steps / seconds["Orbax"]),
        row(title, "lost by checkpoints, %", lost["flaxckpt"], lost["Orbax"]),
    ]
    anyway = [f"{lost[side]:.1f} % to {side}" for side in train_loop.ANYWAY if side in lost]
    note = (
        f"Without checkpoints {steps / without:.3f} steps a second; saved in the background every "
        f"{train_loop.SAVE_EVERY} steps; {steps} steps of each, in turns. Without any checkpoint, "
        f"on these cores the loop loses {' and '.join(anyway)}."
    )
    return Table(title, rows, note)


def tables(results: dict[str, Any]) -> list[Table]:
    """The tables of what was measured."""
    makers = {
        "fresh": fresh,
        "long_run": long_run,
        "train_loop": training,
        "costs": costs,
        "snapshot": snapshots,
        "stages": profile,
        "growth": growing,
    }
    return [make(results[part]) for part, make in makers.items() if part in results]
