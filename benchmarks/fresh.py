"""The first of everything in a fresh process: the import, the first save, the first restore."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax

from benchmarks import layouts, process, states
from benchmarks.sides import SIDES
from benchmarks.timing import seconds

STATES = ("S", "M")
# What a train loop asks for; flaxckpt imports it no sooner.
IMPORTS = {
    "flaxckpt": "from flaxckpt import CheckpointManager, abstract_state, restore, save",
    "Orbax": "import orbax.checkpoint",
}
IMPORT = """
import time, jax, flax, tensorstore
start = time.perf_counter()
{statement}
print(time.perf_counter() - start)
"""


def import_seconds(side: str, compiled: str) -> float:
    """How much longer the import takes when jax, flax and tensorstore are there.

    Args:
      side: whose.
      compiled: a directory for bytecode, which an installed package has.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT.format(statement=IMPORTS[side])],
        env=environment | {"PYTHONPYCACHEPREFIX": compiled},
        capture_output=True,
        check=True,
    )
    return float(done.stdout)


def first_save(side: str, state: str, quick: bool, directory: str) -> float:
    """Seconds from opening a run until its first step is committed."""
    tree = states.fill(layouts.target(states.abstract(state, quick=quick), "single"))

    def save() -> None:
        run = SIDES[side](Path(directory))
        run.save(0, tree)
        run.wait()

    return seconds(save)


def first_restore(side: str, state: str, quick: bool, directory: str) -> float:
    """Seconds from opening a run until what `first_save` left is restored."""
    target = layouts.target(states.abstract(state, quick=quick), "single")
    return seconds(lambda: jax.block_until_ready(SIDES[side](Path(directory)).restore(0, target)))


def measure(names: list[str], rounds: int, quick: bool) -> dict[str, Any]:
    """Seconds of both sides, in turns, by what was measured."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as compiled:
        for _ in range(rounds + 1):
            for side in SIDES:
                found[side]["import"].append(import_seconds(side, compiled))
    for times in found.values():
        del times["import"][0]  # it compiled
    for _ in range(rounds):
        for side in SIDES:
            for state in names:
                with tempfile.TemporaryDirectory() as directory:
                    for what, call in (("save", first_save), ("restore", first_restore)):
                        value = process.call(call, side, state, quick, directory)
                        found[side][f"{state}: first {what}"].append(value)
    return found
