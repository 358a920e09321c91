"""What the safety of a save costs: its fsyncs, and its checksums."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path

import crc32c
import jax
import numpy as np

import flaxckpt
from benchmarks import layouts, states
from benchmarks.sides import FlaxckptSide
from benchmarks.timing import save_seconds, seconds

STATES = ("S", "K", "M")
OPTIONS = {"save": flaxckpt.Options(), "save, fsync=False": flaxckpt.Options(fsync=False)}


def checksums(views: list[np.ndarray]) -> None:
    """CRC-32C of every array, in one thread."""
    for view in views:
        crc32c.crc32c(view)


def measure(state: str, rounds: int, quick: bool) -> dict[str, list[float]]:
    """Seconds of saves with and without fsync, in turns, and of the checksums alone."""
    tree = states.fill(layouts.target(states.abstract(state, quick=quick), "single"))
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        runs = {
            what: FlaxckptSide(Path(directory, what), async_=False, options=options)
            for what, options in OPTIONS.items()
        }
        for step in range(rounds + 1):
            tree = states.advance(tree)
            for what, run in runs.items():
                os.sync()
                found[what].append(save_seconds(run, step, tree)[1])
                run.delete(step)
            views = [np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(tree)]
            found["CRC-32C of every byte"].append(seconds(partial(checksums, views)))
    return {what: times[1:] for what, times in found.items()}
