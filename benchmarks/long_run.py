"""Saves in a run that already has thousands of steps, beside saves in one that has just begun."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import jax.numpy as jnp

from benchmarks.sides import SIDES
from benchmarks.timing import save_seconds, seconds

EXISTING, SAVES = 10_000, 100
QUICK_EXISTING, QUICK_SAVES = 200, 10

Times = dict[str, list[float]]


def populate(side: str, directory: Path, steps: int) -> None:
    """A run with so many steps: one was saved, the others are hard links to its files."""
    directory.mkdir()
    run = SIDES[side](directory)
    run.save(0, {"x": jnp.zeros(8)})
    run.wait()
    for step in range(1, steps):
        shutil.copytree(directory / "0", directory / str(step), copy_function=os.link)
    os.sync()


def measure_run(side: str, directory: Path, saves: int) -> Times:
    """Seconds to open a run, and of each of its next saves."""
    opened = []
    existing = len(list(directory.iterdir()))
    elapsed = seconds(lambda: opened.append(SIDES[side](directory)))
    tree = {"x": jnp.zeros(8)}
    times = [save_seconds(opened[0], existing + n, tree)[1] for n in range(saves)]
    return {"open": [elapsed], "save": times}


def measure(side: str, quick: bool) -> dict[str, Times]:
    """What a run with hardly a step, and what a long one costs."""
    existing, saves = (QUICK_EXISTING, QUICK_SAVES) if quick else (EXISTING, SAVES)
    with tempfile.TemporaryDirectory() as directory:
        short, long = Path(directory, "short"), Path(directory, "long")
        populate(side, short, 1)
        populate(side, long, existing)
        return {run.name: measure_run(side, run, saves) for run in (short, long)}
