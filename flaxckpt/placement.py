"""From values on the host to the leaf that a target asks for, on the devices that it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from flaxckpt.leaves import convert
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.record import LeafSpec
from flaxckpt.reading import Parts
from flaxckpt.sharding.chunks import Region, region_of, whole

Sharding = jax.sharding.Sharding


def target_sharding(leaf: Any) -> Sharding | None:
    """Where the leaf of a target lies; `None` for the default device, uncommitted.

    A `jax.Array` that is not committed to its device stays so: a committed one would make jit
    compile once more.
    """
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return None
    found = getattr(leaf, "sharding", None)
    if isinstance(found, NamedSharding) and isinstance(found.mesh, AbstractMesh):
        # What `jax.eval_shape` gives under `jax.set_mesh` has no devices; the context has.
        return NamedSharding(jax.sharding.get_mesh(), found.spec)
    return found


def regions_of(sharding: Sharding | None, shape: tuple[int, ...]) -> Sequence[Region]:
    """The distinct regions of an array that the devices of this process hold.

    The words of PRNG keys lie on one more axis than the keys; a PartitionSpec leaves it whole.
    """
    if sharding is None or len(sharding.device_set) == 1:
        return [whole(shape)]
    indices = sharding.addressable_devices_indices_map(shape).values()
    return list(dict.fromkeys(region_of(index, shape) for index in indices if index is not None))


def to_host(parts: Parts, target: LeafSpec) -> np.ndarray:
    """The one part of a leaf that stays on the host, with the dtype of `target`."""
    (values,) = parts.values()
    return _convert(values, target)


def to_devices(
    parts: Parts, shape: tuple[int, ...], target: LeafSpec, where: Sharding | None
) -> jax.Array:
    """The parts of a leaf as an array of `shape` on the sharding `where`."""
    values = {region: _convert(part, target) for region, part in parts.items()}
    if where is None or len(where.device_set) == 1:
        (single,) = values.values()
        return _put(single, target, where)
    if target.weak_type and not shape:
        return _put(next(iter(values.values())), target, where)
    return jax.make_array_from_callback(
        shape,
        where,
        lambda index: values[region_of(index or (), shape)],
        dtype=parse_dtype(_dtype(target)),
    )


def _convert(values: np.ndarray, target: LeafSpec) -> np.ndarray:
    """`values` with the dtype of `target`, where it has one."""
    if not target.dtype:
        return values
    return convert.cast(values, target.dtype)


def _dtype(target: LeafSpec) -> str:
    """The dtype of the array behind a leaf."""
    return "uint32" if target.kind == "prng_key" else target.dtype


def _put(values: np.ndarray, target: LeafSpec, where: Sharding | None) -> jax.Array:
    """One array on one sharding."""
    if target.weak_type and not values.ndim:
        # jax gives a Python number a weak type; no other way costs no compilation.
        # (It would quieten a signalling NaN.)
        weak = jax.device_put(values.item(), where)
        if weak.dtype == values.dtype and values == values:
            return weak
    return jax.device_put(values, where)
