"""Saved on one mesh, restored on another, in processes with other numbers of devices."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt.sharding.chunks import Region
from flaxckpt.source import chunk_reads
from flaxckpt.source.checkpoint import open_checkpoint
from tests.processes import run

pytestmark = pytest.mark.slow

AXES = [AxisType.Auto, AxisType.Explicit]

SAVE = """
    import sys, jax, jax.numpy as jnp, numpy as np, flaxckpt
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    tree = {
        "rows": jax.device_put(jnp.arange(64 * 16.0).reshape(64, 16), NamedSharding(mesh, P("x"))),
        "both": jax.device_put(jnp.arange(1024).reshape(32, 32), NamedSharding(mesh, P("x", "y"))),
        "flat": jax.device_put(
            jnp.arange(64, dtype=jnp.bfloat16), NamedSharding(mesh, P(("y", "x")))
        ),
        "whole": jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P())),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("x"))),
    }
    flaxckpt.save(sys.argv[1], tree)
"""

RESTORE = """
    import json, sys, jax, jax.numpy as jnp, numpy as np, flaxckpt
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    shape, specs = json.loads(sys.argv[2]), json.loads(sys.argv[3])
    mesh = jax.make_mesh(shape, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    expected = {
        "rows": jnp.arange(64 * 16.0).reshape(64, 16),
        "both": jnp.arange(1024).reshape(32, 32),
        "flat": jnp.arange(64, dtype=jnp.bfloat16),
        "whole": jnp.arange(8.0),
        "keys": jax.random.split(jax.random.key(0), 8),
    }
    target = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*specs[name])))
        for name, x in expected.items()
    }
    restored = flaxckpt.restore(sys.argv[1], target)
    for name, x in restored.items():
        assert x.sharding.is_equivalent_to(target[name].sharding, x.ndim), (name, x.sharding)
        if name == "keys":
            x, expected[name] = jax.random.key_data(x), jax.random.key_data(expected[name])
        assert x.dtype == expected[name].dtype
        assert (np.asarray(x) == np.asarray(expected[name])).all(), name
    print(jax.device_count(), "devices are right")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("mesh") / "x"
    code, _, err = run(SAVE, path, devices=8)
    assert code == 0, err
    return path


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 2), (2, 4), (8, 1)])
def test_restored_by_another_number_of_devices(saved, shape):
    specs = {"rows": [None, "y"], "both": ["y", "x"], "flat": ["y"], "whole": ["x"], "keys": ["y"]}
    code, out, err = run(
        RESTORE, saved, json.dumps(shape), json.dumps(specs), devices=shape[0] * shape[1]
    )
    assert code == 0, err
    assert out == f"{shape[0] * shape[1]} devices are right\n"


@pytest.mark.parametrize("axis_type", AXES)
@pytest.mark.parametrize("spec", [P(), P("y"), P(None, "x"), P("y", "x"), P(("x", "y"))])
def test_restored_with_another_spec(saved, spec, axis_type):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    where = NamedSharding(mesh, spec)
    target = flaxckpt.inspect(saved).tree
    target = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in target.items() if k != "keys"}
    target["keys"] = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    target["both"] = jax.ShapeDtypeStruct((32, 32), jnp.int32, sharding=where)
    restored = flaxckpt.restore(saved, target)
    assert restored["both"].sharding == where
    assert (np.asarray(restored["both"]) == np.arange(1024).reshape(32, 32)).all()
    assert restored["rows"].devices() == {jax.devices()[0]}


def test_without_a_target_the_saved_mesh_is_not_needed(saved):
    code, out, err = run(
        "import sys, flaxckpt; print(flaxckpt.restore(sys.argv[1])['flat'].devices())", saved
    )
    assert code == 0, err
    assert "id=0" in out


def test_inspect_tells_the_mesh_and_the_spec(saved):
    info = flaxckpt.inspect(saved).tree["flat"]
    assert info.mesh == {"x": 4, "y": 2}
    assert info.partition == (("y", "x"),)
    assert info.nbytes == 128


def test_a_replicated_array_is_written_once(tmp_path):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    array = jax.device_put(jnp.arange(1 << 16, dtype=jnp.float32), NamedSharding(mesh, P("y")))
    flaxckpt.save(tmp_path / "x", array)
    size = sum(p.stat().st_size for p in (tmp_path / "x").rglob("*") if p.is_file())
    assert array.nbytes < size < array.nbytes + 10_000


@pytest.fixture
def keys_read(monkeypatch):
    """The keys of the chunks that are read."""
    keys = []
    real = chunk_reads.read_span

    def noting(directory, span):
        keys.extend(located.chunk.key for located in span)
        return real(directory, span)

    monkeypatch.setattr(chunk_reads, "read_span", noting)
    return keys


def test_each_chunk_is_read_once(saved, keys_read):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    target = flaxckpt.restore(saved)
    target["both"] = jax.device_put(target["both"], NamedSharding(mesh, P("y", "x")))
    keys_read.clear()
    flaxckpt.restore(saved, target)
    both = [key for key in keys_read if key.startswith("both/")]
    assert sorted(both) == [f"both/c/{i}/{j}" for i in range(4) for j in range(2)]


def test_only_the_chunks_of_a_region_are_read(saved, keys_read):
    """What a process reads whose devices hold the upper half of an array."""
    checkpoint = open_checkpoint(saved)
    leaf = next(leaf for leaf in checkpoint.leaves if leaf.name == "both")
    upper = Region((0, 0), (16, 32))
    ((parts,),) = chunk_reads.read_arrays(
        [chunk_reads.ArrayRead("both", leaf.array, [upper])], 1 << 20
    )
    assert (parts[upper] == np.arange(512).reshape(16, 32)).all()
    assert sorted(keys_read) == ["both/c/0/0", "both/c/0/1", "both/c/1/0", "both/c/1/1"]


def test_large_shards_are_cut_into_chunks(tmp_path):
    options = flaxckpt.Options(chunk_bytes=1000)
    array = jnp.arange(3 * 7 * 101, dtype=jnp.float32).reshape(3, 7, 101)
    flaxckpt.save(tmp_path / "x", array, options=options)
    info = flaxckpt.inspect(tmp_path / "x").tree
    assert np.prod(info.chunks) * 4 <= 1000
    assert (np.asarray(flaxckpt.restore(tmp_path / "x")) == np.asarray(array)).all()


def test_a_small_buffer_reads_and_writes_the_same(tmp_path):
    options = flaxckpt.Options(chunk_bytes=512, max_host_bytes=2048)
    tree = {str(i): jnp.arange(1000, dtype=jnp.int16) + i for i in range(5)}
    flaxckpt.save(tmp_path / "x", tree, options=options)
    restored = flaxckpt.restore(tmp_path / "x", tree, options=options)
    assert all((restored[k] == v).all() for k, v in tree.items())
