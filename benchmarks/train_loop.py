"""A real train loop, with and without checkpoints: how many steps a second they cost."""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

from benchmarks import transformer
from benchmarks.plain_sides import HeldViews, PlainWrite
from benchmarks.sides import SIDES, Side
from benchmarks.transformer import Transformer

SAVE_EVERY = 10
WITHOUT = "without"
# What no library can avoid, or not on a CPU: the loop computes with the cores that save.
ANYWAY = {"a plain write of as many bytes": PlainWrite, "views of the state": HeldViews}


@dataclass(frozen=True)
class Loop:
    """A model, its batches, and how many segments of `SAVE_EVERY` steps each side has."""

    model: Transformer
    batch: int
    length: int
    segments: int


FULL = Loop(Transformer(), batch=2, length=128, segments=4)
QUICK = Loop(transformer.SMALL, batch=2, length=32, segments=1)


def cross_entropy(params: Any, state: TrainState, tokens: jax.Array) -> jax.Array:
    """The loss of a batch."""
    logits = state.apply_fn({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    """The state after a step, in the memory of the one before, and the loss."""
    loss, grads = jax.value_and_grad(cross_entropy)(state.params, state, tokens)
    return state.apply_gradients(grads=grads), loss


def segment(
    state: TrainState, loop: Loop, run: Side | PlainWrite | HeldViews | None, first: int
) -> TrainState:
    """Makes `SAVE_EVERY` steps; saves after the first, so that the others hide the writing."""
    for step in range(first, first + SAVE_EVERY):
        rng = np.random.default_rng(step)
        tokens = rng.integers(loop.model.vocab, size=(loop.batch, loop.length + 1), dtype=np.int32)
        state, loss = train_step(state, tokens)
        loss.block_until_ready()
        if run and step == first:
            run.save(step, state)
    if run:
        run.wait()
    return state


def measure(quick: bool) -> dict[str, Any]:
    """Seconds of every segment: without checkpoints, and with each side, in turns.

    The first segment of each is not counted: it compiles and imports.
    """
    loop = QUICK if quick else FULL
    state = jax.jit(partial(transformer.create, loop.model))()
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        runs: dict[str, Side | PlainWrite | HeldViews | None] = {WITHOUT: None}
        for side, kind in (SIDES | ANYWAY).items():
            Path(directory, side).mkdir()
            runs[side] = kind(Path(directory, side))
        for n in range(loop.segments + 1):
            for side, run in runs.items():
                os.sync()
                start, first = time.perf_counter(), n * SAVE_EVERY
                state = segment(state, loop, run, first)
                found[side].append(time.perf_counter() - start)
                if run:
                    run.delete(first)
    counted = {side: times[1:] for side, times in found.items()}
    title = "Train loop, small" if quick else "Train loop"
    return {"title": title, "steps": loop.segments * SAVE_EVERY, "seconds": counted}
