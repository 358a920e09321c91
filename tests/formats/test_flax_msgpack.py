"""Files of flax.training.checkpoints and of flax.serialization."""

import contextlib
import shutil
import warnings

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import optax
import pytest
from flax import serialization
from flax.core import freeze
from flax.training import checkpoints, train_state
from jax.experimental.array_serialization import serialization as jax_serialization
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors
from flaxckpt.formats import flax_msgpack
from tests import stores
from tests.formats import flax_states
from tests.formats.flax_states import SAMPLES
from tests.trees import assert_same

LEGACY = SAMPLES / "flax_legacy"

KINDS = {
    "f32": np.array([[0, 1, 2], [3, 4, 5]], np.float32),
    "bf16": np.array([1, 1, 1], ml_dtypes.bfloat16),
    "e4m3": np.array([1, 1, 1], ml_dtypes.float8_e4m3fn),
    "int4": np.array([1, 1, 1], ml_dtypes.int4),
    "bool": np.array([True, False]),
    "c64": np.array([1], np.complex64),
    "scalar0d": np.array(3.5, np.float32),
    "np_scalar": np.float32(2.5),
    "py": {"i": 7, "f": 0.5, "s": "hé", "b": True, "none": None, "c": 1 + 2j, "bytes": b"ab"},
    "tuple": {"0": 1, "1": {"0": 2, "1": 3}},
    "list": {"0": np.array([0], np.float32)},
    "empty": {},
    "masked": {},
    "zero": np.zeros((0, 2), np.float32),
}

# The orbax samples of flax.training.checkpoints; 0.2.7 kept arrays in its msgpack file.
ORBAX = {
    "a": np.array([0, 1, 2, 3], np.float32),
    "b": {"c": np.array([[1, 1], [1, 1]], ml_dtypes.bfloat16)},
    "e": {},
    "f": 2.5,
    "i": 3,
    "l": [np.array([1], np.float32), 2],
    "n": np.array([0, 1, 2], np.int64),
    "none": None,
}


def restored(path, **kwargs):
    return flaxckpt.restore(path, as_numpy=True, **kwargs)


def on_host(tree):
    """`tree` as flax's state dict, with numpy arrays for jax arrays."""
    state = serialization.to_state_dict(tree)
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, state)


@contextlib.contextmanager
def legacy_flax():
    """Lets flax write its own files, of which it warns."""
    before = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    flax.config.update("flax_use_orbax_checkpointing", before)


@pytest.mark.parametrize("step", [1, 2, 10])
def test_samples_of_train_states(step):
    assert_same(restored(LEGACY / f"checkpoint_{step}"), flax_states.train_state(step))


@pytest.mark.parametrize("name", ["best_0.25", "neg_-1.5"])
def test_samples_of_float_steps(name):
    assert_same(restored(LEGACY / name), {"m": np.array([1, 1], np.float32)})


def test_sample_of_every_kind():
    assert_same(restored(SAMPLES / "flax_legacy_kinds" / "checkpoint_3"), KINDS)


@pytest.mark.parametrize("version", ["0.2.7", "0.4.4", "0.6.4"])
def test_samples_that_flax_wrote_with_orbax(version):
    found = restored(SAMPLES / "orbax" / version / "flaxmsgpack" / "checkpoint_0")
    (last,) = found.pop("t")  # what was a tuple is a list in the oldest
    assert_same(last, np.array([0], np.float32))
    assert_same(found, ORBAX)


@pytest.mark.parametrize("step", [0, 7, 0.25, -1.5])
def test_what_flax_saves_now(tmp_path, step):
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))
    with legacy_flax():
        path = checkpoints.save_checkpoint(tmp_path, state, step, prefix="p_")
        other = checkpoints.restore_checkpoint(tmp_path, None, prefix="p_")
    assert_same(restored(path), on_host(state))
    assert_same(restored(path), other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "int4", "uint2"])
