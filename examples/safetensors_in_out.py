"""Exports a model to safetensors and imports it under other names, on another mesh.

Trains a linen model on handwritten digits on one mesh, writes its parameters in bfloat16 under the
names of another library, and starts a new run from that file. The step and the optimizer state,
which the file lacks, are initialised. `python examples/safetensors_in_out.py --workdir /tmp/in_out`
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

SPECS = {".*/hidden/kernel": PartitionSpec(None, "model"), ".*/out/kernel": PartitionSpec("model")}


class MLP(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits of the images `x`."""
        return nn.Dense(10, name="out")(nn.relu(nn.Dense(256, name="hidden")(x)))


MODEL, TX = MLP(), optax.adam(1e-2)


def init(key: jax.Array) -> TrainState:
    """The state before the first step."""
    params = MODEL.init(key, np.zeros((1, 64)))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=TX)


def init_on(mesh: Mesh) -> TrainState:
    """The same, on `mesh`."""
    abstract = flaxckpt.abstract_state(init, jax.random.key(0), mesh=mesh, specs=SPECS)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(init, out_shardings=shardings)(jax.random.key(0))


@jax.jit
def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> TrainState:
    """One step of gradient descent."""

    def loss_fn(params: dict) -> jax.Array:
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))


def theirs(name: str) -> str | None:
    """The name of a tensor in the file; `None` omits it."""
    return name.replace("params.", "model.") if name.startswith("params.") else None


def main(workdir: str, steps: int = 30) -> None:
    """Trains, writes the file, and reads it."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    meshes = [Mesh(np.reshape(jax.devices(), n), ("data", "model")) for n in ((2, 4), (1, 8))]
    digits = load_digits()
    images, labels = digits.data.astype(np.float32) / 16, digits.target
    state = init_on(meshes[0])
    for _ in range(steps):
        state = jax.block_until_ready(train_step(state, images, labels))
    flaxckpt.save(Path(workdir, "trained"), state, overwrite=True)

    file = Path(workdir, "model.safetensors")
    flaxckpt.export(Path(workdir, "trained"), file, rename=theirs, dtype="bfloat16", overwrite=True)
    print("written:", ", ".join(f"{n} {v.dtype}" for n, v in flaxckpt.restore(file).items()))

    new = flaxckpt.restore(
        file,
        init_on(meshes[1]),
        transforms=[flaxckpt.Rename(r"model\.(\w+)\.(\w+)", r"params/\1/\2")],
        missing={"opt_state/.*|step": "init"},
        dtype="widen",
    )
    kernel = new.params["hidden"]["kernel"]
    np.testing.assert_allclose(kernel, state.params["hidden"]["kernel"], rtol=1e-2)
    right = np.mean(np.argmax(MODEL.apply({"params": new.params}, images), -1) == labels)
    print(f"read at step {new.step}: {kernel.dtype} {kernel.sharding.spec}, {right:.0%} right")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--steps", type=int, default=30)
    main(**vars(parser.parse_args()))
