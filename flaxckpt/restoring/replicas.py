"""Arrays that one of their replicas reads, and that the others get from it over the network.

A mesh axis that the PartitionSpec of an array does not name holds copies of it. Where the devices'
network is faster than the storage, each copy but one need not be read: its devices begin with
zeros, and a sum over the copies, of the bits as integers, is the array everywhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.restoring.chunk_reads import Parts
from flaxckpt.restoring.placement import region_by_device
from flaxckpt.sharding.chunks import Region

# An array up to this size is read by everyone: a collective would take longer.
MIN_BYTES = 1 << 20
# The bits of an element, by its size in bytes: without x64 jax has no integers of 64 bits.
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}
_KINDS = "biuf"


class Replica(NamedTuple):
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


def choose(where: Any, dtype: str, nbytes: int, position: int) -> Replica | None:
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
    return Replica(where, axes, position % count) if axes else None


def _axes(part: Any) -> Sequence[str]:
    """The mesh axes of one entry of a PartitionSpec."""
    return part if isinstance(part, tuple) else (part,)


def spread(replica: Replica, parts: Parts, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
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
