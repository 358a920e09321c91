"""A linen CNN on handwritten digits, checkpointed by one line in the loop.

Shows a TrainState with batch statistics and a dropout key, saved by `ckpt(step, state, ...)` and
resumed by `ckpt.restore_or_init(...)`. A train step depends only on its number and the state, so a
run that is killed and resumed ends bitwise equal to an uninterrupted one:
`python examples/linen_digits.py --workdir /tmp/linen_digits`.
"""

import argparse
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training import train_state
from sklearn.datasets import load_digits

import flaxckpt


class TrainState(train_state.TrainState):
    """Everything the next step depends on."""

    batch_stats: Any
    dropout_key: jax.Array


class CNN(nn.Module):
    """Two convolutions and two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """The logits of the images `x`."""
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2)).reshape(len(x), -1)
        x = nn.Dropout(0.3, deterministic=not train)(nn.relu(nn.Dense(64)(x)))
        return nn.Dense(10)(x)


def load_data() -> tuple[np.ndarray, np.ndarray]:
    """Images and their labels, in a fixed order: 1437 to train on, and then 360 to test."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(1797)
    return digits.images[order, :, :, None].astype(np.float32) / 16, digits.target[order]


def init(key: jax.Array, steps: int) -> TrainState:
    """The state before the first of `steps` steps."""
    params_key, dropout_key = jax.random.split(key)
    variables = CNN().init(params_key, np.zeros((1, 8, 8, 1)), train=False)
    tx = optax.adamw(optax.cosine_decay_schedule(5e-3, steps), weight_decay=1e-3)
    return TrainState.create(apply_fn=CNN().apply, tx=tx, dropout_key=dropout_key, **variables)


@jax.jit
def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, dict]:
    """One step of gradient descent: the next state, and metrics."""

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        rngs = {"dropout": jax.random.fold_in(state.dropout_key, state.step)}
        logits, updates = state.apply_fn(variables, images, True, rngs=rngs, mutable="batch_stats")
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updates["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), {"loss": loss}


def accuracy(state: TrainState, images: np.ndarray, labels: np.ndarray) -> float:
    """The part of `images` that `state` classifies rightly."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return float(np.mean(CNN().apply(variables, images, False).argmax(-1) == labels))


def main(workdir: str, steps: int = 400, save_every: int = 50) -> None:
    """Trains to the end, from the newest step in `workdir` if there is one."""
    images, labels = load_data()
    schedule = flaxckpt.Every(steps=save_every, at=[steps - 1])
    with flaxckpt.CheckpointManager(workdir, save_every=schedule) as ckpt:
        state = ckpt.restore_or_init(init, jax.random.key(0), steps)
        print("started" if ckpt.last_step is None else f"resumed from step {ckpt.last_step}")
        for step in range(ckpt.next_step, steps):
            batch = np.random.default_rng(step).choice(1437, 128, replace=False)
            state, metrics = train_step(state, images[batch], labels[batch])
            if ckpt(step, state, metrics=metrics):
                print(f"step {step}: loss {metrics['loss']:.4f}, saved", flush=True)
    print(f"test accuracy {accuracy(state, images[1437:], labels[1437:]):.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=50)
    main(**vars(parser.parse_args()))
