"""Everything flaxckpt uses of jax's private names. tests/test_jax_private.py checks each of them.

A new version of jax may change these names without notice, so nothing else imports or reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

# The methods of jax's coordination client that `flaxckpt.multihost` calls.
COORDINATION_METHODS = (
    "blocking_key_value_get",
    "key_value_delete",
    "key_value_dir_get",
    "key_value_set",
    "key_value_try_get",
)


def key_impl_name(dtype: Any) -> str:
    """The PRNG implementation of a key dtype.

    The public `jax.random.key_impl` takes only an array, and an abstract key has only its dtype.
    """
    return str(dtype._impl.name)


def as_weak(array: jax.Array) -> jax.Array:
    """`array` with a weak type, on the same sharding. No public function sets a weak type."""
    return jax.lax.convert_element_type_p.bind(
        array, new_dtype=array.dtype, weak_type=True, sharding=None
    )


def batched_device_put(
    values: Sequence[np.ndarray], device: Any, *, committed: bool
) -> list[jax.Array]:
    """`values` on `device`, at a fraction of the cost that `jax.device_put` has for each array."""
    from jax._src.interpreters import pxla

    sharding = jax.sharding.SingleDeviceSharding(device)
    return [
        pxla.batched_device_put(_aval(v.shape, v.dtype), sharding, [v], [device], committed)
        for v in values
    ]


@functools.lru_cache(maxsize=4096)
def _aval(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """The abstract value of an array, which takes a third as long to create as the array."""
    from jax._src.core import ShapedArray

    return ShapedArray(shape, dtype)


def coordination_client() -> Any:
    """The client of jax's coordination service; `None` if this jax has none, or a different one."""
    try:
        from jax._src.distributed import global_state

        client = global_state.client
    except (ImportError, AttributeError):
        return None
    return client if all(hasattr(client, name) for name in COORDINATION_METHODS) else None
