"""How one array is written: its place in the checkpoint, and the chunks that are ours to write."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxckpt.errors import UnsupportedLeafError
from flaxckpt.leaves.dtypes import Storage, dtype_name, storage_of
from flaxckpt.leaves.record import StoredArray
from flaxckpt.sharding.chunks import Region, Shape, chunk_shape, chunks_of, region_of, whole
from flaxckpt.sharding.specs import describe_sharding
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
      is_local: whether it is not spread over the processes of a job of several.
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
    is_local: bool

    def metadata(self) -> tuple[str, bytes]:
        """The key and the value of the array's metadata."""
        shape = zarr3.stored_shape(self.stored.shape, self.storage)
        value = zarr3.array_metadata(shape, self.chunk, self.storage.data_type)
        return zarr3.metadata_key(self.stored.store), value


def plan_array(store: str, array: Array, chunk_bytes: int, process: int | None = None) -> ArrayPlan:
    """How `array` is written under the name `store`.

    Args:
      store: its name.
      array: an array, of which `process` holds some.
      chunk_bytes: the most that a chunk may have.
      process: the index of this process in a job of several; `None` for one that is alone.
    """
    sharding = array.sharding if isinstance(array, jax.Array) else None
    shard = array.shape if sharding is None else sharding.shard_shape(array.shape)
    dtype = dtype_name(np.dtype(array.dtype))
    if dtype is None:
        raise UnsupportedLeafError(
            f"the handler of {store} gave an array of dtype {array.dtype}, which no checkpoint can "
            "hold. Let it return an array of numbers."
        )
    chunks = chunk_shape(array.shape, shard, array.dtype.itemsize, chunk_bytes)
    stored = StoredArray(store, dtype, array.shape, chunks, describe_sharding(sharding))
    storage = storage_of(dtype)
    chunk = zarr3.stored_shape(chunks, storage)
    shards = []
    for index, region, share in _held(array, process):
        where = zarr3.stored_region(region, storage)
        found = chunks_of(where, chunk)
        keys = tuple((zarr3.chunk_key(store, grid), part) for grid, part in found)
        if ours := share.of(keys):
            shards.append(ShardPlan(index, where, ours))
    devices: set[Any] = set() if sharding is None else sharding.device_set
    is_remote = any(device.platform != "cpu" for device in devices)
    is_parted = is_remote or len(devices) > 1
    is_local = process is not None and _is_of_one_process(array)
    return ArrayPlan(
        stored, storage, chunk, sharding, tuple(shards), is_remote, is_parted, is_local
    )


class _Share(NamedTuple):
    """This process's share of a region that `holders` of them have, of whom it is the `rank`-th."""

    rank: int
    holders: int

    def of(self, chunks: tuple[tuple[str, Region], ...]) -> tuple[tuple[str, Region], ...]:
        """The chunks that it writes: those of one next to each other, a single one the first's."""
        start, stop = (-(-len(chunks) * n // self.holders) for n in (self.rank, self.rank + 1))
        return chunks[start:stop]


def _held(array: Array, process: int | None) -> Iterator[tuple[int, Region, _Share]]:
    """Which of the addressable data of `array` are taken: each region once, from its first device.

    Together with the share of it that is this process's to write.
    """
    if isinstance(array, np.ndarray) or len(array.sharding.device_set) == 1:
        yield 0, whole(array.shape), _Share(0, 1)
        return
    ranks = {} if process is None else _holders(array.sharding, array.shape)
    seen = set()
    for index, shard in enumerate(array.addressable_shards):
        region = region_of(shard.index, array.shape)
        if region not in seen:
            seen.add(region)
            holders = ranks.get(region, [process])
            yield index, region, _Share(holders.index(process), len(holders))


@functools.lru_cache(maxsize=256)
def _holders(
    sharding: jax.sharding.Sharding, shape: Shape
) -> Mapping[Region, Sequence[int | None]]:
    """The processes that hold each region of an array, in the order of its devices.

    It takes microseconds for each device, and most arrays of a state share it with others.
    """
    holders: dict[Region, list[int | None]] = {}
    indices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in indices.items():
        found = holders.setdefault(region_of(index or (), shape), [])
        if device.process_index not in found:
            found.append(device.process_index)
    return holders


def _is_of_one_process(array: Array) -> bool:
    """Whether all of `array` is on this process, as far as that knows."""
    return isinstance(array, np.ndarray) or array.is_fully_addressable
