"""How one array is written: its place in the checkpoint, and the chunks that are ours to write."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxckpt.errors import UnsupportedLeafError
from flaxckpt.leaves.dtypes import Storage, dtype_name, storage_of
from flaxckpt.leaves.record import StoredArray
from flaxckpt.sharding.chunks import Region, Shape, chunk_shape, chunks_of, region_of, whole
from flaxckpt.storage import zarr3

Array = jax.Array | np.ndarray


class ShardPlan(NamedTuple):
    """A part of an array that this process writes.

    Attributes:
      data: which of the array's addressable data it is.
      region: where it lies in the stored array.
      chunks: the chunks it consists of: the key of each, and its region.
    """

    data: int
    region: Region
    chunks: tuple[tuple[str, Region], ...]


@dataclasses.dataclass(frozen=True)
class ArrayPlan:
    """An array that is written.

    Attributes:
      stored: its place in the checkpoint.
      storage: how its elements are stored.
      chunk: the shape of a chunk of the stored array.
      sharding: of a `jax.Array`.
      shards: the parts that this process writes.
      is_remote: whether its values have to be brought to the host.
      is_parted: whether they are taken by device. Those of another device are in any case: jax
        keeps the host's copy as long as the array it was asked for, which is then not the user's.
    """

    stored: StoredArray
    storage: Storage
    chunk: Shape
    sharding: jax.sharding.Sharding | None
    shards: tuple[ShardPlan, ...]
    is_remote: bool
    is_parted: bool

    def metadata(self) -> tuple[str, bytes]:
        """The key and the value of the array's metadata."""
        shape = zarr3.stored_shape(self.stored.shape, self.storage)
        value = zarr3.array_metadata(shape, self.chunk, self.storage.data_type)
        return zarr3.metadata_key(self.stored.store), value


def plan_array(store: str, array: Array, chunk_bytes: int) -> ArrayPlan:
    """How `array` is written under the name `store`."""
    sharding = array.sharding if isinstance(array, jax.Array) else None
    shard = array.shape if sharding is None else sharding.shard_shape(array.shape)
    dtype = dtype_name(np.dtype(array.dtype))
    if dtype is None:
        raise UnsupportedLeafError(
            f"the handler of {store} gave an array of dtype {array.dtype}, which no checkpoint can "
            "hold. Let it return an array of numbers."
        )
    chunks = chunk_shape(array.shape, shard, array.dtype.itemsize, chunk_bytes)
    stored = StoredArray(store, dtype, array.shape, chunks, _describe_sharding(sharding))
    storage = storage_of(dtype)
    chunk = zarr3.stored_shape(chunks, storage)
    shards = []
    for index, region in _owned(array):
        where = zarr3.stored_region(region, storage)
        keys = ((zarr3.chunk_key(store, grid), part) for grid, part in chunks_of(where, chunk))
        shards.append(ShardPlan(index, where, tuple(keys)))
    devices: set[Any] = set() if sharding is None else sharding.device_set
    is_remote = any(device.platform != "cpu" for device in devices)
    is_parted = is_remote or len(devices) > 1
    return ArrayPlan(stored, storage, chunk, sharding, tuple(shards), is_remote, is_parted)


def _owned(array: Array) -> Iterator[tuple[int, Region]]:
    """Which of the addressable data of `array` are written: of each region the first replica."""
    if isinstance(array, np.ndarray) or len(array.sharding.device_set) == 1:
        yield 0, whole(array.shape)
        return
    for index, shard in enumerate(array.addressable_shards):
        if shard.replica_id == 0:
            yield index, region_of(shard.index, array.shape)


def _describe_sharding(sharding: jax.sharding.Sharding | None) -> Any:
    """A sharding by the names of its mesh axes, as JSON; `None` for a single device."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    mesh = {
        "axis_names": [str(name) for name in sharding.mesh.axis_names],
        "shape": list(sharding.mesh.devices.shape),
    }
    spec = [list(map(str, p)) if isinstance(p, tuple) else p and str(p) for p in sharding.spec]
    return {"mesh": mesh, "spec": spec}
