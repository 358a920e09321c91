"""A run that starts from the weights of an Orbax checkpoint, with a bigger head.

The checkpoint holds a classifier of the digits 0 to 4; the model of this run learns all ten. The
old parameters are kept, the head gets five more columns, and optimizer and step are initialised. A
second start resumes: `python examples/warm_start_bigger_head.py --workdir /tmp/warm`.
"""

import argparse
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, PartitionSpec
from sklearn.datasets import load_digits

import flaxckpt

IMAGES, LABELS = load_digits(return_X_y=True)


class Classifier(nn.Module):
    """Two dense layers."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits of the images `x`."""
        return nn.Dense(self.classes, name="head")(nn.relu(nn.Dense(128, name="body")(x)))


def init(key: jax.Array, classes: int) -> TrainState:
    """The state before the first step."""
    model = Classifier(classes)
    params = model.init(key, np.zeros((1, 64)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(3e-3))


@jax.jit
def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> TrainState:
    """One step of gradient descent."""

    def loss_fn(params: dict) -> jax.Array:
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))


def right(state: TrainState) -> str:
    """The share of all images that are classified correctly."""
    found = state.apply_fn({"params": state.params}, IMAGES).argmax(-1)
    return f"{np.mean(found == LABELS):.0%}"


def old_checkpoint(path: Path) -> None:
    """Trains the old classifier and saves it with Orbax, as its authors would have."""
    import orbax.checkpoint as ocp

    state, few = init(jax.random.key(1), 5), LABELS < 5
    for _ in range(50):
        state = train_step(state, IMAGES[few], LABELS[few])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def main(workdir: str) -> None:
    """Trains 30 more steps, from the newest step in `workdir` if there is one."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.reshape(jax.devices(), (2, 4)), ("data", "model"))
    old = Path(workdir, "old").absolute()
    if not old.exists():
        old_checkpoint(old)
    with flaxckpt.CheckpointManager(Path(workdir, "run")) as ckpt:
        state = ckpt.restore_or_init(
            lambda: init(jax.random.key(0), 10),
            mesh=mesh,
            specs={"params/body/kernel": PartitionSpec(None, "model")},
            init_from=old,
            transforms=[flaxckpt.Resize("params/head/.*", pad=0), flaxckpt.Drop("step")],
            missing={"step": "init"},
            opt_state="reset",
        )
        print("started" if ckpt.last_step is None else f"resumed from step {ckpt.last_step}")
        print(f"{ckpt.report}\nat step {state.step}: {right(state)} of all digits right")
        for step in range(ckpt.next_step, ckpt.next_step + 30):
            state = jax.block_until_ready(train_step(state, IMAGES, LABELS))
            ckpt(step, state)
    print(f"at step {state.step}: {right(state)} of all digits right")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True)
    main(**vars(parser.parse_args()))
