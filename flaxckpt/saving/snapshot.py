"""The values of a state on their way to the disk: brought to the host, and cut into chunks."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxckpt import collector
from flaxckpt.leaves.dtypes import to_stored
from flaxckpt.options import PART
from flaxckpt.saving.array_plan import Array, ArrayPlan, ShardPlan
from flaxckpt.saving.plan import SavePlan, make_plan
from flaxckpt.sharding.chunks import Region
from flaxckpt.storage import zarr3
from flaxckpt.tree import nnx_objects
from flaxckpt.tree.structure import flatten


class State(NamedTuple):
    """A state taken apart: how it is written, and its arrays where they are."""

    plan: SavePlan
    data: list[Array]


class Piece(NamedTuple):
    """Some chunks of an array, by key and region, and the values on the host that they are in.

    The `tree` is the one that the array is of, when several are written together.
    """

    array: ArrayPlan
    chunks: tuple[tuple[str, Region], ...]
    region: Region
    values: np.ndarray
    tree: int = 0

    def encode(self) -> Iterator[tuple[str, bytes]]:
        """Keys and values for the key-value store."""
        elements = to_stored(self.values, self.array.stored.dtype)
        for key, part in self.chunks:
            inner = elements if part == self.region else elements[part.within(self.region)]
            yield key, zarr3.encode_chunk(inner, self.array.chunk, self.array.storage)


@collector.paused()
def take_apart(
    tree: Any, chunk_bytes: int, plan: SavePlan | None = None, process: int | None = None
) -> State:
    """`tree` with the plan to write it, which is `plan` where that fits.

    Every leaf is looked at before any value is copied. `process` is the index of this process in a
    job of several.

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
    data = None if plan is None else plan.data(stateful, treedef, leaves)
    if plan is None or data is None:
        plan, data = make_plan(stateful, treedef, chunk_bytes, process)
    return State(plan, data)


@collector.paused()
def hold(*states: State) -> Iterator[Piece]:
    """All of `states`; when this returns, they may be donated, deleted or changed.

    On the CPU backend the values are views of jax's own buffers. While a view lives, jax gives a
    donating computation other memory instead, so it costs nothing now and stays right; the loop
    pays with the page faults of that memory at its next step (see docs/performance.md).
    """
    found = [_local_data(state) for state in states]
    for state, data in zip(states, found, strict=True):
        for (array, _), values in zip(state.plan.shards, data, strict=True):
            if array.is_remote:
                values.copy_to_host_async()
    with jax.transfer_guard("allow"):  # which is against transfers that nobody asked for
        held = [collections.deque(map(_safe, data)) for data in found]
    return _numbered([_drain(s.plan, values) for s, values in zip(states, held, strict=True)])


def stream_all(states: Sequence[State], limit: int | None, *, copy: bool) -> Iterator[Piece]:
    """All of `states`, one after the other; see `stream`."""
    return _numbered([stream(state, limit, copy=copy) for state in states])


def _numbered(trees: Sequence[Iterator[Piece]]) -> Iterator[Piece]:
    """The pieces of several trees, which say of which they are."""
    first, *others = trees
    numbered = (
        piece._replace(tree=number) for number, pieces in enumerate(others, 1) for piece in pieces
    )
    return itertools.chain(first, numbered)


def by_tree(pieces: Iterable[Piece], count: int) -> Iterator[Iterator[Piece]]:
    """The pieces of each of `count` trees. Those of one must be taken before the next."""
    groups = itertools.groupby(pieces, lambda piece: piece.tree)
    number, group = next(groups, (count, iter(())))
    for tree in range(count):
        if tree < number:
            yield iter(())
            continue
        yield group
        number, group = next(groups, (count, iter(())))


def _drain(plan: SavePlan, held: collections.deque[np.ndarray]) -> Iterator[Piece]:
    """The pieces of what is held, which is dropped as they are taken."""
    for array, shard in plan.shards:
        yield Piece(array, shard.chunks, shard.region, held.popleft())


def stream(state: State, limit: int | None, *, copy: bool) -> Iterator[Piece]:
    """All of `state`, in pieces that come to the host as they are taken.

    Args:
      state: must not change until the last piece is taken.
      limit: how many bytes may be on their way to the host ahead of what is taken; `None` for any.
      copy: whether a piece must stay right, and hold no more memory than it has bytes, when the
        state changes after the last was taken.
    """
    data = _transferring(state.plan, _local_data(state), limit)
    for (array, shard), values in zip(state.plan.shards, data, strict=True):
        if _is_split(values, limit) and (copy or array.is_remote):
            yield from _chunks(array, shard, values)
            continue
        with jax.transfer_guard("allow"):
            on_host = _safe(values) if copy else np.asarray(values)
        yield Piece(array, shard.chunks, shard.region, on_host)


def _local_data(state: State) -> list[Any]:
    """The values of each of the plan's shards, where they are."""
    return [
        values.addressable_data(shard.data) if array.is_parted else values  # type: ignore[union-attr]
        for array, values in zip(state.plan.arrays, state.data, strict=True)
        for shard in array.shards
    ]


def _safe(data: Array) -> np.ndarray:
    """The values of `data` such that nothing the caller does changes them."""
    return data.copy() if isinstance(data, np.ndarray) else np.asarray(data)


def _is_split(data: Array, limit: int | None) -> bool:
    """Whether `data` is too large to be on the host as a whole."""
    return limit is not None and data.nbytes > limit // PART


def _transferring(plan: SavePlan, data: list[Any], limit: int | None) -> Iterator[Any]:
    """`data`, with the transfers to the host begun ahead, as far as `limit` allows."""
    waiting: collections.deque[tuple[Any, int]] = collections.deque()
    ahead = 0
    for (array, _), values in zip(plan.shards, data, strict=True):
        size = values.nbytes if array.is_remote and not _is_split(values, limit) else 0
        while waiting and limit is not None and ahead + size > limit:
            done, freed = waiting.popleft()
            ahead -= freed
            yield done
        if size:
            values.copy_to_host_async()
        waiting.append((values, size))
        ahead += size
    while waiting:
        yield waiting.popleft()[0]


def _chunks(array: ArrayPlan, shard: ShardPlan, data: Array) -> Iterator[Piece]:
    """The chunks of a shard one by one, each in memory of its own."""
    for key, region in shard.chunks:
        index = region.within(shard.region)[: data.ndim]  # without the bytes of an element
        with jax.transfer_guard("allow"):
            values = (
                part_of_device(data, index)
                if array.is_remote
                else np.array(np.asarray(data)[index])
            )
        yield Piece(array, ((key, region),), region, values)


def part_of_device(data: Array, index: tuple[slice, ...]) -> np.ndarray:
    """A part of what lies on a device; compiled once for each shape, not for each place."""
    if max(data.shape, default=0) >= 1 << 31:  # but jax's indices have 32 bits
        return np.asarray(data[index])
    start, shape = [s.start for s in index], [s.stop - s.start for s in index]
    return np.asarray(jax.lax.dynamic_slice(data, start, shape))
