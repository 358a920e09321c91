"""How save and restore grow with the number of leaves: the time a leaf must stay the same."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import jax.numpy as jnp

from benchmarks import layouts, states
from benchmarks.sides import FlaxckptSide
from benchmarks.timing import restore_seconds, save_seconds

LEAVES = (1_000, 10_000, 100_000)
QUICK_LEAVES = (100, 1_000)
FLOATS = 64
ROUNDS = 3


def measure(leaves: int) -> dict[str, list[float]]:
    """Seconds of saves and restores of a state with so many leaves."""
    target = layouts.target({f"leaf_{n}": jnp.zeros(FLOATS) for n in range(leaves)}, "single")
    tree = states.fill(target)
    found: dict[str, list[float]] = {"save": [], "restore": []}
    with tempfile.TemporaryDirectory() as directory:
        run = FlaxckptSide(Path(directory), async_=False)
        for step in range(ROUNDS + 1):
            tree = states.advance(tree)
            os.sync()
            found["save"].append(save_seconds(run, step, tree)[1])
            found["restore"].append(restore_seconds(run, step, target))
            run.delete(step)
    return {what: times[1:] for what, times in found.items()}
