"""How far the memory of a process grows during one save or one restore, in states.

Each is measured in a process of its own, from the resident memory just before it to the most there
ever was (the kernel's VmHWM, reset by writing 5 to clear_refs). A restore includes its result.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import layouts, process, states
from benchmarks.sides import SIDES, Side


def resident(field: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


def growth(call: Callable[[], Any]) -> int:
    """How many bytes more than before this process had at most while it made the call."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is reused would not be seen as growth
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = call()
    grown = resident("VmHWM") - before
    del result
    return grown


def warm_up(side: str, directory: Path) -> None:
    """Saves and restores a few bytes, which imports and compiles what any save does."""
    tiny = {"x": jnp.zeros(8)}
    directory.mkdir(exist_ok=True)
    run = SIDES[side](directory)
    run.save(0, tiny)
    run.wait()
    run.restore(0, layouts.target(tiny, "single"))
    run.delete(0)


def open_run(side: str, directory: str) -> Side:
    """The run of a side that is warm."""
    warm_up(side, Path(directory, "tiny"))
    path = Path(directory, "run")
    path.mkdir(exist_ok=True)
    return SIDES[side](path)


def save(side: str, state: str, layout: str, quick: bool, directory: str) -> int:
    """The growth of a save in the background, in bytes."""
    run = open_run(side, directory)
    tree = states.fill(layouts.target(states.abstract(state, quick=quick, layout=layout), layout))

    def commit() -> None:
        run.save(1, tree)
        run.wait()

    return growth(commit)


def restore(side: str, state: str, layout: str, quick: bool, directory: str) -> int:
    """The growth of a restore of what `save` left, in bytes."""
    run = open_run(side, directory)
    target = layouts.target(states.abstract(state, quick=quick, layout=layout), layout)
    return growth(lambda: jax.block_until_ready(run.restore(1, target)))


def measure(side: str, state: str, layout: str, quick: bool) -> dict[str, float]:
    """The growth of a save and of a restore, in states."""
    size = states.nbytes(states.abstract(state, quick=quick, layout=layout))
    devices = layouts.DEVICES[layout]
    with tempfile.TemporaryDirectory() as directory:
        arguments = side, state, layout, quick, directory
        return {
            "save": process.call(save, *arguments, devices=devices) / size,
            "restore": process.call(restore, *arguments, devices=devices) / size,
        }
