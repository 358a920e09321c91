"""How long things take, in seconds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.sides import Side

Rounds = list[dict[str, dict[str, float]]]


def seconds(call: Callable[[], Any]) -> float:
    """How long `call` takes; the memory of its result is freed after the clock has stopped."""
    gc.collect()
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def save_seconds(side: Side, step: int, tree: Any) -> tuple[float, float]:
    """How long a save blocks its caller, and how long it takes until it is committed."""
    gc.collect()
    start = time.perf_counter()
    side.save(step, tree)
    blocked = time.perf_counter() - start
    side.wait()
    return blocked, time.perf_counter() - start


def restore_seconds(side: Side, step: int, target: Any) -> float:
    """How long a restore takes until every array is ready."""
    return seconds(lambda: jax.block_until_ready(side.restore(step, target)))


def by_measurement(rounds: Rounds) -> dict[str, dict[str, list[float]]]:
    """The values of all rounds, by side and by what was measured."""
    return {
        side: {what: [found[side][what] for found in rounds] for what in measured}
        for side, measured in rounds[0].items()
    }
