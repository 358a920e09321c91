"""What `inspect` says of a checkpoint, and its tree as a target."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from etils import epath
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors
from tests.cli.shell import SAMPLES


def on_mesh(shape=(4, 2)):
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("x", "y"))

    def put(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    return {
        "both": put(jnp.arange(64.0).reshape(8, 8), "x", "y"),
        "flat": put(jnp.arange(16), ("y", "x")),
        "keys": put(jax.random.split(jax.random.key(0), 8), "x"),
        "host": np.arange(3, dtype=ml_dtypes.bfloat16),
        "one": jnp.float32(2.5),
        "step": 7,
        "name": "a",
    }


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y)
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def test_a_step_of_a_run(tmp_path):
    run = tmp_path / "run"
    with flaxckpt.CheckpointManager(run) as ckpt:
        ckpt.save(
            3,
            {"w": np.ones((2, 3), np.float32), "n": 1},
            metrics={"loss": 0.5},
            metadata={"lang": "en"},
            items={"data": {"position": 4}, "ema": {"w": np.zeros(5)}},
        )
    info = flaxckpt.inspect(run / "3")
    assert isinstance(info.path, epath.Path)
    assert (str(info.path), info.format, info.step) == (str(run / "3"), "flaxckpt", 3)
    assert (info.metrics, info.metadata) == ({"loss": 0.5}, {"lang": "en"})
    assert info.tree["w"].shape == (2, 3)
    assert info.tree["w"].dtype == np.float32
    assert (info.tree["n"].kind, info.tree["n"].dtype) == ("int", None)
    assert info.started <= info.committed
    assert info.committed.tzinfo is not None
    assert info.items.keys() == {"data", "ema"}
    assert (info.items["ema"].tree["w"].shape, info.items["ema"].nbytes) == ((5,), 40)
    shown = repr(info)
    assert "2 leaves" in shown
    assert "metrics: loss=0.5" in shown
    assert "items: data (" in shown
    assert re.search(r"^  w +float32\[2,3\] +24 B$", shown, re.MULTILINE)


def test_the_tree_is_a_target_that_restores_the_saved_shardings(tmp_path):
    state = on_mesh()
    flaxckpt.save(tmp_path / "x", state)
    info = flaxckpt.inspect(tmp_path / "x")
    assert info.tree["both"].mesh == {"x": 4, "y": 2}
    restored = flaxckpt.restore(tmp_path / "x", info.tree)
    same(restored, state)
    for name in ("both", "flat", "keys"):
        assert restored[name].sharding.is_equivalent_to(state[name].sharding, state[name].ndim)
    assert not restored["one"].committed


def test_a_smaller_mesh_takes_the_first_devices_and_one_that_is_too_large_none(tmp_path):
    small = on_mesh((2, 2))
    flaxckpt.save(tmp_path / "x", small)
    restored = flaxckpt.restore(tmp_path / "x", flaxckpt.inspect(tmp_path / "x").tree)
    assert restored["both"].sharding.device_set == set(jax.devices()[:4])
    info = flaxckpt.LeafInfo("w", flaxckpt.inspect(tmp_path / "x").tree["both"].spec)
    assert info.sharding is None
    huge = flaxckpt.LeafInfo("w", info.spec, mesh={"x": 10_000}, partition=("x",))
    assert huge.sharding is None


def test_a_train_state_with_boxes_and_an_optimizer(tmp_path):
    model = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.ones, ("a", "b")))
    params = model.init(jax.random.key(0), jnp.ones((1, 3)))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
    flaxckpt.save(tmp_path / "x", state)
    info = flaxckpt.inspect(tmp_path / "x")
    restored = flaxckpt.restore(tmp_path / "x", info.tree)
    same(jax.tree.leaves(restored), jax.tree.leaves(state))


@pytest.mark.parametrize(
    "path", ["t5x/checkpoint_1", "orbax/0.6.4/pt", "safetensors/model.safetensors", "clu"]
)
def test_other_formats(path):
    info = flaxckpt.inspect(SAMPLES / path)
    assert info.format != "flaxckpt"
    assert (info.step, info.committed, info.items) == (None, None, {})
    assert info.nbytes > 0
    restored = flaxckpt.restore(SAMPLES / path, info.tree)
    same(jax.tree.leaves(restored), jax.tree.leaves(flaxckpt.restore(SAMPLES / path)))


def test_ten_thousand_leaves_print_short(tmp_path):
    flat = {f"layer_{i}": np.int8(i % 100) for i in range(10_000)}
    deep = {f"block_{i}": {f"w{j}": j for j in range(100)} for i in range(100)}
    flaxckpt.save(tmp_path / "x", {"flat": flat, "deep": deep})
    info = flaxckpt.inspect(tmp_path / "x")
    assert len(repr(info)) < 1000
    assert "flat  (10000 leaves)" in repr(info)
    assert len(info._repr_html_()) < 100_000
    flaxckpt.save(tmp_path / "y", flat)
    flat_info = flaxckpt.inspect(tmp_path / "y")
    assert len(repr(flat_info)) < 2000
    assert repr(flat_info).endswith("  ... 9,980 more")
    assert len(flat_info._repr_html_()) < 100_000


def test_no_name_becomes_a_part_of_the_notebook_or_moves_the_cursor(tmp_path):
    hostile = "<script>alert(1)</script>\x1b[2J"
    flaxckpt.save(tmp_path / "x", {hostile: {hostile: np.ones(2)}}, metadata={"a": hostile})
    info = flaxckpt.inspect(tmp_path / "x")
    found = info._repr_html_()
    assert "<script" not in found
    assert "&lt;script&gt;" in found
    assert "\x1b" not in found + repr(info)
    assert found.count("<details") == found.count("</details>") == 2


def test_a_leaf_alone_and_an_empty_tree(tmp_path):
    flaxckpt.save(tmp_path / "x", np.arange(3))
    info = flaxckpt.inspect(tmp_path / "x")
    assert info.tree.shape == (3,)
    assert "(the whole tree)  int64[3]" in repr(info)
    flaxckpt.save(tmp_path / "y", {})
    empty = flaxckpt.inspect(tmp_path / "y")
    assert (empty.tree, empty.nbytes) == ({}, 0)
    assert "0 leaves" in repr(empty)
    assert "empty" in empty._repr_html_()


def test_what_jax_cannot_hold_now_is_an_error(tmp_path):
    flaxckpt.save(tmp_path / "x", {"w": np.arange(3.0)})
    with jax.enable_x64(True):
        flaxckpt.save(tmp_path / "y", {"w": jnp.arange(3.0)})
    assert (
        flaxckpt.restore(tmp_path / "x", flaxckpt.inspect(tmp_path / "x").tree)["w"].dtype == "f8"
    )
    with pytest.raises(errors.StructureMismatchError, match="float64"):
        flaxckpt.restore(tmp_path / "y", flaxckpt.inspect(tmp_path / "y").tree)


def test_an_inspected_tree_has_no_values(tmp_path):
    flaxckpt.save(tmp_path / "x", {"w": np.arange(3.0)})
    flaxckpt.save(tmp_path / "y", {"w": np.arange(3.0), "b": np.ones(2)})
    with pytest.raises(errors.UnsupportedLeafError, match="has no value"):
        flaxckpt.save(tmp_path / "z", flaxckpt.inspect(tmp_path / "x").tree)
    target = flaxckpt.inspect(tmp_path / "y").tree
    with pytest.raises(errors.RuleError, match="abstract"):
        flaxckpt.restore(tmp_path / "x", target, missing="init")


def test_a_lazy_checkpoint_is_a_public_type(tmp_path):
    flaxckpt.save(tmp_path / "x", {"w": np.arange(3.0)})
    assert isinstance(flaxckpt.lazy(tmp_path / "x"), flaxckpt.LazyCheckpoint)
