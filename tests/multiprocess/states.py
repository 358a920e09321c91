"""States that every process of a job builds by itself, each only what its devices hold of them.

A value depends on the name of its leaf and on its place in the whole array, so any number of
processes, on any mesh, builds the same state.
"""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt.jax_private import as_weak
from flaxckpt.leaves.array import is_key_dtype
from flaxckpt.tree.structure import flatten

# So small that leaves of some KiB have many chunks, which the holders of a replica share.
CHUNK_BYTES = 4096
TX = optax.adamw(1e-3)
# By the number of devices.
SHAPES = {2: (2, 1), 4: (2, 2), 8: (4, 2)}
PARAMS = {
    "both": ((16, 24), jnp.float32, P("data", "model")),
    "rows": ((16, 6), jnp.float32, P("data")),
    "columns": ((3, 16), jnp.bfloat16, P(None, "model")),
    "flat": ((64,), jnp.int8, P(("data", "model"))),
    "turned": ((8, 4096), jnp.float32, P("model", "data")),
    "partly": ((64, 256), jnp.float16, P("model")),  # a replica for each of `data`
    "uneven": ((7, 5), jnp.float32, P()),  # no axis of it can be divided
    "half_uneven": ((7, 16), jnp.float32, P(None, "model")),
    "small": ((5,), jnp.float32, P()),
    "large": ((96, 256), jnp.float32, P()),
    "empty": ((0, 16), jnp.float32, P(None, "data")),
}


def make_mesh(transposed=False):
    """All devices; transposed, every device holds other parts of what is sharded."""
    devices = np.array(jax.devices()).reshape(SHAPES[jax.device_count()])
    return Mesh(devices.T if transposed else devices, ("data", "model"))


def apply(params, x):
    """What the TrainState of these tests would compute."""
    return x * params["small"]


def abstract(mesh):
    """The state without the values of its jax arrays; what it has on the host has its values."""

    def on(spec, shape, dtype, weak=False):
        where = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where, weak_type=weak)

    params = {name: on(spec, shape, dtype) for name, (shape, dtype, spec) in PARAMS.items()}
    opt_state = optax.tree_map_params(
        TX,
        lambda leaf, param: on(param.sharding.spec, leaf.shape, leaf.dtype),
        jax.eval_shape(TX.init, params),
        params,
        transform_non_params=lambda leaf: on(P(), leaf.shape, leaf.dtype),
    )
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {
        "train": TrainState(12, apply, params, TX, opt_state),
        "scalars": {
            "global": on(P(), (), jnp.int32),
            "weak": on(P(), (), jnp.float32, weak=True),
            "weak_rows": on(P("data"), (8,), jnp.float32, weak=True),
            "of_each_process": jax.ShapeDtypeStruct((), jnp.float32, sharding=here),
            "weak_of_each": jax.ShapeDtypeStruct((), jnp.int32, sharding=here, weak_type=True),
        },
        "keys": {
            "sharded": on(P("data"), (8,), jax.random.key(0).dtype),
            "replicated": on(P(), (), jax.random.key(0).dtype),
            "rbg": on(P("model", None), (4, 3), jax.random.key(0, impl="rbg").dtype),
        },
        "host": {
            "numpy": values("numpy", (300, 7), np.float64),
            "numpy_scalar": np.float16(1.5),
            "int": -7,
            "float": 0.1,
            "bool": True,
            "str": "a string",
        },
        "nothing": [None, (), {}, []],
    }


def build(mesh):
    """The state on `mesh`, of which each process makes what its own devices hold."""
    tree = abstract(mesh)
    flat = flatten(tree)
    leaves = [_filled(*pair) for pair in zip(flat.names, flat.leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _filled(name, leaf):
    """A leaf of `abstract` with its values."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if is_key_dtype(leaf.dtype):
        impl = str(leaf.dtype._impl.name)
        shape = (*leaf.shape, *leaf.dtype._impl.key_shape)
        return jax.random.wrap_key_data(_array(name, shape, np.uint32, leaf.sharding), impl=impl)
    array = _array(name, leaf.shape, leaf.dtype, leaf.sharding)
    return as_weak(array) if leaf.weak_type else array


def _array(name, shape, dtype, where):
    """An array on `where`."""
    whole = values(name, shape, dtype)
    return jax.make_array_from_callback(shape, where, lambda index: whole[index])


def values(name, shape, dtype):
    """The whole array of a leaf: any bits, but no signalling NaNs, which arithmetic quietens."""
    dtype = np.dtype(dtype)
    bits = np.random.default_rng(zlib.crc32(name.encode())).bytes(
        int(np.prod(shape)) * dtype.itemsize
    )
    found = np.frombuffer(bits, dtype).reshape(shape)
    return np.where(np.isnan(found), dtype.type(1), found) if dtype.kind == "f" else found


def assert_equal(a, b):
    """Leaf by leaf: the structure, types, dtypes, weak types, shardings, and what is here."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    flat = flatten(a), flatten(b)
    assert flat[0].names == flat[1].names
    for name, x, y in zip(flat[0].names, *(one.leaves for one in flat), strict=True):
        assert type(x) is type(y), name
        if isinstance(x, jax.Array):
            _assert_same_array(name, x, y)
        elif isinstance(x, np.ndarray | np.generic):
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name
        else:
            assert x == y, name


def _assert_same_array(name, x, y):
    """The same array on the same devices, as far as this process holds it."""
    assert (x.dtype, x.shape) == (y.dtype, y.shape), name
    assert x.committed == y.committed, name
    assert x.sharding.is_equivalent_to(y.sharding, x.ndim), (name, x.sharding, y.sharding)
    if is_key_dtype(x.dtype):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    assert x.weak_type == y.weak_type, name
    shards = {shard.device: shard for shard in y.addressable_shards}
    assert len(shards) == len(x.addressable_shards) > 0, name
    for shard in x.addressable_shards:
        other = shards[shard.device]
        assert shard.index == other.index, (name, shard.device)
        assert np.asarray(shard.data).tobytes() == np.asarray(other.data).tobytes(), (
            f"{name} differs on {shard.device}"
        )


def on_the_host(tree):
    """The leaves of a restored tree by their names, for comparisons without a mesh."""
    flat = flatten(tree)
    return dict(zip(flat.names, flat.leaves, strict=True))


def assert_equal_on_the_host(tree):
    """What was restored without a target, jax arrays as numpy ones, is the state."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    expected, found = on_the_host(build(mesh)), on_the_host(tree)
    assert list(expected) == list(found)
    for name, x in expected.items():
        y = found[name]
        if isinstance(x, jax.Array) and is_key_dtype(x.dtype):
            assert y.dtype == x.dtype, name  # keys have no numpy form
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        if isinstance(x, jax.Array | np.ndarray | np.generic):
            x, y = np.asarray(x), np.asarray(y)
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name
        else:
            assert (type(x), x) == (type(y), y), name


def options(**settings):
    """How these tests write: many chunks, and no disk is waited for."""
    found = {"chunk_bytes": CHUNK_BYTES, "fsync": False, "timeout_secs": 30} | settings
    return flaxckpt.Options(**found)
