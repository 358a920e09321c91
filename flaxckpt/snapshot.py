"""The values of a state on their way to the disk: brought to the host, and cut into chunks."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxckpt import collector
from flaxckpt.array_plan import Array, ArrayPlan, ShardPlan
from flaxckpt.leaves.dtypes import to_stored
from flaxckpt.save_plan import SavePlan, make_plan
from flaxckpt.sharding.chunks import Region
from flaxckpt.storage import zarr3
from flaxckpt.tree import nnx_objects
from flaxckpt.tree.structure import flatten

# A shard larger than this part of the memory for values comes to the host chunk by chunk.
PART = 4


class State(NamedTuple):
    """A state taken apart: how it is written, and its arrays where they are."""

    plan: SavePlan
    data: list[Array]


class Shard(NamedTuple):
    """What this process writes of one array from one device, where it is."""

    array: ArrayPlan
    plan: ShardPlan
    data: Array

    @property
    def is_remote(self) -> bool:
        """Whether it has to be brought to the host."""
        return self.array.is_remote


class Piece(NamedTuple):
    """Some chunks of an array, by key and region, and the values on the host that they are in."""

    array: ArrayPlan
    chunks: tuple[tuple[str, Region], ...]
    region: Region
    values: np.ndarray

    def encode(self) -> Iterator[tuple[str, bytes]]:
        """Keys and values for the key-value store."""
        elements = to_stored(self.values, self.array.stored.dtype)
        for key, part in self.chunks:
            inner = elements if part == self.region else elements[part.within(self.region)]
            yield key, zarr3.encode_chunk(inner, self.array.chunk, self.array.storage)


@collector.paused()
def take_apart(tree: Any, chunk_bytes: int, plan: SavePlan | None = None) -> State:
    """`tree` with the plan to write it, which is `plan` where that fits.

    Every leaf is looked at before any value is copied.

    Raises:
      UnsupportedLeafError: when there is a leaf that no checkpoint can hold.
      UnsupportedKeyError: when a key cannot be written down.
    """
    stateful = nnx_objects.split(tree)[0]
    try:
        leaves, treedef = jax.tree.flatten(stateful)
    except ValueError:
        flatten(stateful)  # jax cannot sort the keys of a dict, and does not say which
        raise
    data = None if plan is None else plan.data(treedef, leaves)
    if plan is None or data is None:
        plan, data = make_plan(stateful, treedef, chunk_bytes)
    return State(plan, data)


@collector.paused()
def hold(state: State) -> Iterator[Piece]:
    """All of `state`; when this returns, it may be donated, deleted or changed.

    On the CPU backend the values are views of jax's own buffers. While a view lives, jax gives a
    donating computation other memory instead, so it costs nothing now and stays right; the loop
    pays with the page faults of that memory at its next step (see docs/performance.md).
    """
    shards = _shards(state)
    for shard in shards:
        if shard.is_remote:
            shard.data.copy_to_host_async()  # type: ignore[union-attr]
    return _drain(shards, collections.deque(_safe(shard.data) for shard in shards))


def _drain(shards: list[Shard], values: collections.deque[np.ndarray]) -> Iterator[Piece]:
    """The pieces of `shards`, each dropped here as it is taken."""
    plans = [(shard.array, shard.plan) for shard in shards]
    del shards
    for array, plan in plans:
        yield Piece(array, plan.chunks, plan.region, values.popleft())


def stream(state: State, limit: int | None, *, copy: bool) -> Iterator[Piece]:
    """All of `state`, in pieces that come to the host as they are taken.

    Args:
      state: must not change until the last piece is taken.
      limit: how many bytes may be on their way to the host ahead of what is taken; `None` for any.
      copy: whether a piece must stay right, and hold no more memory than it has bytes, when the
        state changes after the last was taken.
    """
    for shard in _transferring(_shards(state), limit):
        if _is_split(shard, limit) and (copy or shard.is_remote):
            yield from _chunks(shard)
        else:
            values = _safe(shard.data) if copy else np.asarray(shard.data)
            yield Piece(shard.array, shard.plan.chunks, shard.plan.region, values)


def _shards(state: State) -> list[Shard]:
    """All that this process writes."""
    return [
        Shard(array, plan, data.addressable_data(plan.data) if array.is_sharded else data)  # type: ignore[union-attr]
        for array, data in zip(state.plan.arrays, state.data, strict=True)
        for plan in array.shards
    ]


def _safe(data: Array) -> np.ndarray:
    """The values of `data` such that nothing the caller does changes them."""
    return data.copy() if isinstance(data, np.ndarray) else np.asarray(data)


def _is_split(shard: Shard, limit: int | None) -> bool:
    """Whether `shard` is too large to be on the host as a whole."""
    return limit is not None and shard.data.nbytes > limit // PART


def _transferring(shards: list[Shard], limit: int | None) -> Iterator[Shard]:
    """`shards`, with their transfers to the host begun ahead, as far as `limit` allows."""
    waiting: collections.deque[tuple[Shard, int]] = collections.deque()
    ahead = 0
    for shard in shards:
        size = shard.data.nbytes if shard.is_remote and not _is_split(shard, limit) else 0
        while waiting and limit is not None and ahead + size > limit:
            done, freed = waiting.popleft()
            ahead -= freed
            yield done
        if size:
            shard.data.copy_to_host_async()  # type: ignore[union-attr]
        waiting.append((shard, size))
        ahead += size
    for shard, _ in waiting:
        yield shard


def _chunks(shard: Shard) -> Iterator[Piece]:
    """The chunks of `shard` one by one, each in memory of its own."""
    axes = shard.data.ndim  # a chunk may have one more, the bytes of an element
    for key, region in shard.plan.chunks:
        index = region.within(shard.plan.region)[:axes]
        if shard.is_remote:
            # Compiled once for each shape, not for each place.
            start = [s.start for s in index]
            values = np.asarray(jax.lax.dynamic_slice(shard.data, start, region.shape[:axes]))
        else:
            values = np.array(np.asarray(shard.data)[index])
        yield Piece(shard.array, ((key, region),), region, values)
