"""A small state (a CNN TrainState with adam, about 1 MB), saved and restored beside Orbax.

    python -m benchmarks.small [--rounds 15]

Both libraries save through their manager and are waited for, in turns. flaxckpt fsyncs every file
and directory before and after its commit; Orbax fsyncs only what TensorStore writes for it.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

import flaxckpt


class CNN(nn.Module):
    """A convolutional network for digits."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of a batch of images."""
        for features in (16, 32, 32):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
        x = nn.relu(nn.Dense(40)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


def state() -> TrainState:
    """The state, after one step."""
    model = CNN()
    params = model.init(jax.random.key(0), jnp.ones((1, 8, 8, 1)))["params"]
    created = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
    step = jax.jit(lambda s: s.apply_gradients(grads=jax.tree.map(jnp.ones_like, s.params)))
    return jax.block_until_ready(step(created))


def abstract(tree: Any) -> Any:
    """`tree` with shapes and shardings in place of its arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def milliseconds(call: Callable[[], Any]) -> float:
    """How long `call` takes."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def measure(rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Milliseconds of both libraries, in turns, by what was measured."""
    tree = state()
    target = abstract(tree)
    times: dict[str, tuple[list[float], list[float]]] = {}

    def note(what: str, ours: float, theirs: float) -> None:
        for column, value in zip(times.setdefault(what, ([], [])), (ours, theirs), strict=True):
            column.append(value)

    with (
        tempfile.TemporaryDirectory() as directory,
        flaxckpt.CheckpointManager(os.path.join(directory, "flaxckpt")) as ours,
        ocp.CheckpointManager(os.path.join(directory, "orbax")) as theirs,
    ):
        for step in range(rounds + 2):
            blocked = (
                milliseconds(lambda: ours.save(step, tree)),  # noqa: B023 - called at once
                0.0,
            )
            wait_ours = milliseconds(ours.wait)
            began = milliseconds(
                lambda: theirs.save(step, args=ocp.args.StandardSave(tree))  # noqa: B023
            )
            wait_theirs = milliseconds(theirs.wait_until_finished)
            if step < 2:
                continue  # both compile and import on their first save
            note("save, blocked", blocked[0], began)
            note("save, committed", blocked[0] + wait_ours, began + wait_theirs)
            note(
                "restore",
                milliseconds(lambda: jax.block_until_ready(ours.restore(target))),
                milliseconds(
                    lambda: jax.block_until_ready(
                        theirs.restore(step, args=ocp.args.StandardRestore(target))  # noqa: B023
                    )
                ),
            )
    return times


def main() -> None:
    """Prints medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    leaves = jax.tree.leaves(state())
    size = sum(x.nbytes for x in leaves) / 1e6
    print(
        f"{len(leaves)} leaves, {size:.2f} MB; {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, jax {jax.__version__}, orbax-checkpoint {ocp.__version__}; "
        f"medians of {arguments.rounds} rounds"
    )
    print(f"{'':18}{'flaxckpt':>12}{'Orbax':>12}{'ratio':>8}")
    for what, (ours, theirs) in measure(arguments.rounds).items():
        a, b = statistics.median(ours), statistics.median(theirs)
        print(f"{what:18}{a:9.2f} ms{b:9.2f} ms{a / b:8.3f}")


if __name__ == "__main__":
    main()
