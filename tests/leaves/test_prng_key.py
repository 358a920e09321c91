from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxckpt.errors import UnsupportedLeafError
from flaxckpt.leaves import kinds
from flaxckpt.leaves.spec import LeafSpec
from tests.leaves.helpers import round_trip

IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_keys_come_back_with_their_implementation(impl, shape):
    keys = jax.random.split(jax.random.key(7, impl=impl), shape)
    back = round_trip(keys)
    assert (back.dtype, back.shape) == (keys.dtype, keys.shape)
    assert (jax.random.key_data(back) == jax.random.key_data(keys)).all()


def test_a_key_that_came_back_draws_the_same_numbers():
    key = jax.random.key(3, impl="rbg")
    assert jax.random.bits(round_trip(key)) == jax.random.bits(key)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_spec_has_the_shape_without_the_words(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 4)
    assert kinds.describe(keys, "x")[0] == LeafSpec("prng_key", shape=(4,), impl=impl)


def test_an_abstract_key_has_the_spec_of_a_concrete_one():
    abstract = jax.eval_shape(lambda: jax.random.key(0))
    assert kinds.describe(abstract, "x")[0] == kinds.describe(jax.random.key(0), "x")[0]


def test_an_abstract_key_cannot_be_saved():
    with pytest.raises(UnsupportedLeafError, match="abstract"):
        kinds.encode(jax.eval_shape(lambda: jax.random.key(0)), "rng")


def test_a_raw_key_is_an_array_of_words():
    raw = jnp.asarray(np.zeros(2, np.uint32))
    assert kinds.describe(raw, "x")[0] == LeafSpec("jax", "uint32", (2,))
