"""The states that are saved: S, M, L, K and B, each with a smaller one for `--quick`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from benchmarks import transformer
from benchmarks.transformer import Transformer

NAMES = {
    "S": "A CNN with adam",
    "K": "Leaves of 1 to 16 KB",
    "M": "A GPT-2-like transformer with adamw",
    "L": "Large leaves",
    "B": "A transformer in bfloat16 with moments in float32",
}
# Larger leaves repeat so many random values: farther than a codec at its fastest level looks back.
RANDOM = 1 << 22


class CNN(nn.Module):
    """A convolutional network for digits."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of a batch of images."""
        for features in (16, 32, 32):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
        x = nn.relu(nn.Dense(40)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


def cnn() -> TrainState:
    """The state S."""
    params = CNN().init(jax.random.key(0), jnp.ones((1, 8, 8, 1)))["params"]
    return TrainState.create(apply_fn=CNN().apply, params=params, tx=optax.adam(1e-3))


def many(groups: int) -> dict[str, dict[str, jax.Array]]:
    """The state K: 100 leaves a group, of 1 KB, 2 KB, ..., 16 KB, in turns."""
    return {
        f"group_{g}": {f"leaf_{n}": jnp.zeros(256 * ((g + n) % 16 + 1)) for n in range(100)}
        for g in range(groups)
    }


def large(rows: int) -> dict[str, jax.Array]:
    """The state L."""
    return {f"layer_{n}": jnp.zeros((rows, 8192)) for n in range(8)}


def mixed(model: Transformer) -> TrainState:
    """The state B."""
    state = transformer.create(model)
    return state.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params))


def abstract(name: str, *, quick: bool, layout: str = "single") -> Any:
    """The shapes and dtypes of a state; no array is made.

    Of K, only a fifth is sharded: Orbax takes minutes for each save of 10,000 sharded leaves.
    """
    builders: dict[str, Callable[[], Any]] = {
        "S": cnn,
        "K": functools.partial(many, 1 if quick else 100 if layout == "single" else 20),
        "M": functools.partial(transformer.create, transformer.SMALL if quick else Transformer()),
        "L": functools.partial(large, 192 if quick else 16384),
        "B": functools.partial(mixed, transformer.SMALL if quick else Transformer(layers=4)),
    }
    return jax.eval_shape(builders[name])


def nbytes(tree: Any) -> int:
    """The size of the arrays of a tree, abstract or not."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def fill(target: Any) -> Any:
    """Random arrays with the shapes, dtypes and shardings of `target`."""
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.standard_normal(min(leaf.size, RANDOM), np.float32)
        return jax.device_put(np.resize(values, leaf.shape).astype(leaf.dtype), leaf.sharding)

    return jax.block_until_ready(jax.tree.map(draw, target))


@jax.jit
def _step(x: jax.Array) -> jax.Array:
    """Another value of the same dtype, as compressible as the one before."""
    return x + 1 if jnp.issubdtype(x.dtype, jnp.integer) else x * 0.999


def advance(tree: Any) -> Any:
    """What a train step leaves: new arrays, just computed. One jit a leaf; 10,000 compile long."""
    return jax.block_until_ready(jax.tree.map(_step, tree))
