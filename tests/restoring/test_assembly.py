"""Arrays too large for the host's memory, with the CPU in the role of another device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import flaxckpt
from flaxckpt.restoring import read_leaves

OPTIONS = flaxckpt.Options(chunk_bytes=1024, max_host_bytes=4096)


@pytest.fixture(autouse=True)
def _remote(monkeypatch):
    """Every device is another one."""
    monkeypatch.setattr(read_leaves, "is_remote", lambda where: True)


@pytest.fixture
def assembled(monkeypatch):
    """The names of the leaves that were assembled."""
    names, real = [], read_leaves.assemble

    def noting(leaf, limit):
        names.append(leaf.record.name)
        return real(leaf, limit)

    monkeypatch.setattr("flaxckpt.restoring.read_leaves.assemble", noting)
    return names


def mesh_sharding(*spec, shape=(4, 2)):
    """A sharding over the eight devices."""
    return NamedSharding(jax.make_mesh(shape, ("x", "y")), PartitionSpec(*spec))


SHARDINGS = {
    "one device": lambda: SingleDeviceSharding(jax.devices()[3]),
    "rows": lambda: mesh_sharding("x"),
    "columns": lambda: mesh_sharding(None, ("x", "y")),
    "both": lambda: mesh_sharding("y", "x"),
    "replicated": lambda: mesh_sharding(),
}


@pytest.mark.parametrize("where", SHARDINGS)
@pytest.mark.parametrize("saved", ["one device", "both"])
def test_a_large_array_comes_to_its_devices_in_pieces(tmp_path, assembled, saved, where):
    values = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    state = {"large": jax.device_put(values, SHARDINGS[saved]()), "small": jnp.ones(3)}
    flaxckpt.save(tmp_path / "x", state, options=OPTIONS)
    target = {
        "large": jax.ShapeDtypeStruct((64, 48), np.float32, sharding=SHARDINGS[where]()),
        "small": jnp.zeros(3),
    }
    found = flaxckpt.restore(tmp_path / "x", target, options=OPTIONS)
    assert assembled == ["large"]
    assert found["large"].sharding == target["large"].sharding
    np.testing.assert_array_equal(found["large"], values)
    np.testing.assert_array_equal(found["small"], np.ones(3))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "bool"])
def test_every_dtype_comes_back_on_the_default_device(tmp_path, assembled, dtype):
    values = jnp.arange(8192).astype(dtype)
    flaxckpt.save(tmp_path / "x", values, options=OPTIONS)
    found = flaxckpt.restore(tmp_path / "x", options=OPTIONS)
    assert assembled == [""]
    assert found.dtype == values.dtype
    assert not found.committed
    np.testing.assert_array_equal(found, values)


def test_what_is_cast_or_a_key_is_not_assembled(tmp_path, assembled):
    state = {"w": jnp.ones(4096), "keys": jax.random.split(jax.random.key(0), 1000)}
    flaxckpt.save(tmp_path / "x", state, options=OPTIONS)
    target = {"w": jax.ShapeDtypeStruct((4096,), jnp.bfloat16), "keys": state["keys"]}
    found = flaxckpt.restore(tmp_path / "x", target, dtype="cast", options=OPTIONS)
    assert assembled == []
    assert found["w"].dtype == jnp.bfloat16


def test_without_a_limit_nothing_is_assembled(tmp_path, assembled):
    flaxckpt.save(tmp_path / "x", jnp.ones(4096))
    flaxckpt.restore(tmp_path / "x")
    assert assembled == []


def test_damage_is_found_and_named(tmp_path):
    flaxckpt.save(tmp_path / "x", {"w": jnp.ones(4096)}, options=OPTIONS)
    file = max(tmp_path.glob("x/state/d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[data.index(np.ones(100, np.float32).tobytes()) + 3] ^= 1
    file.write_bytes(data)
    with pytest.raises(flaxckpt.errors.CorruptCheckpointError, match="the leaf w is damaged"):
        flaxckpt.restore(tmp_path / "x", options=OPTIONS)
