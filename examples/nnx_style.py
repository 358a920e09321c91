"""The loop of Flax's nnx example: a CNN, its optimizer and its random streams, restored in place.

`ckpt(step, (model, optimizer, rngs))` saves three objects, and
`ckpt.update(model, optimizer, rngs)` restores them in place. The dropout layer keeps its key and
its counter in the model, the batch norms keep their statistics there, and `rngs` shifts the images;
all of them resume where they stopped. The images are scikit-learn's digits. Interrupt and repeat
it: `python examples/nnx_style.py --workdir /tmp/nnx_style`.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import flaxckpt


class CNN(nnx.Module):
    """Two convolutions and two dense layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dense = nnx.Linear(4 * 4 * 32, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits of the images `x`."""
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2)).reshape(len(x), -1)
        return self.head(self.dropout(nnx.relu(self.dense(x))))


def load_data() -> tuple[np.ndarray, np.ndarray]:
    """Images and their labels, in a fixed order: 1437 to train on, and then 360 to test."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(1797)
    return digits.images[order, :, :, None].astype(np.float32) / 16, digits.target[order]


@nnx.jit
def train_step(
    model: CNN, optimizer: nnx.Optimizer, rngs: nnx.Rngs, images: jax.Array, labels: jax.Array
) -> jax.Array:
    """One step of gradient descent on images that are shifted, in place; returns the loss."""
    shift = jax.random.randint(rngs.augment(), (2,), -1, 2)
    images = jnp.roll(images, shift, axis=(1, 2))

    def loss_fn(model: CNN) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def accuracy(model: CNN, images: np.ndarray, labels: np.ndarray) -> float:
    """The part of `images` that `model` classifies rightly."""
    model.eval()
    return float(np.mean(model(images).argmax(-1) == labels))


def main(workdir: str, steps: int = 400, save_every: int = 50) -> None:
    """Trains to the end, from the newest step in `workdir` if there is one."""
    images, labels = load_data()
    rngs = nnx.Rngs(0, augment=1)
    model = CNN(rngs)
    tx = optax.adamw(optax.cosine_decay_schedule(5e-3, steps), weight_decay=1e-3)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    schedule = flaxckpt.Every(steps=save_every, at=[steps - 1])
    with flaxckpt.CheckpointManager(workdir, save_every=schedule) as ckpt:
        restored = ckpt.update(model, optimizer, rngs)
        print("started" if restored is None else f"resumed from step {restored}")
        for step in range(ckpt.next_step, steps):
            batch = np.random.default_rng(step).choice(1437, 128, replace=False)
            loss = train_step(model, optimizer, rngs, images[batch], labels[batch])
            if ckpt(step, (model, optimizer, rngs), metrics={"loss": loss}):
                print(f"step {step}: loss {loss:.4f}, saved", flush=True)
    print(f"{model.dropout.rngs.count[...]} dropout masks, {rngs.augment.count[...]} shifts drawn")
    print(f"test accuracy {accuracy(model, images[1437:], labels[1437:]):.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=50)
    main(**vars(parser.parse_args()))
