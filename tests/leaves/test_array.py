from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flaxckpt.errors import UnsupportedLeafError
from flaxckpt.jax_private import as_weak
from flaxckpt.leaves import kinds
from flaxckpt.leaves.spec import LeafSpec
from tests.leaves.helpers import round_trip, same_bits

_dtypes = st.one_of(
    hnp.integer_dtypes(endianness="?"), hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"), hnp.complex_number_dtypes(endianness="?"),
    hnp.boolean_dtypes(), hnp.datetime64_dtypes(endianness="?"),
    hnp.unicode_string_dtypes(min_len=1, max_len=4), hnp.byte_string_dtypes(min_len=1, max_len=4),
)  # fmt: skip


@given(hnp.arrays(_dtypes, hnp.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3)))
def test_a_numpy_array_of_any_dtype_comes_back_bit_for_bit(array):
    back = round_trip(array)
    assert same_bits(back, array)
    assert back.dtype.byteorder == array.dtype.byteorder


def test_a_numpy_array_comes_back_writable():
    array = np.arange(3)
    array.setflags(write=False)
    assert round_trip(array).flags.writeable


@pytest.mark.parametrize(
    "value", [np.asfortranarray(np.ones((2, 3))), np.arange(9)[::-2], np.broadcast_to(1, (2, 2))]
)
def test_strides_do_not_change_the_elements(value):
    assert same_bits(round_trip(value), value)


def test_a_masked_array_does_not_lose_its_mask():
    # Saving only the data would drop the mask without a word.
    with pytest.raises(UnsupportedLeafError, match="MaskedArray"):
        round_trip(np.ma.array([1, 2], mask=[False, True]))


def test_an_array_on_a_file_is_an_array(tmp_path):
    array = np.memmap(tmp_path / "a", np.int32, "w+", shape=(3,))
    assert (round_trip(array) == array).all()


@pytest.mark.parametrize("dtype", ["O", [("a", "i4")], "V3"])
def test_a_numpy_array_of_objects_or_records_is_refused(dtype):
    with pytest.raises(UnsupportedLeafError, match="the leaf leaf is a numpy.ndarray of dtype"):
        round_trip(np.zeros(2, dtype))


@pytest.mark.parametrize("weak", [False, True])
def test_a_weak_type_comes_back(weak):
    array = jnp.ones((2, 3), jnp.float32)
    array = as_weak(array) if weak else array
    spec, data = kinds.encode(array, "x")
    strong = jnp.asarray(np.asarray(data))
    back = kinds.handler_of(spec.kind, "x").decode(spec, strong)
    assert (spec.weak_type, back.weak_type) == (weak, weak)
    assert same_bits(back, array)


def test_as_weak_changes_only_the_weak_type():
    array = jnp.arange(3, dtype=jnp.bfloat16)
    weak = as_weak(array)
    assert same_bits(weak, array)
    assert (weak.weak_type, weak.sharding) == (True, array.sharding)


def test_an_abstract_array_has_the_spec_of_a_concrete_one():
    array = jnp.ones((2, 3), jnp.bfloat16)
    abstract = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    spec = LeafSpec("jax", "bfloat16", (2, 3))
    assert kinds.describe(array, "x")[0] == kinds.describe(abstract, "x")[0] == spec


def test_an_abstract_array_cannot_be_saved():
    with pytest.raises(UnsupportedLeafError, match="the leaf a/b: it is abstract"):
        kinds.encode(jax.ShapeDtypeStruct((2,), jnp.float32), "a/b")


def test_a_tracer_cannot_be_saved():
    with pytest.raises(UnsupportedLeafError, match="Save outside of jit"):
        jax.jit(lambda x: kinds.encode(x, "x")[0] and x)(1.0)


def test_a_donated_array_cannot_be_saved():
    array = jnp.ones(2)
    array.delete()
    with pytest.raises(UnsupportedLeafError, match="the leaf w: its buffer was deleted"):
        kinds.encode(array, "w")


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (jnp.ones((512, 10)), "float32[512,10]"),
        (np.ones(()), "float64[]"),
        (np.float32(1), "float32 scalar"),
        (jax.random.split(jax.random.key(0, impl="rbg"), 3), "key<rbg>[3]"),
        (1, "int"),
        (np.random.default_rng(0), "generator<PCG64>"),
    ],
)
def test_a_spec_reads_as_errors_show_it(leaf, text):
    assert str(kinds.describe(leaf, "x")[0]) == text
