"""Typed PRNG keys (`jax.random.key`), of every implementation and batch shape."""

from __future__ import annotations

from typing import Any

import jax

from flaxckpt.jax_private import key_impl_name
from flaxckpt.leaves.array import check_concrete, is_key_dtype
from flaxckpt.leaves.spec import LeafSpec


class PrngKeys:
    """Key arrays, stored as their words (uint32, one more axis) and the implementation's name.

    `rbg` and `unsafe_rbg` keys have the same words and other meaning: only the name tells.
    """

    def describe(self, leaf: Any) -> LeafSpec | None:
        """The spec of a key array or of an abstract one."""
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or not is_key_dtype(leaf.dtype):
            return None
        return LeafSpec("prng_key", shape=leaf.shape, impl=key_impl_name(leaf.dtype))

    def encode(self, leaf: Any) -> jax.Array:
        """The words."""
        return jax.random.key_data(check_concrete(leaf))

    def decode(self, spec: LeafSpec, stored: jax.Array) -> jax.Array:
        """The keys around the words."""
        return jax.random.wrap_key_data(stored, impl=spec.impl)
