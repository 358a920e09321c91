"""The loop of Flax's lm1b example: a language model on a mesh, and its data iterator.

Shows a linen transformer on 4 x 2 devices (eight parts of the CPU), its parameters and Adam's
moments sharded by `RULES`, trained on the docstrings of Python's standard library. grain's iterator
is saved as the item `data`, so a resumed run continues with the next batch. For any mesh, or none,
`flaxckpt.abstract_state` determines the sharding of each leaf, and `ckpt.restore` applies it. It
needs grain (`pip install grain`). Interrupt and repeat it:
`python examples/lm1b_style.py --workdir /tmp/lm1b_style`.
"""

import argparse
import importlib
import inspect

import flax.linen as nn
import grain
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, SingleDeviceSharding

import flaxckpt
from flaxckpt.testing import differences

RULES = (("embed", "data"), ("vocab", "model"), ("mlp", "model"), ("heads", "model"))
MODULES = "argparse array ast bisect collections csv datetime decimal difflib heapq io json logging"


def init_with(*axes: str | None) -> nn.initializers.Initializer:
    """An initializer of parameters with these logical axes."""
    return nn.with_logical_partitioning(nn.initializers.normal(0.02), axes)


class TransformerLM(nn.Module):
    """A decoder over the bytes of a text."""

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """The logits of the byte after each of `inputs`."""
        embed = nn.Embed(256, 64, embedding_init=init_with("vocab", "embed"))
        x = embed(inputs) + self.param("posembed", init_with(None, "embed"), (64, 64))
        for _ in range(2):
            qkv = nn.Dense(3 * 64, kernel_init=init_with("embed", "heads"))(nn.LayerNorm()(x))
            qkv = jax.numpy.moveaxis(qkv.reshape(*inputs.shape, 3, 4, 16), 2, 0)
            y = jax.nn.dot_product_attention(*qkv, is_causal=True).reshape(x.shape)
            x += nn.Dense(64, kernel_init=init_with("heads", "embed"))(y)
            y = nn.Dense(4 * 64, kernel_init=init_with("embed", "mlp"))(nn.LayerNorm()(x))
            x += nn.Dense(64, kernel_init=init_with("mlp", "embed"))(nn.gelu(y))
        return embed.attend(nn.LayerNorm()(x))


def create_learning_rate_schedule(step: jax.Array) -> jax.Array:
    """A linear warmup followed by the inverse square root of the step."""
    return 0.01 * jax.numpy.minimum((step + 1) / 10, jax.lax.rsqrt((step + 1) / 10))


def create_train_state(rng: jax.Array) -> TrainState:
    """The state before the first step."""
    model, tx = TransformerLM(), optax.adamw(create_learning_rate_schedule, weight_decay=0.01)
    params = model.init(rng, np.zeros((1, 64), np.uint8))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def get_dataset() -> grain.MapDataset:
    """Endless batches of pieces of the text, shuffled in each epoch."""
    objects = (o for m in MODULES.split() for o in vars(importlib.import_module(m)).values())
    docs = "\n".join(inspect.getdoc(o) or "" for o in objects if callable(o)).encode()
    text = np.frombuffer(docs, np.uint8, len(docs) // 65 * 65).reshape(-1, 65)
    return grain.MapDataset.source(text).seed(0).shuffle().repeat().batch(32)


@jax.jit
def loss_fn(params: dict, text: jax.Array) -> jax.Array:
    """The cross-entropy of the next byte, in nats."""
    logits = TransformerLM().apply({"params": params}, text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def restore_elsewhere(
    ckpt: flaxckpt.CheckpointManager, state: TrainState, mesh: Mesh | None
) -> float:
    """Restores the newest step on another mesh, compares it with `state`; returns its loss."""
    abstract = flaxckpt.abstract_state(
        create_train_state, jax.random.key(0), mesh=mesh, rules=RULES
    )
    restored = ckpt.restore(abstract)
    for leaf, wanted in zip(*map(jax.tree.leaves, (restored, abstract)), strict=True):
        assert leaf.sharding == (wanted.sharding or SingleDeviceSharding(jax.devices()[0]))
    assert not differences(state, restored)
    return float(loss_fn(restored.params, get_dataset()[0]))


def train_and_evaluate(workdir: str, steps: int, save_every: int) -> None:
    """Trains on one mesh to the end, resuming from `workdir`, then restores on other meshes."""
    mesh, other = (Mesh(np.reshape(jax.devices(), n), ("data", "model")) for n in ((4, 2), (2, 4)))
    data = iter(get_dataset())
    every = flaxckpt.Every(steps=save_every, at=[steps - 1])
    with flaxckpt.CheckpointManager(workdir, save_every=every) as ckpt:
        state = ckpt.restore_or_init(
            create_train_state, jax.random.key(0), mesh=mesh, rules=RULES, items={"data": data}
        )
        print("started" if ckpt.last_step is None else f"resumed from step {ckpt.last_step}")

        @jax.jit(donate_argnums=0, out_shardings=jax.tree.map(lambda x: x.sharding, state))
        def train_step(state: TrainState, text: jax.Array) -> TrainState:
            return state.apply_gradients(grads=jax.grad(loss_fn)(state.params, text))

        for step in range(ckpt.next_step, steps):
            state = train_step(state, next(data))
            jax.block_until_ready(state)  # parts of one CPU can starve each other of threads
            ckpt(step, state, items={"data": data})
    loss = float(loss_fn(state.params, get_dataset()[0]))
    for elsewhere in (other, None):
        restored_loss = restore_elsewhere(ckpt, state, elsewhere)
        assert np.isclose(restored_loss, loss, rtol=1e-5)
        where = dict(elsewhere.shape) if elsewhere else "one device"
        print(f"restored on {where}: loss {restored_loss:.4f}")
    print(f"trained to step {ckpt.latest_step()}: loss {loss:.4f}")


def main(workdir: str, steps: int = 40, save_every: int = 10) -> None:
    """Splits the CPU into 8 devices and trains."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    train_and_evaluate(workdir, steps, save_every)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    main(**vars(parser.parse_args()))
