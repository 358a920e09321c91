"""The model, the data and the mesh of the pages, for their hidden set-ups: `import *`."""

import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import flaxckpt

__all__ = [
    "Counter",
    "Net",
    "data",
    "flaxckpt",
    "init_fn",
    "jax",
    "jnp",
    "make_state",
    "mesh",
    "nn",
    "np",
    "num_steps",
    "optax",
    "rng",
    "rules",
    "train_step",
    "types",
]

rng = jax.random.key(0)
mesh = Mesh(np.reshape(jax.devices(), (4, 2)), ("data", "model"))
rules = (("wide", "model"),)
num_steps = 4
data = [np.full((8, 4), step, np.float32) for step in range(num_steps)]


class Net(nn.Module):
    """Two dense layers, of which the first is wide."""

    classes: int = 2

    @nn.compact
    def __call__(self, x):
        """The logits of `x`."""
        wide = nn.with_logical_partitioning(nn.initializers.ones, (None, "wide"))
        return nn.Dense(self.classes, name="head")(nn.Dense(8, kernel_init=wide, name="encoder")(x))


def make_state(rng, tx, classes=2):
    """A state with another optimizer, or another head."""
    net = Net(classes)
    params = net.init(rng, jnp.zeros((1, 4)))["params"]
    return TrainState.create(apply_fn=net.apply, params=params, tx=tx)


_TX = optax.adam(1e-2)


def init_fn(rng):
    """The state before the first step."""
    return make_state(rng, _TX)


@jax.jit
def _step(state, batch):
    def loss_fn(params):
        return jnp.mean(state.apply_fn({"params": params}, batch) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def train_step(state, batch):
    """One step; parts of one CPU can starve each other of threads, so it is waited for."""
    return jax.block_until_ready(_step(state, batch))


class Counter:
    """A data iterator with a position."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        return data[self.position % len(data)]

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]
