"""From values on the host to the leaf that a target asks for, on the devices that it asks for."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from flaxckpt.leaves import convert
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.record import LeafSpec
from flaxckpt.restoring import device_arrays
from flaxckpt.restoring.chunk_reads import Parts
from flaxckpt.sharding.chunks import Region, region_of, whole

Sharding = jax.sharding.Sharding

# An array up to this size is read whole, although each device needs but a part of it.
SMALL_BYTES = 1 << 18


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


def regions_of(where: Sharding | None, shape: tuple[int, ...], nbytes: int) -> Sequence[Region]:
    """The regions of an array that are read: each that devices of this process hold, once.

    A small array is read whole, and jax cuts it up. The words of PRNG keys lie on one more axis
    than the keys; a PartitionSpec leaves it whole.
    """
    if where is None or isinstance(where, jax.sharding.SingleDeviceSharding):
        return [whole(shape)]
    if nbytes <= SMALL_BYTES and where.is_fully_addressable:
        return [whole(shape)]
    return list(dict.fromkeys(region_by_device(where, shape).values()))


def region_by_device(where: Sharding | None, shape: tuple[int, ...]) -> dict[Any, Region]:
    """What each device of this process holds of an array; `None` is the default device."""
    if where is None:
        return {None: whole(shape)}
    indices = where.addressable_devices_indices_map(shape)
    return {device: region_of(index or (), shape) for device, index in indices.items()}


def to_host(parts: Parts, target: LeafSpec) -> np.ndarray:
    """The one part of a leaf that stays on the host, with the dtype of `target`."""
    (values,) = parts.values()
    return _convert(values, target)


class Wanted(NamedTuple):
    """A leaf that lives on devices: its array's parts and shape, its type, and its sharding."""

    parts: Parts
    shape: tuple[int, ...]
    spec: LeafSpec
    where: Sharding | None


def to_devices(leaves: Sequence[Wanted]) -> list[jax.Array]:
    """The arrays of `leaves` on their devices. What one call of jax can do, one call does."""
    arrays = {i: array for i, leaf in enumerate(leaves) if (array := _alone(leaf)) is not None}
    together = collections.defaultdict(list)
    for i, leaf in enumerate(leaves):
        if i not in arrays:
            together[leaf.where].append(i)
    for where, chosen in together.items():
        values = [_convert(leaves[i].parts[whole(leaves[i].shape)], leaves[i].spec) for i in chosen]
        arrays.update(zip(chosen, device_arrays.put(values, where), strict=True))
    return [arrays[i] for i in range(len(leaves))]


def _alone(leaf: Wanted) -> jax.Array | None:
    """The array of a leaf that needs a call of its own."""
    spread = leaf.where is not None and not leaf.where.is_fully_addressable
    if leaf.spec.weak_type and not leaf.shape and not spread:
        # jax gives a Python number a weak type; no other way costs no compilation.
        # (It would quieten a signalling NaN.)
        values = _convert(leaf.parts[whole(())], leaf.spec)
        weak = jax.device_put(values.item(), leaf.where)
        return weak if weak.dtype == values.dtype and values == values else None
    if leaf.where is None or (whole(leaf.shape) in leaf.parts and not spread):
        return None
    return jax.make_array_from_callback(
        leaf.shape,
        leaf.where,
        lambda index: _convert(leaf.parts[region_of(index or (), leaf.shape)], leaf.spec),
        dtype=parse_dtype("uint32" if leaf.spec.kind == "prng_key" else leaf.spec.dtype),
    )


class Sent:
    """Arrays on their way to devices: the host has their values until they have arrived."""

    def __init__(self, limit: int):
        """At most about `limit` bytes are on their way."""
        self._limit = limit
        self._arrays: list[jax.Array] = []
        self._bytes = 0

    def note(self, arrays: Sequence[jax.Array]) -> None:
        """Notes that `arrays` were sent; waits for all when they have become too many."""
        self._arrays.extend(arrays)
        self._bytes += sum(array.nbytes for array in arrays)
        if self._bytes > self._limit:
            jax.block_until_ready(self._arrays)
            self._arrays, self._bytes = [], 0


def _convert(values: np.ndarray, target: LeafSpec) -> np.ndarray:
    """`values` with the dtype of `target`, where it has one."""
    return convert.cast(values, target.dtype) if target.dtype else values
