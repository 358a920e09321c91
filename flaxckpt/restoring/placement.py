"""Putting values onto devices."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from flaxckpt.jax_private import batched_device_put
from flaxckpt.leaves import conversion
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.spec import LeafSpec
from flaxckpt.sharding.chunks import Region, region_of, whole
from flaxckpt.source.chunk_reads import RegionValues

# From values on the host to the leaf that a target asks for, on the devices that it asks for.


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


def to_host(parts: RegionValues, target: LeafSpec) -> np.ndarray:
    """The one part of a leaf that stays on the host, with the dtype of `target`."""
    (values,) = parts.values()
    return _convert(values, target)


class Wanted(NamedTuple):
    """A leaf that lives on devices: its array's parts and shape, its type, and its sharding."""

    parts: RegionValues
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
        arrays.update(zip(chosen, put(values, where), strict=True))
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
    return conversion.cast(values, target.dtype) if target.dtype else values


# Making many arrays on one device: the one place that calls jax beneath its public functions.
#
# `jax.device_put` takes 35 us of Python for each array of a list, whatever its size, and jaxlib's
# part of it is 10. For a state of many leaves that is more than all the rest of a restore. So
# jaxlib's part is called by itself, if the installed jax has it and it gives what `device_put`
# gives; otherwise `device_put` is called, which is all that is lost.


def put(values: Sequence[np.ndarray], where: jax.sharding.Sharding | None) -> list[jax.Array]:
    """As `jax.device_put(values, where)`."""
    device = _only_device(where)
    if device is None or not values or not is_equal(device):
        return list(jax.device_put(list(values), where))
    return batched_device_put(values, device, committed=where is not None)


def _only_device(where: jax.sharding.Sharding | None) -> Any:
    """The device whose usual memory `where` is; `None` for several, or for another memory."""
    if where is None:
        config: Any = jax.config
        return jax.local_devices()[0] if config.jax_default_device is None else None
    if not isinstance(where, jax.sharding.SingleDeviceSharding):
        return None
    device: Any = next(iter(where.device_set))
    return device if where.memory_kind == device.default_memory().kind else None


@functools.lru_cache
def is_equal(device: Any) -> bool:
    """Whether jaxlib alone makes the arrays that `device_put` makes, looked up once."""
    where = jax.sharding.SingleDeviceSharding(device)
    values = [np.arange(3, dtype=np.float32), np.zeros((), np.int32), np.ones((2, 0), bool)]
    make = functools.partial(batched_device_put, values, device)
    try:
        pairs = [
            (make(committed=True), jax.device_put(values, where)),
            (make(committed=False), [jax.device_put(v) for v in values]),
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


# Arrays that one of their replicas reads, and that the others get from it over the network.
#
# A mesh axis that the PartitionSpec of an array does not name holds copies of it. Where the
# devices' network is faster than the storage, each copy but one need not be read: its devices begin
# with zeros, and a sum over the copies, of the bits as integers, is the array everywhere.


# An array up to this size is read by everyone: a collective would take longer.
MIN_BYTES = 1 << 20
# The bits of an element, by its size in bytes: without x64 jax has no integers of 64 bits.
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}
_KINDS = "biuf"


class ReplicaRead(NamedTuple):
    """The copy of an array that is read.

    Attributes:
      where: the sharding of the array.
      axes: the mesh axes that hold copies.
      copy: which copy it is, in the order of `axes`.
    """

    where: NamedSharding
    axes: tuple[str, ...]
    copy: int

    @property
    def copies(self) -> int:
        """How many copies there are."""
        return math.prod(self.where.mesh.shape[axis] for axis in self.axes)

    def holds(self, device: Any) -> bool:
        """Whether `device` has a part of the copy that is read."""
        mesh: Any = self.where.mesh
        (position,) = np.argwhere(mesh.devices == device)
        place = dict(zip(mesh.axis_names, position, strict=True))
        sizes = [mesh.shape[axis] for axis in self.axes]
        return int(np.ravel_multi_index([place[a] for a in self.axes], sizes)) == self.copy

    def regions(self, shape: tuple[int, ...]) -> list[Region]:
        """What this process reads of an array of `shape`, which may be nothing."""
        held = region_by_device(self.where, shape)
        return list(dict.fromkeys(r for device, r in held.items() if self.holds(device)))


def choose(where: Any, dtype: str, nbytes: int, position: int) -> ReplicaRead | None:
    """The copy of an array that is read for all; `None` when everybody had better read it.

    Args:
      where: the sharding of the array.
      dtype: its dtype.
      nbytes: its size in bytes.
      position: of the leaf; the copies take turns.
    """
    if not isinstance(where, NamedSharding) or where.is_fully_addressable:
        return None
    is_simple = dtype == "bfloat16" or parse_dtype(dtype).kind in _KINDS
    if not is_simple or nbytes < MIN_BYTES:
        return None
    named = {axis for part in where.spec if part for axis in _axes(part)}
    mesh = where.mesh
    axes = tuple(str(a) for a in mesh.axis_names if a not in named and mesh.shape[a] > 1)
    count = math.prod(mesh.shape[axis] for axis in axes)
    return ReplicaRead(where, axes, position % count) if axes else None


def _axes(part: Any) -> Sequence[str]:
    """The mesh axes of one entry of a PartitionSpec."""
    return part if isinstance(part, tuple) else (part,)


def spread(
    replica: ReplicaRead, parts: RegionValues, shape: tuple[int, ...], dtype: np.dtype
) -> jax.Array:
    """The array of which `parts` are what this process has read; on all processes at once.

    While it is made, each device has it twice.
    """
    where, word = replica.where, _WORDS[dtype.itemsize]
    words = (2,) if dtype.itemsize == 8 else ()
    spec = PartitionSpec(replica.axes, *where.spec)
    source = NamedSharding(where.mesh, spec, memory_kind=where.memory_kind)
    copies = []
    for device, region in region_by_device(where, shape).items():
        if replica.holds(device):
            bits = np.ascontiguousarray(parts[region]).view(word).reshape(*region.shape, *words)
        else:
            bits = np.zeros((*region.shape, *words), word)
        copies.append(jax.device_put(bits[None], device))
    whole = (replica.copies, *shape, *words)
    stacked = jax.make_array_from_single_device_arrays(whole, source, copies)
    result: jax.Array = _sum(dtype, where)(stacked)
    return result


@functools.lru_cache(maxsize=256)
def _sum(dtype: np.dtype, where: NamedSharding) -> Any:
    """The compiled sum of copies."""

    def total(copies: jax.Array) -> jax.Array:
        bits = jnp.sum(copies, axis=0, dtype=copies.dtype)
        if dtype == np.bool_:
            return bits.astype(bool)
        return jax.lax.bitcast_convert_type(bits, dtype)

    return jax.jit(total, out_shardings=where)
