"""A sharded language model: saved on one mesh, restored on another and on one device.

Shows a linen transformer with logical axis names that is trained on a mesh of 4 x 2 devices, its
parameters and Adam's moments sharded by `RULES`. For any mesh, or none, `flaxckpt.abstract_state`
says where each leaf is to lie, and `ckpt.restore` puts it there. The text is the docstrings of
Python's standard library, the devices are eight parts of the CPU:
`python examples/sharded_lm.py --workdir /tmp/sharded_lm`.
"""

import argparse
import importlib
import inspect

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh

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
    return TrainState.create(apply_fn=Transformer().apply, params=params, tx=optax.adamw(3e-3))


@jax.jit
def loss_fn(params: dict, text: jax.Array) -> jax.Array:
    """The cross-entropy of the next byte, in nats."""
    logits = Transformer().apply({"params": params}, text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def main(workdir: str, steps: int = 100) -> None:
    """Trains on one mesh, then restores on several and compares."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    meshes = [Mesh(np.reshape(jax.devices(), n), ("data", "model")) for n in ((4, 2), (2, 4))]
    functions = (f for m in MODULES.split() for f in vars(importlib.import_module(m)).values())
    docs = "\n".join(inspect.getdoc(f) or "" for f in functions if callable(f)).encode()
    text = np.frombuffer(docs[: len(docs) // 65 * 65], np.uint8).reshape(-1, 65)

    with flaxckpt.CheckpointManager(workdir, save_every=flaxckpt.Every(at=[steps - 1])) as ckpt:
        state = ckpt.restore_or_init(init, jax.random.key(0), mesh=meshes[0], rules=RULES)
        shardings = jax.tree.map(lambda x: x.sharding, state)

        @jax.jit(donate_argnums=0, out_shardings=shardings)
        def train_step(state: TrainState, text: jax.Array) -> TrainState:
            return state.apply_gradients(grads=jax.grad(loss_fn)(state.params, text))

        for step in range(ckpt.next_step, steps):
            state = train_step(state, np.random.default_rng(step).choice(text, 32))
            ckpt(step, state)
    loss = loss_fn(state.params, text[:32])
    print(f"trained on {len(docs)} bytes to step {ckpt.latest_step}: loss {loss:.4f}")

    for mesh in (*meshes, None):
        abstract = flaxckpt.abstract_state(init, jax.random.key(0), mesh=mesh, rules=RULES)
        restored = ckpt.restore(abstract)
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = jax.tree.leaves(jax.tree.map(lambda x: x.sharding or place, abstract))
        assert [x.sharding for x in jax.tree.leaves(restored)] == wanted
        assert not differences(state, restored)
        assert np.allclose(loss_fn(restored.params, text[:32]), loss, rtol=1e-5)
        print(f"restored on {mesh}: loss {loss_fn(restored.params, text[:32]):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--steps", type=int, default=100)
    main(**vars(parser.parse_args()))
