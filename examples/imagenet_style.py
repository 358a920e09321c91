"""The loop of Flax's ImageNet example: a data-parallel ResNet that keeps its best step.

Shows a TrainState with batch statistics and a cosine schedule, on a mesh of 8 devices (parts of the
CPU) that each process a share of every batch. Each evaluated step is saved with its accuracy, and
the best step is kept in addition to the last two. The images are scikit-learn's digits. Interrupt
and repeat it: `python examples/imagenet_style.py --workdir /tmp/imagenet_style`.
"""

import argparse
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import flaxckpt

Batch = dict[str, jax.Array]


class ResNetBlock(nn.Module):
    """Two convolutions and a shortcut."""

    filters: int
    strides: int
    norm: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The output of the block for `x`."""
        y = nn.Conv(self.filters, (3, 3), self.strides, use_bias=False)(x)
        y = nn.relu(self.norm()(y))
        y = nn.Conv(self.filters, (3, 3), use_bias=False)(y)
        y = self.norm(scale_init=nn.initializers.zeros_init())(y)
        if x.shape != y.shape:
            x = nn.Conv(self.filters, (1, 1), self.strides, use_bias=False, name="conv_proj")(x)
            x = self.norm(name="norm_proj")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A small ResNet."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """The logits of the images `x`."""
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        x = nn.relu(norm(name="bn_init")(nn.Conv(16, (3, 3), use_bias=False, name="conv_init")(x)))
        for stage in range(2):
            x = ResNetBlock(16 * 2**stage, strides=1 + stage, norm=norm)(x)
        return nn.Dense(10)(x.mean((1, 2)))


class TrainState(train_state.TrainState):
    """Everything the next step depends on."""

    batch_stats: Any


def create_learning_rate_fn(num_steps: int) -> optax.Schedule:
    """A linear warmup followed by half a cosine."""
    warmup = num_steps // 10
    return optax.warmup_cosine_decay_schedule(0.01, 0.3, warmup, num_steps)


def create_train_state(rng: jax.Array, num_steps: int) -> TrainState:
    """The state before the first step."""
    variables = ResNet().init(rng, jnp.ones((1, 8, 8, 1)))
    tx = optax.sgd(create_learning_rate_fn(num_steps), momentum=0.9, nesterov=True)
    return TrainState.create(apply_fn=ResNet().apply, tx=tx, **variables)


@jax.jit
def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
    """One step of gradient descent: the next state, and the loss."""

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        decay = 1e-4 / 2 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        return losses.mean() + decay, new["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


@jax.jit
def eval_step(state: TrainState, batch: Batch) -> jax.Array:
    """The accuracy of `state` on a batch."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["image"], train=False)
    return jnp.mean(logits.argmax(-1) == batch["label"])


def train_and_evaluate(workdir: str, steps: int, save_every: int) -> None:
    """Trains to the end, from the newest step in `workdir` if there is one."""
    mesh = Mesh(jax.devices(), ("batch",))
    put = partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec("batch")))
    digits, order = load_digits(), np.random.default_rng(0).permutation(1797)
    data = {"image": digits.images[..., None].astype(np.float32) / 16, "label": digits.target}
    train, test = ({k: v[part] for k, v in data.items()} for part in (order[:1437], order[1437:]))
    keep = flaxckpt.Keep(last=2, best=1, metric="accuracy", mode="max")
    with flaxckpt.CheckpointManager(workdir, keep=keep) as ckpt:
        state = ckpt.restore_or_init(create_train_state, jax.random.key(0), steps, mesh=mesh)
        print("started" if ckpt.last_step is None else f"resumed from step {ckpt.last_step}")
        for step in range(ckpt.next_step, steps):
            rows = np.random.default_rng(step).choice(1437, 128, replace=False)
            state, loss = train_step(state, put({k: v[rows] for k, v in train.items()}))
            jax.block_until_ready(state)  # parts of one CPU can starve each other of threads
            if step % save_every == 0 or step == steps - 1:
                accuracy = eval_step(state, put(test))
                ckpt(step, state, metrics={"accuracy": accuracy})  # each evaluated step is due
                print(f"step {step}: loss {loss:.4f}, accuracy {accuracy:.2%}", flush=True)
    best = ckpt.restore(state, step=ckpt.best_step())
    print(f"best of all: step {ckpt.best_step()}, accuracy {eval_step(best, put(test)):.2%}")


def main(workdir: str, steps: int = 100, save_every: int = 10) -> None:
    """Splits the CPU into 8 devices and trains."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    train_and_evaluate(workdir, steps, save_every)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    main(**vars(parser.parse_args()))
