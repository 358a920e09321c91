"""Restores a T5X checkpoint into a linen TrainState on a mesh, without T5X.

T5X writes a msgpack file with the tree, and a zarr array for each large parameter. The target is
the TrainState of a flax loop, sharded by PartitionSpecs. Each device's slices are read from the
chunks that hold them, and Adam's moments are sharded like their parameters.
`python examples/from_t5x.py --workdir /tmp/from_t5x`
"""

import argparse
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import tensorstore as ts
from flax import serialization
from flax.training.train_state import TrainState
from jax.sharding import Mesh, PartitionSpec

import flaxckpt

SPECS = {
    "params/token_embedder/embedding": PartitionSpec("model", "data"),
    "params/encoder/.*_wi/kernel": PartitionSpec("data", "model"),
    "params/encoder/.*_wo/kernel": PartitionSpec("model", "data"),
}


class Encoder(nn.Module):
    """Two layers, named as in T5X."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The output of the layers for `x`."""
        for i in range(2):
            y = nn.gelu(nn.Dense(64, use_bias=False, name=f"layers_{i}_wi")(x))
            x = x + nn.Dense(32, use_bias=False, name=f"layers_{i}_wo")(y)
        return nn.RMSNorm(name="encoder_norm")(x)


class Model(nn.Module):
    """A tiny encoder of tokens."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The output for `tokens`."""
        return Encoder(name="encoder")(nn.Embed(128, 32, name="token_embedder")(tokens))


def init(key: jax.Array) -> TrainState:
    """The state before the first step."""
    params = Model().init(key, np.zeros((1, 8), int))["params"]
    return TrainState.create(apply_fn=Model().apply, params=params, tx=optax.adamw(1e-3))


def write_like_t5x(path: Path) -> None:
    """Writes a checkpoint as T5X (version 3) does at step 1000."""

    def stored(keys: tuple[Any, ...], array: jax.Array) -> Any:
        if array.ndim < 2:
            return np.asarray(array)
        name = ".".join(key.key for key in keys)
        spec = {"driver": "zarr", "dtype": "float32", "kvstore": {"driver": "file", "path": name}}
        spec["metadata"] = {"shape": [*array.shape], "chunks": [n // 4 for n in array.shape]}
        there = spec | {"kvstore": {"driver": "file", "path": str(path / name)}}
        ts.open(there, create=True).result().write(np.asarray(array)).result()
        return spec

    state = serialization.to_state_dict(init(jax.random.key(1)))
    moments = {"0": state["opt_state"]["0"] | {"count": np.int32(1000)}}
    tree = {"target": state["params"], "state": {"param_states": moments, "step": np.int32(1000)}}
    tree = {"version": 3, "optimizer": jax.tree_util.tree_map_with_path(stored, tree)}
    path.mkdir(parents=True, exist_ok=True)
    (path / "checkpoint").write_bytes(serialization.msgpack_serialize(tree, in_place=True))


def main(workdir: str) -> None:
    """Restores the checkpoint and prints its shardings."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.reshape(jax.devices(), (4, 2)), ("data", "model"))
    theirs = Path(workdir, "checkpoint_1000").absolute()
    write_like_t5x(theirs)
    target = flaxckpt.abstract_state(init, jax.random.key(0), mesh=mesh, specs=SPECS)
    state = flaxckpt.restore(theirs, target)
    for name, tree in {"parameter": state.params, "moment": state.opt_state[0].mu}.items():
        kernel = tree["encoder"]["layers_0_wi"]["kernel"]
        shard = kernel.addressable_shards[0].data.shape
        print(f"{name} of {kernel.shape} as {kernel.sharding.spec}: {shard} on each device")
    logits = state.apply_fn({"params": state.params}, np.arange(8)[None])
    print(f"resumes at step {state.step}, Adam at {state.opt_state[0].count}: {logits.shape}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True)
    main(**vars(parser.parse_args()))
