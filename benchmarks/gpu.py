"""A large state on one GPU, beside Orbax and beside the bus: `python -m benchmarks.gpu`.

Needs a GPU with 45 GB, as much memory on the host and on the disk of TMPDIR; prints a table.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from benchmarks import layouts, machine, states
from benchmarks.sides import DURABILITY, SIDES, Side
from benchmarks.table import Row, Table
from benchmarks.timing import by_measurement, restore_seconds, save_seconds, seconds

LEAF = jax.ShapeDtypeStruct((16384, 8192), np.float32)  # half a gigabyte
TO_HOST, TO_DEVICE = "device_get", "device_put"
BUS = {"blocked": TO_HOST, "save": TO_HOST, "restore": TO_DEVICE}

Times = dict[str, dict[str, list[float]]]


def measure_side(run: Side, step: int, tree: Any, target: Any) -> dict[str, float]:
    """Seconds of one save and one restore; the step is deleted."""
    os.sync()
    blocked, save = save_seconds(run, step, tree)
    restore = restore_seconds(run, step, target)
    run.delete(step)
    return {"blocked": blocked, "save": save, "restore": restore}


def measure_bus(leaf: jax.Array, leaves: int) -> dict[str, float]:
    """Seconds that the whole state would take at the rate of one large array."""
    host = np.array(states.advance(leaf))
    leaf = states.advance(leaf)  # the copy of an array on the host is kept with it
    to_host = seconds(lambda: jax.device_get(leaf))
    to_device = seconds(lambda: jax.block_until_ready(jax.device_put(host)))
    return {TO_HOST: to_host * leaves, TO_DEVICE: to_device * leaves}


def measure(leaves: int, rounds: int) -> Times:
    """Seconds of both sides and of the bus, in turns, after a round that is not counted."""
    target = layouts.target({f"layer_{n}": LEAF for n in range(leaves)}, "single")
    tree = states.fill(target)
    with tempfile.TemporaryDirectory() as directory:
        runs = {}
        for side, kind in SIDES.items():
            Path(directory, side).mkdir()
            runs[side] = kind(Path(directory, side))
        found = []
        for step in range(rounds + 1):
            seconds_of = {}
            for side, run in runs.items():
                tree = states.advance(tree)
                seconds_of[side] = measure_side(run, step, tree, target)
            found.append(seconds_of | {"bus": measure_bus(tree["layer_0"], leaves)})
    return by_measurement(found[1:])


def tables(times: Times) -> list[Table]:
    """The medians beside Orbax, and beside the bus."""
    ours = {what: median(values) for what, values in times["flaxckpt"].items()}
    orbax = [Row(f"{what}, s", value, median(times["Orbax"][what])) for what, value in ours.items()]
    bus = [
        Row(f"{what} / {beside}, s", ours[what], median(times["bus"][beside]))
        for what, beside in BUS.items()
    ]
    return [Table("On a GPU", orbax), Table("Beside the bus", bus, sides=("flaxckpt", "bus"))]


def main() -> None:
    """Prints the tables, or that there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit(f"no GPU: jax runs on {jax.default_backend()}")
    logging.disable(logging.WARNING)
    leaves = max(1, round(chosen.gigabytes * 1e9 / states.nbytes(LEAF)))
    print("{date}: {machine}. {versions}.".format(**machine.describe()))
    size = f"{leaves} leaves, {leaves * states.nbytes(LEAF) / 1e9:.1f} GB"
    print(f"{jax.devices()[0].device_kind}; {size}; medians of {chosen.rounds}. {DURABILITY}")
    for table in tables(measure(leaves, chosen.rounds)):
        print(f"\n{table.markdown()}")


if __name__ == "__main__":
    main()
