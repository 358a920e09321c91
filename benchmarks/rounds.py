"""Saves and restores of one state in one layout: both sides and the machine's limits, in turns."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks import layouts, limits, page_cache, states
from benchmarks.sides import SIDES, Side
from benchmarks.timing import by_measurement, restore_seconds, save_seconds

Seconds = dict[str, float]


@dataclass(frozen=True)
class Runs:
    """What one side has open: a run saved in the background, and one that is not."""

    directory: Path
    background: Side
    sync: Side


def open_runs(side: str, directory: Path) -> Runs:
    """The runs of a side, below `directory`."""
    sync, background = directory / side / "sync", directory / side / "async"
    sync.mkdir(parents=True)
    background.mkdir()
    return Runs(background, SIDES[side](background), SIDES[side](sync, async_=False))


def fresh(state: str, tree: Any) -> Any:
    """The state as the next step leaves it; L stays as it is, as three of it fill the memory."""
    tree = tree if state == "L" else states.advance(tree)
    os.sync()  # what was written before must not cost who writes next
    return tree


def save(runs: Runs, state: str, step: int, tree: Any) -> tuple[Any, Seconds]:
    """The state now, and how long its saves took; the one made in the background is kept."""
    tree = fresh(state, tree)
    page_cache.touch(states.nbytes(tree) * 3 // 2)
    found = {"save": save_seconds(runs.sync, step, tree)[1]}
    runs.sync.delete(step)
    tree = fresh(state, tree)
    page_cache.touch(states.nbytes(tree) * 3 // 2)
    found["blocked"], found["async save"] = save_seconds(runs.background, step, tree)
    return tree, found


def restore(runs: Runs, step: int, targets: dict[str, Any]) -> Seconds:
    """How long the restores of a step take: onto each target, and from the disk onto the first."""
    found = {}
    for what, to in targets.items():
        page_cache.touch(states.nbytes(to) * 3 // 2)
        found[what] = restore_seconds(runs.background, step, to)
    page_cache.drop(runs.directory)
    found["restore, cold"] = restore_seconds(runs.background, step, targets["restore"])
    return found


def stored(directory: Path) -> dict[str, int]:
    """How many files a run has, and how many bytes are in them."""
    sizes = [file.stat().st_size for file in page_cache.files(directory)]
    return {"files": len(sizes), "bytes": sum(sizes)}


def targets(abstract: Any, layout: str) -> dict[str, Any]:
    """What the restores are asked for, by the name of the measurement."""
    found = {"restore": layouts.target(abstract, layout)}
    if layout == "sharded":
        found["restore, transposed mesh"] = layouts.target(abstract, "transposed")
    return found


class Bench:
    """A state in a layout, and the runs of both sides that it is saved to."""

    def __init__(self, state: str, layout: str, quick: bool, directory: Path):
        """Makes the state, and opens the runs below `directory`."""
        abstract = states.abstract(state, quick=quick, layout=layout)
        self.state, self.directory = state, directory
        self.leaves, self.nbytes = len(jax.tree.leaves(abstract)), states.nbytes(abstract)
        self.targets = targets(abstract, layout)
        self.tree = states.fill(self.targets["restore"])
        self.runs = {side: open_runs(side, directory) for side in SIDES}
        self.disk: dict[str, dict[str, int]] = {}

    def measure_side(self, side: str, step: int) -> Seconds:
        """Saves and restores a step of one side, and deletes it."""
        runs = self.runs[side]
        self.tree, saved = save(runs, self.state, step, self.tree)
        restored = restore(runs, step, self.targets)
        self.disk[side] = stored(runs.directory)
        runs.background.delete(step)
        return saved | restored

    def measure_round(self, step: int) -> dict[str, Seconds]:
        """Both sides, which take turns at being first, and the machine."""
        order = sorted(self.runs, reverse=bool(step % 2))
        found = {side: self.measure_side(side, step) for side in order}
        return found | {"limits": limits.measure(self.directory, self.nbytes)}


def measure(state: str, layout: str, rounds: int, quick: bool) -> dict[str, Any]:
    """All times of so many rounds, after one that is not counted: it compiles and imports."""
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(state, layout, quick, Path(directory))
        found = [bench.measure_round(step) for step in range(rounds + 1)][1:]
        times = by_measurement(found)
    return {"leaves": bench.leaves, "nbytes": bench.nbytes, "seconds": times, "disk": bench.disk}
