"""A checkpoint hook among the CLU hooks of a train loop.

Shows `flaxckpt.PeriodicCheckpoint` next to `clu.periodic_actions.ReportProgress` and its metric
writer. The loop calls `hook(step)` for each hook and never mentions checkpoints; the hook calls
`state_fn` for the state when it saves. Checkpoints and TensorBoard's files share one directory, and
`writer=` adds the cost of each save to the scalars. CLU needs TensorFlow
(`pip install 'flaxckpt[clu]'`). Run it twice, the second time with more steps:
`python examples/clu_hooks.py --workdir /tmp/clu_hooks --steps 2000`.
"""

import argparse
import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from clu import metric_writers, periodic_actions
from flax.training.train_state import TrainState

import flaxckpt


class MLP(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """An estimate of sin(x)."""
        return nn.Dense(1)(nn.tanh(nn.Dense(32)(x)))


def init(key: jax.Array) -> TrainState:
    """The state before the first step."""
    params = MLP().init(key, jnp.zeros((1, 1)))["params"]
    return TrainState.create(apply_fn=MLP().apply, params=params, tx=optax.adam(1e-2))


def loss_fn(params: dict, x: jax.Array) -> jax.Array:
    """The mean squared error of the estimates for `x`."""
    return jnp.mean((MLP().apply({"params": params}, x) - jnp.sin(x)) ** 2)


@jax.jit
def train_step(state: TrainState, x: jax.Array) -> TrainState:
    """One step of gradient descent."""
    return state.apply_gradients(grads=jax.grad(loss_fn)(state.params, x))


def main(workdir: str, steps: int = 1000, save_every: int = 200) -> None:
    """Trains to the end, from the newest step in `workdir` if there is one."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    writer = metric_writers.create_default_writer(workdir, asynchronous=False)
    with flaxckpt.CheckpointManager(workdir, keep=flaxckpt.Keep(last=2), writer=writer) as ckpt:
        state = ckpt.restore_or_init(init, jax.random.key(0))
        print("started" if ckpt.last_step is None else f"resumed from step {ckpt.last_step}")
        hooks = [
            flaxckpt.PeriodicCheckpoint(
                ckpt, every_steps=save_every, on_steps=[steps - 1], state_fn=lambda: state
            ),
            periodic_actions.ReportProgress(
                num_train_steps=steps - 1, every_steps=save_every, writer=writer
            ),
        ]
        for step in range(ckpt.next_step, steps):
            x = np.random.default_rng(step).uniform(-3, 3, (64, 1)).astype(np.float32)
            state = train_step(state, x)
            for hook in hooks:
                hook(step)
    writer.close()
    loss = loss_fn(state.params, jnp.linspace(-3, 3, 100)[:, None])
    print(f"loss {loss:.4f}, saved steps {ckpt.steps()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=200)
    main(**vars(parser.parse_args()))
