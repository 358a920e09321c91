"""What a snapshot costs a loop that donates its state: as views, as flaxckpt takes it, or copied.

While a view of an array lives, jax gives the step other memory instead of the array's own. A copy
costs its time at once, and as much memory for ever.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import seconds

State = list[jax.Array]
LEAVES, QUICK_LEAVES = 64, 8
SIZE = 1 << 20  # floats a leaf


@partial(jax.jit, donate_argnums=0)
def train_step(state: State) -> State:
    """A step that does nothing but write its state."""
    return [x * 0.999 for x in state]


def timed_step(state: State) -> tuple[State, float]:
    """The next state, and how long it took."""
    start = time.perf_counter()
    state = jax.block_until_ready(train_step(state))
    return state, time.perf_counter() - start


def measure(rounds: int, quick: bool) -> dict[str, list[float]]:
    """Seconds of a step after nothing, after views were taken, and after copies were."""
    state: State = [jnp.ones(SIZE) for _ in range(QUICK_LEAVES if quick else LEAVES)]
    staging = [np.ones(SIZE, np.float32) for _ in state]
    found: dict[str, list[float]] = defaultdict(list)
    held: list[Any] = []

    def views() -> None:
        held.extend(np.asarray(x) for x in state)

    def copies() -> None:
        for memory, x in zip(staging, state, strict=True):
            np.copyto(memory, np.asarray(x))

    for _ in range(rounds + 2):
        os.sync()
        state, found_step = timed_step(state)
        found["a step"].append(found_step)
        found["blocked by views"].append(seconds(views))
        state, found_step = timed_step(state)
        found["the step after views"].append(found_step)
        held.clear()
        state, _ = timed_step(state)
        found["blocked by copies"].append(seconds(copies))
        state, found_step = timed_step(state)
        found["the step after copies"].append(found_step)
    return {what: times[2:] for what, times in found.items()}
