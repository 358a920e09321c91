"""Orbax, the version that flax installs, reads what flaxckpt writes."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt.testing import differences
from tests import zoo
from tests.trees import abstract

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


# What Orbax cannot save at all, or a module, which it sees as another tree than its state.
NOT_ORBAX = {"low_precision_leaves", "python_leaves", "zero_size_and_scalars", "nnx_module_direct"}


def on_device(tree):
    """An abstract `tree` on the first device, as Orbax wants it."""
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
            if isinstance(x, jax.ShapeDtypeStruct)
            else x
        ),
        abstract(tree),
    )


@pytest.fixture
def state():
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    created = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))
    return created.apply_gradients(grads=params)


@pytest.fixture
def run(tmp_path, state):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        ckpt.save(10, state, metrics={"loss": 0.5})
        ckpt.save(20, state)
    return tmp_path / "run"


@pytest.mark.parametrize("name", sorted(zoo.BUILD.keys() - NOT_ORBAX))
def test_our_tree_metadata_is_the_one_orbax_would_write(name, tmp_path):
    state = zoo.BUILD[name]()
    flaxckpt.save(tmp_path / "ours", state)
    with ocp.StandardCheckpointer() as theirs:
        theirs.save(tmp_path / "theirs", state)
    ours = json.loads((tmp_path / "ours/state/_METADATA").read_text())
    theirs = json.loads((tmp_path / "theirs/_METADATA").read_text())
    assert ours["tree_metadata"] == theirs["tree_metadata"]


@pytest.mark.parametrize("name", sorted(zoo.BUILD.keys() - NOT_ORBAX))
def test_orbax_restores_every_state_it_can_hold(name, tmp_path):
    state = zoo.BUILD[name]()
    flaxckpt.save(tmp_path / "x", state)
    restored = ocp.StandardCheckpointer().restore(tmp_path / "x/state", state)
    found, wanted = jax.tree.leaves(restored), jax.tree.leaves(state)
    for x, y in zip(found, wanted, strict=True):
        if isinstance(y, jax.Array) and not getattr(y, "weak_type", False):  # Orbax loses it
            assert differences(x, y) == []
        else:
            assert np.asarray(x == y).all()


def test_standard_checkpointer_with_an_abstract_state(run, state):
    restored = ocp.StandardCheckpointer().restore(run / "20/state", on_device(state))
    assert differences(restored.params, state.params) == []
    assert isinstance(restored, TrainState)


def test_manager_lists_and_restores(run, state):
    manager = ocp.CheckpointManager(run)
    assert manager.all_steps() == [10, 20]
    assert manager.latest_step() == 20
    restored = manager.restore(20)["state"]
    assert differences(restored["params"], state.params) == []


def test_v1_loads_with_and_without_an_abstract_tree(run, state):
    assert differences(v1.load(run / "20")["params"], state.params) == []
    loaded = v1.load(run / "20", on_device(state))
    assert differences(loaded.params, state.params) == []


def test_metrics_and_metadata_are_where_orbax_looks(tmp_path, state):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        ckpt.save(10, state, metrics={"loss": 0.5}, metadata={"lang": "en"})
    found = ocp.CheckpointManager(tmp_path / "run").metadata(10)
    assert found.metrics == {"loss": 0.5}
    assert found.custom_metadata["lang"] == "en"


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_are_typed_keys(impl, tmp_path):
    keys = {"one": jax.random.key(1, impl=impl), "many": jax.random.split(jax.random.key(2), 3)}
    flaxckpt.save(tmp_path / "x", keys)
    assert differences(ocp.StandardCheckpointer().restore(tmp_path / "x/state"), keys) == []
    assert differences(v1.load(tmp_path / "x"), keys) == []


def test_shardings_are_found_without_a_target(tmp_path):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    where = {
        "x": NamedSharding(mesh, P("data", "model")),
        "y": NamedSharding(mesh, P(("data", "model"))),
    }
    tree = {k: jax.device_put(jnp.arange(64.0).reshape(8, 8), s) for k, s in where.items()}
    flaxckpt.save(tmp_path / "x", tree)
    restored = ocp.StandardCheckpointer().restore(tmp_path / "x/state")
    assert differences(restored, tree) == []
    assert {k: v.sharding for k, v in restored.items()} == where


def test_what_orbax_cannot_hold_does_not_hide_the_rest(tmp_path):
    tree = {
        "bytes": b"x",
        "uint4": jnp.ones(3, jnp.uint4),
        "big": 2**70,
        "kept": jnp.arange(3.0),
        "text": "hello",
        "empty": jnp.zeros((0, 3)),
    }
    flaxckpt.save(tmp_path / "x", tree)
    for restored in (
        ocp.StandardCheckpointer().restore(tmp_path / "x/state"),
        v1.load(tmp_path / "x"),
    ):
        assert restored.keys() == {"kept", "text", "empty"}
        assert restored["text"] == "hello"
        assert differences(restored["kept"], tree["kept"]) == []


def test_a_flipped_bit_raises_in_orbax(tmp_path):
    flaxckpt.save(tmp_path / "x", {"w": np.arange(4096, dtype=np.float32)})
    (data,) = [p for p in (tmp_path / "x/state/d").iterdir() if p.stat().st_size > 16384]
    content = bytearray(data.read_bytes())
    content[9000] ^= 1
    data.write_bytes(content)
    with pytest.raises(ValueError, match="Digest mismatch|DATA_LOSS"):
        ocp.StandardCheckpointer().restore(tmp_path / "x/state")
    with pytest.raises(flaxckpt.errors.CorruptCheckpointError, match="the leaf w is damaged"):
        flaxckpt.restore(tmp_path / "x")
