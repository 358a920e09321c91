"""A leaf through its handler and back, as a checkpoint would take it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import orjson

from flaxckpt.leaves import handler
from flaxckpt.leaves.dtypes import dtype_name, from_stored, to_stored


def round_trip(leaf: Any) -> Any:
    """`leaf` encoded, stored (as zarr elements, a device array, or JSON), and decoded."""
    spec, data = handler.encode(leaf, "leaf")
    if isinstance(data, np.ndarray):
        name = dtype_name(data.dtype)
        data = from_stored(to_stored(data, name).copy(), name)
    elif not isinstance(data, jax.Array):
        data = orjson.loads(orjson.dumps(data))
    return handler.handler_of(spec.kind, "leaf").decode(spec, data)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays or scalars have one type, dtype, shape, and the same bytes."""
    x, y = np.asarray(a), np.asarray(b)
    return (
        type(a) is type(b)
        and x.dtype == y.dtype
        and x.shape == y.shape
        and x.tobytes() == y.tobytes()
    )
