"""jax and numpy arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from flaxckpt.errors import UnsupportedLeafError
from flaxckpt.jax_private import as_weak
from flaxckpt.leaves.dtypes import dtype_name, parse_dtype
from flaxckpt.leaves.spec import LeafSpec


def is_key_dtype(dtype: Any) -> bool:
    """Whether `dtype` is one of jax's PRNG key dtypes."""
    return not isinstance(dtype, np.dtype) and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


class JaxArrays:
    """`jax.Array`, concrete or as a `jax.ShapeDtypeStruct`."""

    def describe(self, leaf: Any) -> LeafSpec | None:
        """The spec of an array, unless it is one of PRNG keys."""
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or is_key_dtype(leaf.dtype):
            return None
        name = dtype_name(np.dtype(leaf.dtype))
        weak = bool(getattr(leaf, "weak_type", False))
        return None if name is None else LeafSpec("jax", name, leaf.shape, weak)

    def encode(self, leaf: Any) -> jax.Array:
        """The array itself."""
        return check_concrete(leaf)

    def decode(self, spec: LeafSpec, stored: jax.Array) -> jax.Array:
        """The array, with the weak type that it had."""
        return as_weak(stored) if spec.weak_type and not stored.weak_type else stored


class NumpyArrays:
    """`numpy.ndarray` of any dtype that has a name in a checkpoint."""

    def describe(self, leaf: Any) -> LeafSpec | None:
        """The spec of an array whose elements are plain bytes."""
        if type(leaf) not in (np.ndarray, np.memmap) or (name := dtype_name(leaf.dtype)) is None:
            return None
        return LeafSpec("numpy", name, leaf.shape)

    def encode(self, leaf: np.ndarray) -> np.ndarray:
        """The array itself."""
        return np.asarray(leaf)

    def decode(self, spec: LeafSpec, stored: np.ndarray) -> np.ndarray:
        """The array in its own byte order, writable."""
        return np.require(stored, parse_dtype(spec.dtype), ["W"]).reshape(spec.shape)


def check_concrete(leaf: Any) -> jax.Array:
    """`leaf`, when it is an array that has values.

    Raises:
      UnsupportedLeafError: when it is abstract or deleted.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
        raise UnsupportedLeafError(
            f"it is abstract ({type(leaf).__name__}) and has no values. Save outside of jit, and "
            "a state that was initialised."
        )
    if leaf.is_deleted():
        raise UnsupportedLeafError(
            "its buffer was deleted, most likely by a jit that donated it. Save the state that "
            "the train step returned, not the one it was given."
        )
    return leaf
