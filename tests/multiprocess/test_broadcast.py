"""Restoring what one replica reads, on all that hold a copy of it."""

import numpy as np
import pytest

from tests import cluster

DTYPES = ("float32", "bfloat16", "int8", "float16", "bool", "uint32")


def arrays(mesh):
    """Arrays of a few MB whose bits are random, NaNs and minus zeros included."""
    import jax
    import ml_dtypes
    from jax.sharding import NamedSharding, PartitionSpec

    def put(values, *spec):
        where = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(values.shape, where, lambda index: values[index])

    tree = {"small": put(np.arange(8.0, dtype=np.float32)), "number": 3}
    for seed, name in enumerate(DTYPES):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        bits = np.random.default_rng(seed).integers(0, 256, (1024, 2048 * dtype.itemsize), np.uint8)
        values = (bits & 1 if name == "bool" else bits).view(dtype)
        tree[name] = {
            "everywhere": put(values),
            "by model": put(values, "model"),
            "by both": put(values, ("data", "model")),
        }
    return tree


def meshes(axis_types=None):
    import jax

    count = jax.device_count()
    return jax.make_mesh((count // 2, 2), ("data", "model"), axis_types=axis_types)


def save(context, directory):
    import flaxckpt

    del context
    flaxckpt.CheckpointManager(directory).save(0, arrays(meshes()), wait=True)


def restore(context, directory, broadcast, damaged=None):
    """How many bytes of data files this process has read."""
    import jax

    import flaxckpt
    from flaxckpt.store import ocdbt

    read, real = [], ocdbt.read_into

    def counting(where, place, buffers):
        read.append(place.length)
        if context.index == damaged and len(read) == 3:
            raise flaxckpt.errors.CorruptCheckpointError("it is damaged")
        real(where, place, buffers)

    ocdbt.read_into = counting
    results = []
    for types in (None, (jax.sharding.AxisType.Auto,) * 2):
        expected = arrays(meshes(types))
        options = flaxckpt.Options(broadcast=broadcast)
        ckpt = flaxckpt.CheckpointManager(directory, read_only=True, options=options)
        read.clear()
        try:
            found = ckpt.restore(expected)
        except flaxckpt.errors.CorruptCheckpointError as error:
            return str(error)
        jax.tree.map(assert_same_bits, expected, found)
        results.append(sum(read))
    return results


def assert_same_bits(a, b):
    if isinstance(a, int):
        assert a == b
        return
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert a.dtype == b.dtype
    for ours, theirs in zip(a.addressable_shards, b.addressable_shards, strict=True):
        ours, theirs = np.asarray(ours.data), np.asarray(theirs.data)
        assert ours.tobytes() == theirs.tobytes()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    cluster.run(save, 2, str(directory), local_devices=2)
    return str(directory)


def test_all_bits_come_back_and_copies_are_not_read_twice(directory):
    """A third of it is everywhere, a third on half of the devices, and a third in quarters."""
    plain = [r.value for r in cluster.run(restore, 4, directory, False)]
    shared = [r.value for r in cluster.run(restore, 4, directory, True)]
    for with_types in range(2):
        total = sum(value[with_types] for value in shared)
        assert total < 1.01 * 3 * 14 * (1 << 21)  # each byte once, by somebody
        assert total < 0.5 * sum(value[with_types] for value in plain)


def test_a_process_that_cannot_read_does_not_keep_the_others_waiting(directory):
    results = cluster.run(restore, 4, directory, True, 2)
    assert all("it is damaged" in r.value for r in results)
    assert "process 2" in results[0].value
