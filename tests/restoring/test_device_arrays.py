from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import flaxckpt
from flaxckpt.leaves.dtypes import ZARR_DATA_TYPES, parse_dtype
from flaxckpt.restoring import placement

WIDE = {"int64", "uint64", "float64", "complex128"}
DTYPES = [*sorted(ZARR_DATA_TYPES - WIDE), "uint4", "uint2"]


def one_device(n: int = 0):
    """A sharding on one device."""
    return SingleDeviceSharding(jax.devices()[n])


@pytest.fixture(autouse=True)
def _forget():
    """What was looked up in one test does not count in the next."""
    placement.is_equal.cache_clear()
    yield
    placement.is_equal.cache_clear()


def test_the_installed_jax_needs_no_detour():
    assert placement.is_equal(jax.devices()[0])


@pytest.mark.parametrize("where", [None, one_device(), one_device(3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_are_those_of_device_put(dtype, where):
    shapes = [(), (0, 3), (5,), (2, 3), (100_000,)]
    values = [np.ones(shape).astype(parse_dtype(dtype)) for shape in shapes]
    for ours, jaxs in zip(placement.put(values, where), jax.device_put(values, where), strict=True):
        assert placement._same(ours, jaxs)
        assert ours.weak_type is jaxs.weak_type
        assert ours.format == jaxs.format


def test_jit_does_not_compile_again_for_them():
    f = jax.jit(lambda x: x + 1)
    for where in (None, one_device()):
        (ours,) = placement.put([np.ones(7, np.float32)], where)
        (jaxs,) = jax.device_put([np.ones(7, np.float32)], where)
        f(jaxs)
        compiled = f._cache_size()
        f(ours)
        assert f._cache_size() == compiled


def test_donating_them_does_not_change_the_values_they_were_made_of():
    values = np.ones(1 << 18, np.float32)
    (array,) = placement.put([values], None)
    jax.jit(lambda x: x * 2, donate_argnums=0)(array).block_until_ready()
    assert (values == 1).all()


@pytest.mark.parametrize(
    "where",
    [
        lambda: NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x")),
        lambda: one_device(1).with_memory_kind("pinned_host"),
    ],
)
def test_other_shardings_are_left_to_device_put(where):
    (found,) = placement.put([np.arange(8.0, dtype=np.float32)], where())
    assert found.sharding == where()
    np.testing.assert_array_equal(found, np.arange(8))


def test_the_default_device_is_that_of_the_config():
    with jax.default_device(jax.devices()[5]):
        (found,) = placement.put([np.ones(2)], None)
    assert found.devices() == {jax.devices()[5]}


@pytest.mark.parametrize("broken", [TypeError("no such argument"), None])
def test_another_jax_is_served_by_device_put(tmp_path, monkeypatch, broken):
    def other(values, device, *, committed):
        if broken:
            raise broken
        return [jnp.asarray(v) + 1 for v in values]

    monkeypatch.setattr(placement, "batched_device_put", other)
    assert not placement.is_equal(jax.devices()[0])
    flaxckpt.save(tmp_path / "x", {"a": jnp.arange(3), "b": jnp.ones(())})
    found = flaxckpt.restore(tmp_path / "x")
    np.testing.assert_array_equal(found["a"], np.arange(3))
    assert found["b"] == 1
