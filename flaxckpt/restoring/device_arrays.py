"""Making many arrays on one device: the one place that calls jax beneath its public functions.

`jax.device_put` takes 35 us of Python for each array of a list, whatever its size, and jaxlib's
part of it is 10. For a state of many leaves that is more than all the rest of a restore. So
jaxlib's part is called by itself, if the installed jax has it and it gives what `device_put`
gives; otherwise `device_put` is called, which is all that is lost.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def put(values: Sequence[np.ndarray], where: jax.sharding.Sharding | None) -> list[jax.Array]:
    """As `jax.device_put(values, where)`."""
    device = _only_device(where)
    if device is None or not values or not is_equal(device):
        return list(jax.device_put(list(values), where))
    return _put(values, device, committed=where is not None)


def _only_device(where: jax.sharding.Sharding | None) -> Any:
    """The device whose usual memory `where` is; `None` for several, or for another memory."""
    if where is None:
        config: Any = jax.config
        return jax.local_devices()[0] if config.jax_default_device is None else None
    if not isinstance(where, jax.sharding.SingleDeviceSharding):
        return None
    device: Any = next(iter(where.device_set))
    return device if where.memory_kind == device.default_memory().kind else None


def _put(values: Sequence[np.ndarray], device: Any, *, committed: bool) -> list[jax.Array]:
    """`values` on `device`, by jaxlib alone."""
    from jax._src.interpreters.pxla import batched_device_put

    where = jax.sharding.SingleDeviceSharding(device)
    return [
        batched_device_put(_abstract(v.shape, v.dtype), where, [v], [device], committed)
        for v in values
    ]


@functools.lru_cache(maxsize=4096)
def _abstract(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """What jax knows of an array; to make one takes a third as long as the array."""
    from jax._src.core import ShapedArray

    return ShapedArray(shape, dtype)


@functools.lru_cache
def is_equal(device: Any) -> bool:
    """Whether jaxlib alone makes the arrays that `device_put` makes, looked up once."""
    where = jax.sharding.SingleDeviceSharding(device)
    values = [np.arange(3, dtype=np.float32), np.zeros((), np.int32), np.ones((2, 0), bool)]
    try:
        pairs = [
            (_put(values, device, committed=True), jax.device_put(values, where)),
            (_put(values, device, committed=False), [jax.device_put(v) for v in values]),
        ]
    except Exception:  # noqa: BLE001 - a private function may do anything in another version
        return False
    return all(
        _same(ours, jaxs)
        for found, expected in pairs
        for ours, jaxs in zip(found, expected, strict=True)
    )


def _same(ours: Any, jaxs: Any) -> bool:
    """Whether two arrays are the same to every user of them, and to jit."""
    return (
        type(ours) is type(jaxs)
        and ours.aval == jaxs.aval
        and ours.committed == jaxs.committed
        and ours.sharding == jaxs.sharding
        and np.array_equal(np.asarray(ours), np.asarray(jaxs))
    )
