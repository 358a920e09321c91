"""Orbax reads the items that it has a handler for, and is not kept from the others."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from google.protobuf import struct_pb2

import flaxckpt
from flaxckpt import Options

pytestmark = pytest.mark.filterwarnings("ignore:.*[Ss]harding.*:UserWarning")


class Iterator:
    def get_state(self):
        return b"\x00 opaque"

    def set_state(self, state):
        self.state = state


def message():
    made = struct_pb2.Struct()
    made.update({"a": 1.5})
    return made


CONFIG = {"a": [1, None, {"b": 2.5}], "c": "text"}
ITEMS = {
    "config": CONFIG,
    "data": Iterator(),
    "rng": np.random.default_rng(3),
    "old": np.random.RandomState(3),
    "key": jax.random.key(7),
    "raw": jax.random.PRNGKey(8),
    "other": jax.random.key(9, impl="rbg"),
    "ema": {"w": jnp.arange(4.0), "host": np.arange(3)},
    "array": np.arange(5.0),
    "hidden": {"only": b"bytes"},
    "message": message(),
}


@pytest.fixture(scope="module", params=[True, False], ids=["renamed", "marked"])
def run(request, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    options = Options(atomic_rename=request.param)
    with flaxckpt.CheckpointManager(run, options=options) as ckpt:
        ckpt.save(3, {"w": jnp.ones(3)}, items=ITEMS)
    return run


def words(key):
    typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(key) if typed else key).tolist()


def check(found):
    assert found["config"] == CONFIG
    for name in ("key", "raw", "other"):
        assert found[name].dtype == ITEMS[name].dtype
        assert words(found[name]) == words(ITEMS[name])
    rng = np.random.RandomState(0)
    rng.set_state(found["old"])
    assert rng.random_sample(4).tolist() == np.random.RandomState(3).random_sample(4).tolist()
    np.testing.assert_array_equal(found["ema"]["w"], np.arange(4.0))
    np.testing.assert_array_equal(found["ema"]["host"], np.arange(3))
    np.testing.assert_array_equal(found["array"], np.arange(5.0))


def test_orbax_restores_all_without_being_told_anything(run):
    with ocp.CheckpointManager(run) as manager:
        found = manager.restore(3)
    check(found)
    np.testing.assert_array_equal(found["state"]["w"], np.ones(3))
    for name in ("data", "rng", "hidden", "message"):
        assert found[name]["flaxckpt"]["read_by"] == "flaxckpt.restore_items"


def test_orbax_restores_what_it_is_told_to(run):
    args = ocp.args.Composite(
        config=ocp.args.JsonRestore(),
        old=ocp.args.NumpyRandomKeyRestore(),
        key=ocp.args.JaxRandomKeyRestore(),
        raw=ocp.args.JaxRandomKeyRestore(),
        other=ocp.args.StandardRestore(ITEMS["other"]),
        ema=ocp.args.StandardRestore(jax.tree.map(np.zeros_like, ITEMS["ema"])),
        array=ocp.args.PyTreeRestore(),
        message=ocp.args.ProtoRestore(struct_pb2.Struct),
        state=ocp.args.StandardRestore({"w": jnp.zeros(3)}),
    )
    with ocp.CheckpointManager(run) as manager:
        found = manager.restore(3, args=args)
    check(found)
    assert found["message"] == message()


def test_the_state_alone_and_the_v1_reader(run):
    from orbax.checkpoint import v1

    step = run / "3"
    np.testing.assert_array_equal(v1.load(step)["w"], np.ones(3))
    np.testing.assert_array_equal(v1.load(step, checkpointable_name="ema")["w"], np.arange(4.0))


def test_only_a_state_names_only_its_handler(tmp_path):
    flaxckpt.save(tmp_path / "x", {"a": 1})
    data = json.loads((tmp_path / "x" / "_CHECKPOINT_METADATA").read_bytes())
    assert list(data["item_handlers"]) == ["state"]
    assert list(data["custom_metadata"]["flaxckpt"]) == ["format", "attempt", "crc32c"]
    assert sorted(os.listdir(tmp_path / "x")) == ["_CHECKPOINT_METADATA", "state"]


NAMES_OF_ARGUMENTS = ["wait", "overwrite", "metadata", "step", "tree", "path", "items", "t"]


def test_items_may_be_called_like_arguments(tmp_path):
    configs = {name: {"name": name} for name in NAMES_OF_ARGUMENTS}
    flaxckpt.save(tmp_path / "x", {"w": jnp.ones(3)}, items=configs, metadata={"by": "me"})
    assert flaxckpt.restore_items(tmp_path / "x", dict.fromkeys(configs)) == configs
    args = {name: ocp.args.JsonRestore() for name in configs}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as orbax:
        read = orbax.restore(tmp_path / "x", ocp.args.Composite(**args))
    assert {name: read[name] for name in configs} == configs