def test_small_dtypes(tmp_path, dtype):
    tree = {"a": jnp.array([[1, 0, 1]], dtype), "b": np.ones((), ml_dtypes.bfloat16)[()]}
    (tmp_path / "f").write_bytes(serialization.to_bytes(tree))
    assert_same(restored(tmp_path / "f"), on_host(tree))


def test_containers_of_flax(tmp_path):
    tree = {
        "boxed": nn.Partitioned(jnp.arange(4.0), ("x",)),
        "frozen": freeze({"a": {"b": jnp.ones(2)}}),
        "tuple": (1, optax.EmptyState(), [2]),
    }
    (tmp_path / "f").write_bytes(serialization.to_bytes(tree))
    expected = {
        "boxed": {"value": np.arange(4, dtype=np.float32)},
        "frozen": {"a": {"b": np.ones(2, np.float32)}},
        "tuple": {"0": 1, "1": {}, "2": {"0": 2}},
    }
    assert_same(restored(tmp_path / "f"), expected)


def test_chunked_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 64)
    tree = {"a": {"b": np.arange(50.0).reshape(5, 10)}, "c": jnp.arange(100, dtype=jnp.bfloat16)}
    expected = on_host(tree)
    (tmp_path / "f").write_bytes(serialization.to_bytes(tree))
    assert_same(restored(tmp_path / "f"), expected)


def test_an_empty_state(tmp_path):
    (tmp_path / "f").write_bytes(serialization.to_bytes({}))
    assert restored(tmp_path / "f") == {}


def test_what_is_restored_may_be_written_to(tmp_path):
    (tmp_path / "f").write_bytes(serialization.to_bytes({"a": np.zeros(3)}))
    found = restored(tmp_path / "f")
    found["a"] += 1
    assert_same(restored(tmp_path / "f"), {"a": np.zeros(3)})


def sharded(mesh):
    """A tree of which flax keeps two arrays apart."""
    rows = NamedSharding(mesh, P("x"))
    return {
        "a": {"b": jax.device_put(jnp.arange(16.0).reshape(8, 2), rows)},
        "s": 3,
        "z": jax.device_put(jnp.zeros(8, jnp.bfloat16), rows),
    }


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


@pytest.fixture
def apart(tmp_path, monkeypatch, mesh):
    """A checkpoint of flax with arrays in a directory, as of several processes."""
    monkeypatch.setattr(
        checkpoints, "_is_multiprocess_array", lambda x: len(getattr(x, "devices", list)()) > 1
    )
    manager = jax_serialization.GlobalAsyncCheckpointManager()
    with legacy_flax():
        path = checkpoints.save_checkpoint_multiprocess(
            tmp_path, sharded(mesh), 5, gda_manager=manager
        )
        manager.wait_until_finished()
    return tmp_path / path.rpartition("/")[2]


def test_arrays_in_a_directory(apart):
    expected = {
        "a": {"b": np.arange(16, dtype=np.float32).reshape(8, 2)},
        "s": 3,
        "z": np.zeros(8, ml_dtypes.bfloat16),
    }
    assert b"//GDAPlaceholder:a/b" in apart.read_bytes()
    assert_same(restored(apart), expected)


def test_arrays_in_a_directory_onto_a_mesh(apart, mesh):
    target = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, sharded(mesh))) | {"s": 0}
    target["a"]["b"] = jax.ShapeDtypeStruct(
        (8, 2), jnp.float32, sharding=NamedSharding(mesh, P(None, None))
    )
    found = flaxckpt.restore(apart, target)
    assert found["a"]["b"].sharding.is_fully_replicated
    assert_same(np.asarray(found["a"]["b"]), np.arange(16, dtype=np.float32).reshape(8, 2))


def test_the_directory_itself_may_be_the_array(apart):
    shutil.move(f"{apart}_gda/z", apart.with_name("g_gda"))
    apart.with_name("g").write_bytes(msgpack.packb({"z": "//GDAPlaceholder:"}))
    assert_same(restored(apart.with_name("g")), {"z": np.zeros(8, ml_dtypes.bfloat16)})


