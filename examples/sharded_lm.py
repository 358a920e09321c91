"""A sharded language model: saved on one mesh, restored on another and on one device.

Shows a linen transformer that is trained on a mesh of 4 x 2 devices (eight parts of the CPU), its
parameters and Adam's moments sharded by `RULES`, on the docstrings of Python's standard library.
For any mesh, or none, `flaxckpt.abstract_state` says where each leaf is to lie, and `ckpt.restore`
puts it there: `python examples/sharded_lm.py --workdir /tmp/sharded_lm`.
"""

import argparse
import importlib
import inspect

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, SingleDeviceSharding

import flaxckpt
from flaxckpt.testing import differences

RULES = (("embed", "data"), ("vocab", "model"), ("wide", "model"))
MODULES = "argparse array ast bisect collections csv datetime decimal difflib heapq io json logging"


def init_with(*axes: str | None) -> nn.initializers.Initializer:
    """An initializer of parameters with these logical axes."""
    return nn.with_logical_partitioning(nn.initializers.normal(0.02), axes)


class Transformer(nn.Module):
    """A decoder over the bytes of a text."""

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        """The logits of the byte after each of `text`."""
        up, down = init_with("embed", "wide"), init_with("wide", "embed")
        embed = nn.Embed(256, 64, embedding_init=init_with("vocab", "embed"))
        x = embed(text) + self.param("positions", init_with(None, "embed"), (64, 64))
        for _ in range(2):
            qkv = nn.Dense(3 * 64, kernel_init=up)(nn.LayerNorm()(x)).reshape(*text.shape, 3, 4, 16)
            y = jax.nn.dot_product_attention(*jax.numpy.moveaxis(qkv, 2, 0), is_causal=True)
            x += nn.Dense(64, kernel_init=down)(y.reshape(x.shape))
            y = nn.gelu(nn.Dense(4 * 64, kernel_init=up)(nn.LayerNorm()(x)))
            x += nn.Dense(64, kernel_init=down)(y)
        return embed.attend(nn.LayerNorm()(x))


def init(key: jax.Array) -> TrainState:
    """The state before the first step."""
    params = Transformer().init(key, np.zeros((1, 64), np.uint8))["params"]
    return TrainState.create(apply_fn=Transformer().apply, params=params, tx=optax.adamw(1e-2))


@jax.jit
def loss_fn(params: dict, text: jax.Array) -> jax.Array:
    """The cross-entropy of the next byte, in nats."""
    logits = Transformer().apply({"params": params}, text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def main(workdir: str, steps: int = 60) -> None:
    """Trains on one mesh, then restores on several and compares."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    meshes = [Mesh(np.reshape(jax.devices(), n), ("data", "model")) for n in ((4, 2), (2, 4))]
    objects = (o for m in MODULES.split() for o in vars(importlib.import_module(m)).values())
    docs = "\n".join(inspect.getdoc(o) or "" for o in objects if callable(o)).encode()
    text = np.frombuffer(docs, np.uint8, len(docs) // 65 * 65).reshape(-1, 65)
    with flaxckpt.CheckpointManager(workdir, save_every=flaxckpt.Every(at=[steps - 1])) as ckpt:
        state = ckpt.restore_or_init(init, jax.random.key(0), mesh=meshes[0], rules=RULES)

        @jax.jit(donate_argnums=0, out_shardings=jax.tree.map(lambda x: x.sharding, state))
        def train_step(state: TrainState, text: jax.Array) -> TrainState:
            return state.apply_gradients(grads=jax.grad(loss_fn)(state.params, text))

        for step in range(ckpt.next_step, steps):
            state = train_step(state, np.random.default_rng(step).choice(text, 32))
            jax.block_until_ready(state)  # parts of one CPU can starve each other of threads
            ckpt(step, state)
    loss = float(loss_fn(state.params, text[:32]))
    print(f"trained to step {ckpt.latest_step} on {len(docs)} bytes: loss {loss:.4f}")
    for mesh in (*meshes, None):
        abstract = flaxckpt.abstract_state(init, jax.random.key(0), mesh=mesh, rules=RULES)
        restored = ckpt.restore(abstract)
        for leaf, wanted in zip(*map(jax.tree.leaves, (restored, abstract)), strict=True):
            assert leaf.sharding == (wanted.sharding or SingleDeviceSharding(jax.devices()[0]))
        assert not differences(state, restored)
        restored_loss = float(loss_fn(restored.params, text[:32]))
        assert np.isclose(restored_loss, loss, rtol=1e-5)
        print(f"restored on {dict(mesh.shape) if mesh else 'one device'}: loss {restored_loss:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--steps", type=int, default=60)
    main(**vars(parser.parse_args()))
