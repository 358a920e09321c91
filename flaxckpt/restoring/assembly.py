"""Arrays of other devices that are too large to be on the host as a whole, chunk by chunk."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.lazy import LazyArray, nbytes_of
from flaxckpt.leaves.record import StoredArray
from flaxckpt.options import PART
from flaxckpt.restoring.chunk_reads import ArrayRead
from flaxckpt.restoring.lazy_reads import read_source
from flaxckpt.restoring.placement import Sharding, region_by_device
from flaxckpt.restoring.plan import LeafPlan
from flaxckpt.restoring.source import Source
from flaxckpt.sharding.chunks import Region, chunks_of


def is_too_large(leaf: LeafPlan, limit: int | None) -> bool:
    """Whether the array of `leaf` comes to its devices chunk by chunk.

    PRNG keys never do, nor what changes its dtype; on the CPU an array is where it was read to.
    """
    array, wanted = leaf.record.array, leaf.wanted
    if limit is None or array is None or nbytes_of(array) <= limit // PART:
        return False
    if max(array.shape, default=0) >= 1 << 31:  # jax's indices have 32 bits
        return False
    return wanted.kind == "jax" and wanted.dtype == array.dtype and is_remote(leaf.where)


def is_remote(where: Sharding | None) -> bool:
    """Whether arrays on `where` are in the memory of a device that is not the host."""
    devices: Any = jax.devices()[:1] if where is None else where.device_set
    return any(
        device.platform != "cpu"
        and (where is None or where.memory_kind in (None, device.default_memory().kind))
        for device in devices
    )


def assemble(source: Source, leaf: LeafPlan, limit: int) -> jax.Array:
    """The array of `leaf` on its devices, of which the host has about `limit` bytes at a time."""
    array, where = leaf.record.array, leaf.where
    assert array is not None, "it is too large"
    with jax.transfer_guard("allow"):  # which is against transfers that nobody asked for
        return _assembled(source, leaf.record.name, array, where, limit)


def _assembled(
    source: Source, name: str, array: StoredArray | LazyArray, where: Sharding | None, limit: int
) -> jax.Array:
    """`array`, of the leaf `name`, on `where`."""
    regions = region_by_device(where, array.shape)
    memory = {
        device: jnp.zeros(region.shape, parse_dtype(array.dtype), device=device)
        for device, region in regions.items()
    }
    pieces = [
        (region, part)
        for region in dict.fromkeys(regions.values())
        for _, part in chunks_of(region, array.chunks)
    ]
    reads = [ArrayRead(name, array, [part]) for _, part in pieces]
    remaining: Iterator[tuple[Region, Region]] = iter(pieces)
    for group in read_source(source, reads, limit):
        for parts, (region, part) in zip(group, remaining, strict=False):
            start = [s - o for s, o in zip(part.start, region.start, strict=True)]
            for device in (device for device, held in regions.items() if held == region):
                memory[device] = _write(memory[device], jax.device_put(parts[part], device), start)
        jax.block_until_ready(list(memory.values()))
    if where is None or len(where.device_set) == 1:
        return next(iter(memory.values()))
    shards = list(memory.values())
    return jax.make_array_from_single_device_arrays(array.shape, where, shards)


@functools.partial(jax.jit, donate_argnums=0)
def _write(memory: jax.Array, part: jax.Array, start: list[int]) -> jax.Array:
    """`memory` with `part` at `start`; compiled once for each shape."""
    return jax.lax.dynamic_update_slice(memory, part, start)