@pytest.mark.parametrize("scheme", stores.BUCKETS)
def test_arrays_in_a_directory_of_a_bucket(apart, scheme):
    arrays = apart.with_name(f"{apart.name}_gda")
    with stores.opened(scheme, None) as store:
        for file in (apart, *(path for path in arrays.rglob("*") if path.is_file())):
            store.write("run", str(file.relative_to(apart.parent)), file.read_bytes())
        url, options = store.url(f"run/{apart.name}"), store.options(retries=0)
        if scheme == "gcs":  # where nothing is renamed, this is what finishes a save
            with pytest.raises(errors.CorruptCheckpointError, match="not written to the end"):
                flaxckpt.restore(url, options=options)
            store.write(f"run/{arrays.name}", "commit_success.txt", b"")
        found = flaxckpt.restore(url, as_numpy=True, options=options)
        assert_same(found, restored(apart))


@pytest.mark.parametrize("gone", ["z", "z/3", "z/.zarray", ""])
def test_what_is_missing_of_the_directory(apart, gone):
    path = apart.with_name(f"{apart.name}_gda") / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(errors.CorruptCheckpointError, match=r"'z'|'a/b'"):
        restored(apart)


@pytest.mark.parametrize("name", ["../checkpoint_5_gda/z", "/etc", "a/../../x"])
def test_references_to_the_outside(apart, name):
    apart.write_bytes(serialization.to_bytes({"z": f"//GDAPlaceholder:{name}"}))
    with pytest.raises(errors.CorruptCheckpointError, match="not inside"):
        restored(apart)


def test_the_file_of_an_orbax_checkpoint():
    file = SAMPLES / "orbax" / "0.2.7" / "pt" / "checkpoint"
    with pytest.raises(errors.CorruptCheckpointError, match=r"part of .*Orbax.* Restore .*pt\."):
        restored(file)


NOT_STATES = {
    "empty": b"",
    "text": b"hello",
    "json": b'{"a": 1}',
    "pickle": b"\x80\x04\x95\x00\x00\x00",
    "png": b"\x89PNG\r\n\x1a\n",
    "npy": b"\x93NUMPY\x01\x00",
    "gzip": b"\x1f\x8b\x08\x00",
    "zip": b"PK\x03\x04",
    "jpeg": b"\xff\xd8\xff\xe0",
    "list": b"\x91\xa1a",
    "key no name": b"\x81\x01\x02",
    "key cut": b"\x81\xa9ab",
    "key not utf-8": b"\x81\xa1\xff\x01",
    "endless": b"\xdf\xff\xff\xff",
}


@pytest.mark.parametrize("name", NOT_STATES)
def test_other_files_are_not_claimed(tmp_path, name):
    (tmp_path / "f").write_bytes(NOT_STATES[name])
    assert not flax_msgpack.detect(stores.at(tmp_path / "f"))


def test_directories_are_not_claimed(tmp_path):
    assert not flax_msgpack.detect(stores.at(tmp_path))
    assert not flax_msgpack.detect(stores.at(tmp_path / "missing"))


@pytest.mark.parametrize("count", [1, 15, 16, 70_000])
def test_dicts_of_any_size_are_claimed(tmp_path, count):
    tree = {f"{'k' * 50}{i}": i for i in range(count)}
    (tmp_path / "f").write_bytes(serialization.to_bytes(tree))
    assert flax_msgpack.detect(stores.at(tmp_path / "f"))
    assert flax_msgpack.read(stores.at(tmp_path / "f")) == tree


def test_a_cut_file_is_damaged(tmp_path):
    data = (LEGACY / "checkpoint_2").read_bytes()
    (tmp_path / "checkpoint_2").write_bytes(data[:-1])
    with pytest.raises(errors.CorruptCheckpointError, match="checkpoint_2 is damaged"):
        restored(tmp_path / "checkpoint_2")


def test_the_parent_lists_what_is_in_it():
    with pytest.raises(errors.CheckpointNotFoundError, match="checkpoint_10"):
        restored(LEGACY)
