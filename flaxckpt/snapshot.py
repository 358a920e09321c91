"""A state on its way to the disk: taken apart, encoded, and its values safe on the host.

Once a snapshot is taken the caller may donate, delete or change everything in the state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orjson

from flaxckpt.errors import UnsupportedLeafError
from flaxckpt.leaves import handler
from flaxckpt.leaves.dtypes import dtype_name, storage_of, to_stored
from flaxckpt.leaves.record import LeafRecord, StoredArray
from flaxckpt.metadata import limits, orbax
from flaxckpt.metadata.tree import spec_of
from flaxckpt.sharding.chunks import Region, chunk_shape, chunks_of, region_of, whole
from flaxckpt.storage import zarr3
from flaxckpt.tree import nnx_objects
from flaxckpt.tree.structure import Flat, flatten

Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class HostArray:
    """The part of one array that this process writes.

    Attributes:
      stored: the array's place in the checkpoint.
      sharding: of a `jax.Array`.
      parts: the values on the host, by region.
    """

    stored: StoredArray
    sharding: jax.sharding.Sharding | None
    parts: tuple[tuple[Region, np.ndarray], ...]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A state taken apart, with its values on the host.

    Attributes:
      flat: its structure and names; the leaves are not kept.
      records: what the checkpoint says of each leaf.
      arrays: the arrays to write.
    """

    flat: Flat
    records: tuple[LeafRecord, ...]
    arrays: tuple[HostArray, ...]

    @property
    def nbytes(self) -> int:
        """The size of all arrays."""
        return sum(array.stored.nbytes for array in self.arrays)

    def chunks(self) -> Iterator[tuple[str, bytes | bytearray]]:
        """Keys and values for the key-value store: each array's metadata, then its chunks."""
        for array in self.arrays:
            stored, storage = array.stored, storage_of(array.stored.dtype)
            shape = zarr3.stored_shape(stored.shape, storage)
            chunk = zarr3.stored_shape(stored.chunks, storage)
            yield (
                zarr3.metadata_key(stored.store),
                zarr3.array_metadata(shape, chunk, storage.data_type),
            )
            for region, values in array.parts:
                elements = to_stored(values, stored.dtype)
                for grid, part in chunks_of(zarr3.stored_region(region, storage), chunk):
                    index = part.within(zarr3.stored_region(region, storage))
                    encoded = zarr3.encode_chunk(elements[index], chunk, storage)
                    yield zarr3.chunk_key(stored.store, grid), encoded


def take(tree: Any, chunk_bytes: int) -> Snapshot:
    """Takes a snapshot of `tree`. Every leaf is looked at before any value is copied.

    Raises:
      UnsupportedLeafError: when there is a leaf that no checkpoint can hold.
      UnsupportedKeyError: when a key cannot be written down.
    """
    flat = flatten(nnx_objects.split(tree)[0])
    names = orbax.store_names(flat.paths)
    records, arrays = [], []
    for leaf, name, store in zip(flat.leaves, flat.names, names, strict=True):
        spec, data = handler.encode(leaf, name)
        if not isinstance(data, jax.Array | np.ndarray):
            records.append(LeafRecord(name, spec, value=_as_json(data, name)))
            continue
        stored = _stored_array(store, data, chunk_bytes)
        spec = spec_of(spec.kind, stored, spec.weak_type, spec.impl)
        records.append(LeafRecord(name, spec, stored))
        arrays.append((stored, data))
    _check_limits(flat, records)
    return Snapshot(
        dataclasses.replace(flat, leaves=()), tuple(records), tuple(_copy_to_host(arrays))
    )


def _check_limits(flat: Flat, records: list[LeafRecord]) -> None:
    """Refuses what a reader would refuse.

    Raises:
      UnsupportedLeafError: when the tree, or an array of it, is too large.
    """
    try:
        limits.check_tree(flat.nodes, records)
        for record in records:
            if record.array is not None:
                limits.check_array(record.array)
    except ValueError as error:
        raise UnsupportedLeafError(f"the tree cannot be held by a checkpoint: {error}") from None


def _stored_array(store: str, array: Array, chunk_bytes: int) -> StoredArray:
    """The place of `array` in the checkpoint, under the name `store`."""
    shard, sharding = array.shape, None
    if isinstance(array, jax.Array):
        shard = array.sharding.shard_shape(array.shape)
        sharding = _describe_sharding(array.sharding)
    dtype = dtype_name(np.dtype(array.dtype))
    if dtype is None:
        raise UnsupportedLeafError(
            f"the handler of {store} gave an array of dtype {array.dtype}, which no checkpoint can "
            "hold. Let it return an array of numbers."
        )
    chunks = chunk_shape(array.shape, shard, array.dtype.itemsize, chunk_bytes)
    return StoredArray(store, dtype, array.shape, chunks, sharding)


def _describe_sharding(sharding: jax.sharding.Sharding) -> Any:
    """A sharding by the names of its mesh axes, as JSON; `None` for a single device."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    mesh = {
        "axis_names": [str(name) for name in sharding.mesh.axis_names],
        "shape": list(sharding.mesh.devices.shape),
    }
    spec = [list(map(str, p)) if isinstance(p, tuple) else p and str(p) for p in sharding.spec]
    return {"mesh": mesh, "spec": spec}


def _copy_to_host(arrays: list[tuple[StoredArray, Array]]) -> Iterator[HostArray]:
    """The values of `arrays`: all transfers are started before any is awaited."""
    owned = [(stored, array, list(_owned(array))) for stored, array in arrays]
    for _, _, parts in owned:
        for _, data in parts:
            if isinstance(data, jax.Array) and next(iter(data.devices())).platform != "cpu":
                data.copy_to_host_async()
    for stored, array, parts in owned:
        sharding = array.sharding if isinstance(array, jax.Array) else None
        yield HostArray(stored, sharding, tuple((r, _on_host(data)) for r, data in parts))


def _owned(array: Array) -> Iterator[tuple[Region, Array]]:
    """The shards of `array` that are written: of each region the first replica."""
    if isinstance(array, np.ndarray) or len(array.sharding.device_set) == 1:
        yield whole(array.shape), array
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield region_of(shard.index, array.shape), shard.data


def _on_host(data: Array) -> np.ndarray:
    """Values that nothing the caller does can change.

    On the CPU backend this is a view of jax's own buffer, and while it lives jax gives a donating
    computation other memory instead; so it costs nothing and stays right. A numpy array, which
    the caller can write to, is copied.
    """
    return data.copy() if isinstance(data, np.ndarray) else np.asarray(data)


def _as_json(value: Any, name: str) -> Any:
    """What a handler gave, when JSON can hold it exactly.

    Raises:
      UnsupportedLeafError: when it can't.
    """
    try:
        if orjson.loads(orjson.dumps(value)) == value:
            return value
    except (TypeError, ValueError):
        pass
    raise UnsupportedLeafError(
        f"the handler of the leaf {name} encoded it as {value!r:.80}, which is neither an array "
        "nor what JSON can hold exactly. Let it return str, int, list or dict."
    )
