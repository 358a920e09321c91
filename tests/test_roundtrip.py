"""Any tree comes back from real files, exactly: with itself as the target, and without one."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import flaxckpt
from flaxckpt.jax_private import as_weak
from flaxckpt.leaves.dtypes import dtype_name
from tests.tree.strategies import trees
from tests.trees import assert_same

ML_DTYPES = {
    name
    for name, dtype in vars(ml_dtypes).items()
    if isinstance(dtype, type) and issubclass(dtype, np.generic)
}
# jax itself has no arrays of these, or cannot compute with them.
NOT_IN_JAX = {"bcomplex32", "complex32", "float6_e2m3fn", "float6_e3m2fn", "int1", "uint1"}
JAX_DTYPES = {*ML_DTYPES, "bool", "int8", "uint32", "float16", "float32", "complex64"} - NOT_IN_JAX
SHAPES = [(), (0,), (3, 0, 2), (5,), (2, 3, 4)]


def assert_comes_back(tree, directory):
    flaxckpt.save(Path(directory) / "x", tree)
    for target in (tree, None):
        assert_same(tree, flaxckpt.restore(Path(directory) / "x", target))


@given(trees)
@settings(max_examples=60)
def test_any_tree(tree):
    with tempfile.TemporaryDirectory() as directory:
        assert_comes_back(tree, directory)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", sorted(JAX_DTYPES))
def test_jax_arrays_of_every_dtype(dtype, shape, tmp_path):
    count = int(np.prod(shape))
    numbers = np.arange(count).reshape(shape) % 2
    array = jnp.asarray(numbers.astype(getattr(ml_dtypes, dtype, dtype)))
    assert_comes_back({"a": array, "weak": as_weak(array)}, tmp_path)


@pytest.mark.parametrize(
    "dtype", [">f4", ">i8", ">c16", "longdouble", "<U3", "S2", "<M8[ns]", "m8"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numpy_arrays_of_other_dtypes(dtype, shape, tmp_path):
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    assert dtype_name(array.dtype) is not None
    other_orders = [array.T, np.asfortranarray(array), array[..., ::-1] if shape else array]
    assert_comes_back([array, *other_orders], tmp_path)


def test_bits_that_compare_equal_or_not_even_to_themselves(tmp_path):
    bits = np.array([0x7FC00001, 0xFFC00002, 0x80000000, 0x7F800000, 1], np.uint32)
    floats = bits.view(np.float32)
    tree = {"np": floats, "jax": jnp.asarray(floats), "nan": float("nan"), "minus": -0.0}
    assert_comes_back(tree, tmp_path)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (0,)], ids=str)
def test_keys_of_every_implementation_and_shape(impl, shape, tmp_path):
    key = jax.random.key(7, impl=impl)
    assert_comes_back({"key": jax.random.split(key, shape) if shape else key}, tmp_path)


def test_a_restored_tree_can_be_saved_again(tmp_path):
    from tests import zoo

    flaxckpt.save(tmp_path / "a", zoo.BUILD["linen_adamw"]())
    first = flaxckpt.restore(tmp_path / "a")
    flaxckpt.save(tmp_path / "b", first)
    assert_same(first["opt_state"], flaxckpt.restore(tmp_path / "b")["opt_state"])
    flaxckpt.restore(tmp_path / "b", zoo.BUILD["linen_adamw"]())
