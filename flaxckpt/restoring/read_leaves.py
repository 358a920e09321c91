"""Reading the leaves of a plan."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxckpt.errors import CorruptCheckpointError, Mismatch
from flaxckpt.leaves import conversion, kinds
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.lazy_array import LazyArray
from flaxckpt.leaves.spec import ARRAY_KINDS, DEVICE_KINDS, SCALAR_KINDS
from flaxckpt.options import PART, Options
from flaxckpt.progress import Progress
from flaxckpt.restoring import placement
from flaxckpt.restoring.placement import Sharding, region_by_device
from flaxckpt.restoring.restore_plan import LeafPlan, raise_any
from flaxckpt.sharding.chunks import Region, chunks_of, whole
from flaxckpt.source.checkpoint import Source
from flaxckpt.source.chunk_reads import ArrayRead, RegionValues, read_arrays

# The values of leaves: read, checked, and put where the target wants them.


Batch = list[tuple[int, RegionValues | None]]


def read_leaves(source: Source, leaves: Sequence[LeafPlan], options: Options) -> list[Any]:
    """The values of `leaves`, which are those of `source`.

    Raises:
      CorruptCheckpointError: when bytes are missing or do not match their checksum.
      StructureMismatchError: when a Python number does not fit the dtype that the target wants.
    """
    held: list[CorruptCheckpointError] | None = None
    if options.broadcast:
        # A process that cannot read goes on with zeros, or the others would wait for it for ever.
        held, leaves = [], [_with_replica(leaf, i) for i, leaf in enumerate(leaves)]
    large = [i for i, leaf in enumerate(leaves) if is_too_large(leaf, options.max_host_bytes)]
    values: dict[int, Any] = {}
    mismatches: dict[int, Mismatch] = {}
    sent = placement.Sent(options.buffer_bytes)
    batches = _batches(leaves, set(large), options.buffer_bytes, held)
    total = sum(leaf.record.nbytes for leaf in leaves)
    with Progress(f"restoring {source.path}", total, is_shown=options.progress) as bar:
        for batch in bar.counted(batches, _nbytes):
            fitting = []
            for i, parts in batch:
                try:
                    fitting.append((i, _checked(leaves[i], parts)))
                except OverflowError as error:
                    mismatches[i] = _out_of_range(leaves[i], error)
            placed = _place([(leaves[i], parts) for i, parts in fitting], sent)
            values.update(zip((i for i, _ in fitting), placed, strict=True))
    for i in large:
        array = assemble(leaves[i], options.buffer_bytes)
        values[i] = kinds.decode(leaves[i].wanted, array, leaves[i].record.name)
    if held:
        raise held[0]
    ordered = [mismatches[i] for i in sorted(mismatches)]
    raise_any(source, ordered, len(leaves), "Give the target a wider dtype.")
    return [values[i] for i in range(len(leaves))]


def _nbytes(batch: Batch) -> int:
    """The size of what was read for a batch, in bytes."""
    return sum(part.nbytes for _, parts in batch if parts for part in parts.values())


def _with_replica(leaf: LeafPlan, position: int) -> LeafPlan:
    """`leaf`, and which copy of its array is read for all."""
    array, wanted = leaf.record.array, leaf.wanted
    if array is None or wanted.kind != "jax" or wanted.weak_type:
        return leaf
    replica = placement.choose(leaf.where, wanted.dtype, leaf.record.nbytes, position)
    return leaf._replace(replica=replica)


def _batches(
    leaves: Sequence[LeafPlan],
    large: set[int],
    ahead: int,
    held: list[CorruptCheckpointError] | None,
) -> Iterator[Batch]:
    """The values of the arrays of `leaves`, by their positions; `None` for a leaf without one."""
    yield [(i, None) for i, leaf in enumerate(leaves) if leaf.record.array is None]
    reads = {
        i: _array_read(leaf, leaf.record.array)
        for i, leaf in enumerate(leaves)
        if leaf.record.array is not None and i not in large
    }
    positions = iter(reads)
    for group in read_arrays(list(reads.values()), ahead, held):
        yield [(i, values) for values, i in zip(group, positions, strict=False)]


def _array_read(leaf: LeafPlan, array: LazyArray) -> ArrayRead:
    """What has to be read for a leaf that has an array."""
    regions: Sequence[Region] = [whole(array.shape)]
    if leaf.replica is not None:
        regions = leaf.replica.regions(array.shape)
    elif leaf.wanted.kind in DEVICE_KINDS:
        regions = placement.regions_of(leaf.where, array.shape, leaf.record.nbytes)
    # A number is checked against the range of its new dtype first.
    is_cast = leaf.record.spec.kind in ARRAY_KINDS and leaf.wanted.kind in ARRAY_KINDS
    dtype = parse_dtype(leaf.wanted.dtype) if is_cast else None
    return ArrayRead(leaf.record.name, array, regions, dtype)


def _checked(leaf: LeafPlan, parts: RegionValues | None) -> RegionValues | None:
    """`parts`, or those of a number that is JSON and wanted as an array.

    Raises:
      OverflowError: when it is a Python number that the wanted dtype cannot hold.
    """
    saved, wanted = leaf.record.spec, leaf.wanted
    if saved.kind not in SCALAR_KINDS or wanted.kind in SCALAR_KINDS:
        return parts
    if parts is None:
        value = kinds.decode(saved, leaf.record.value, leaf.record.name)
        if saved.kind == "int":
            raise OverflowError(f"{value} has more than 64 bits")
        parts = {whole(()): np.asarray(value)}
    if not leaf.lossy:
        conversion.check_range(next(iter(parts.values())), parse_dtype(wanted.dtype))
    return parts


def _out_of_range(leaf: LeafPlan, error: OverflowError) -> Mismatch:
    """The mismatch of a number that does not fit."""
    saved, wanted = str(leaf.record.spec), str(leaf.wanted)
    return Mismatch("dtype", leaf.record.name, saved, wanted, f"({error})")


def _place(
    batch: Sequence[tuple[LeafPlan, RegionValues | None]], sent: placement.Sent
) -> list[Any]:
    """The leaves around the parts of their arrays; those of devices are sent there together."""
    arrays = _arrays(
        [
            (leaf, parts)
            for leaf, parts in batch
            if parts is not None and leaf.wanted.kind in DEVICE_KINDS
        ]
    )
    sent.note(arrays)
    remaining = iter(arrays)
    return [_leaf(leaf, parts, remaining) for leaf, parts in batch]


def _arrays(batch: Sequence[tuple[LeafPlan, Any]]) -> list[jax.Array]:
    """The arrays of leaves on their devices."""
    alone = [
        placement.Wanted(parts, _shape(leaf), leaf.wanted, leaf.where)
        for leaf, parts in batch
        if leaf.replica is None
    ]
    arrays = iter(placement.to_devices(alone))
    return [
        next(arrays)
        if leaf.replica is None
        else placement.spread(leaf.replica, parts, _shape(leaf), parse_dtype(leaf.wanted.dtype))
        for leaf, parts in batch
    ]


def _shape(leaf: LeafPlan) -> tuple[int, ...]:
    """The shape of the array of a leaf; what has none is a number."""
    return () if leaf.record.array is None else leaf.record.array.shape


def _leaf(leaf: LeafPlan, parts: RegionValues | None, on_devices: Iterator[Any]) -> Any:
    """One leaf; its array, when it is one of a device, is the next of `on_devices`."""
    if parts is None:
        return kinds.decode(leaf.record.spec, leaf.record.value, leaf.record.name)
    if leaf.wanted.kind in DEVICE_KINDS:
        return kinds.decode(leaf.wanted, next(on_devices), leaf.record.name)
    return kinds.decode(leaf.wanted, placement.to_host(parts, leaf.wanted), leaf.record.name)


# Arrays of other devices that are too large to be on the host as a whole, chunk by chunk.


def is_too_large(leaf: LeafPlan, limit: int | None) -> bool:
    """Whether the array of `leaf` comes to its devices chunk by chunk.

    PRNG keys never do, nor what changes its dtype; on the CPU an array is where it was read to.
    """
    array, wanted = leaf.record.array, leaf.wanted
    if limit is None or array is None or leaf.record.nbytes <= limit // PART:
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


def assemble(leaf: LeafPlan, limit: int) -> jax.Array:
    """The array of `leaf` on its devices, of which the host has about `limit` bytes at a time."""
    array, where = leaf.record.array, leaf.where
    assert array is not None, "it is too large"
    with jax.transfer_guard("allow"):  # which is against transfers that nobody asked for
        return _assembled(leaf.record.name, array, where, limit)


def _assembled(name: str, array: LazyArray, where: Sharding | None, limit: int) -> jax.Array:
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
    for group in read_arrays(reads, limit):
        for found, (region, part) in zip(group, remaining, strict=False):
            start = [s - o for s, o in zip(part.start, region.start, strict=True)]
            for device in (device for device, held in regions.items() if held == region):
                memory[device] = _write(memory[device], jax.device_put(found[part], device), start)
        jax.block_until_ready(list(memory.values()))
    if where is None or len(where.device_set) == 1:
        return next(iter(memory.values()))
    shards = list(memory.values())
    return jax.make_array_from_single_device_arrays(array.shape, where, shards)


@functools.partial(jax.jit, donate_argnums=0)
def _write(memory: jax.Array, part: jax.Array, start: list[int]) -> jax.Array:
    """`memory` with `part` at `start`; compiled once for each shape."""
    return jax.lax.dynamic_update_slice(memory, part, start)
