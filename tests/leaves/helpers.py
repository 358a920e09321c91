"""A leaf through its handler and back, as a checkpoint would take it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import orjson

from flaxckpt.leaves import kinds
from flaxckpt.leaves.dtypes import dtype_name, from_stored, to_stored


def round_trip(leaf: Any) -> Any:
    """`leaf` encoded, stored (as zarr elements, a device array, or JSON), and decoded."""
    spec, data = kinds.encode(leaf, "leaf")
    if isinstance(data, np.ndarray):
        name = dtype_name(data.dtype)
        data = from_stored(to_stored(data, name).copy(), name)
    elif not isinstance(data, jax.Array):
        data = orjson.loads(orjson.dumps(data))
    return kinds.handler_of(spec.kind, "leaf").decode(spec, data)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays or scalars have one type, dtype, shape, and the same bytes."""
    x, y = np.asarray(a), np.asarray(b)
    if type(a) is not type(b) or x.dtype != y.dtype or x.shape != y.shape:
        return False
    if x.dtype.char in "gG":  # six of the sixteen bytes of a longdouble mean nothing
        return bool((x == y).all())
    return x.tobytes() == y.tobytes()
