"""The snapshot of a state, in pieces of bounded size."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxckpt import garbage_collector
from flaxckpt.leaves.dtypes import to_stored
from flaxckpt.options import PART
from flaxckpt.saving.save_plan import AnyArray, ArrayPlan, PlannedTree, SavePlan, ShardPlan
from flaxckpt.sharding.chunks import Region
from flaxckpt.store import zarr3

# The values of a state on their way to the disk: brought to the host, and cut into chunks.


class HostShard(NamedTuple):
    """Chunks of an array by key and region, the host values they lie in, and the tree's number."""

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


@garbage_collector.paused()
def hold(*trees: PlannedTree) -> Iterator[HostShard]:
    """All of `trees`; when this returns, they may be donated, deleted or changed.

    On the CPU backend the values are views of jax's own buffers. While a view lives, jax gives a
    donating computation other memory instead, so it costs nothing now and stays right; the loop
    pays with the page faults of that memory at its next step (see docs/performance.md).
    """
    found = [_local_data(tree) for tree in trees]
    for tree, data in zip(trees, found, strict=True):
        for (array, _), values in zip(tree.plan.shards, data, strict=True):
            if array.is_remote:
                values.copy_to_host_async()
    with jax.transfer_guard("allow"):  # which is against transfers that nobody asked for
        held = [collections.deque(map(_safe, data)) for data in found]
    return _drain([tree.plan for tree in trees], held)


def by_tree(shards: Iterable[HostShard], count: int) -> Iterator[Iterator[HostShard]]:
    """The shards of each of `count` trees. Those of one must be taken before the next."""
    groups = itertools.groupby(shards, lambda shard: shard.tree)
    number, group = next(groups, (count, iter(())))
    for tree in range(count):
        if tree < number:
            yield iter(())
            continue
        yield group
        number, group = next(groups, (count, iter(())))


def _drain(
    plans: Sequence[SavePlan], held: Sequence[collections.deque[np.ndarray]]
) -> Iterator[HostShard]:
    """The shards that are held; each is dropped as it is taken, and no device array is kept."""
    for number, (plan, values) in enumerate(zip(plans, held, strict=True)):
        for array, shard in plan.shards:
            yield HostShard(array, shard.chunks, shard.region, values.popleft(), number)


def stream(
    *trees: PlannedTree, limit: int | None, copy: bool, first: int = 0
) -> Iterator[HostShard]:
    """All of `trees`, in shards or chunks that come to the host as they are taken.

    Args:
      *trees: planned trees; they must not change until the last shard is taken.
      limit: how many bytes may be in transfer to the host ahead of the shard that is taken; `None`
        for no limit.
      copy: whether shards are independent copies, because the tree may change after the last one
        is taken.
      first: the number of the first tree in the save.
    """
    for number, tree in enumerate(trees, first):
        data = _transferring(tree.plan, _local_data(tree), limit)
        for (array, shard), values in zip(tree.plan.shards, data, strict=True):
            if _is_split(values, limit) and (copy or array.is_remote):
                yield from _chunks(array, shard, values, number)
                continue
            with jax.transfer_guard("allow"):
                on_host = _safe(values) if copy else np.asarray(values)
            yield HostShard(array, shard.chunks, shard.region, on_host, number)


def _local_data(state: PlannedTree) -> list[Any]:
    """The values of each of the plan's shards, where they are."""
    return [
        values.addressable_data(shard.data) if array.is_parted else values  # type: ignore[union-attr]
        for array, values in zip(state.plan.arrays, state.data, strict=True)
        for shard in array.shards
    ]


def _safe(data: AnyArray) -> np.ndarray:
    """The values of `data` such that nothing the caller does changes them."""
    return data.copy() if isinstance(data, np.ndarray) else np.asarray(data)


def _is_split(data: AnyArray, limit: int | None) -> bool:
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


def _chunks(array: ArrayPlan, shard: ShardPlan, data: AnyArray, number: int) -> Iterator[HostShard]:
    """The chunks of a shard one by one, each in memory of its own."""
    for key, region in shard.chunks:
        index = region.within(shard.region)[: data.ndim]  # without the bytes of an element
        with jax.transfer_guard("allow"):
            values = (
                part_of_device(data, index)
                if array.is_remote
                else np.array(np.asarray(data)[index])
            )
        yield HostShard(array, ((key, region),), region, values, number)


def part_of_device(data: AnyArray, index: tuple[slice, ...]) -> np.ndarray:
    """A part of what lies on a device; compiled once for each shape, not for each place."""
    if max(data.shape, default=0) >= 1 << 31:  # but jax's indices have 32 bits
        return np.asarray(data[index])
    start, shape = [s.start for s in index], [s.stop - s.start for s in index]
    return np.asarray(jax.lax.dynamic_slice(data, start, shape))


# The pieces of a state that does not fit in memory twice, handed from one thread to another.


class ShardQueue:
    """Hands pieces from the train loop's thread to the writer's, so many bytes at a time.

    The loop's thread calls `put_all` and then `end`; the writer's iterates, and calls `stop` when
    it takes no more.
    """

    def __init__(self, limit: int):
        """At most `limit` bytes, or one piece, wait."""
        self._limit = limit
        self._waiting: collections.deque[HostShard] = collections.deque()
        self._bytes = 0
        self._ended = self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def put_all(self, pieces: Iterable[HostShard]) -> bool:
        """Hands over `pieces`; returns whether the writer took all but what waits."""
        try:
            return all(map(self._put, pieces))
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Says that there are no more pieces, because of `error`."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _put(self, piece: HostShard) -> bool:
        """Hands over one piece once there is room; returns whether the writer goes on."""
        size = piece.values.nbytes

        def is_room() -> bool:
            return self._stopped or not self._waiting or self._bytes + size <= self._limit

        with self._changed:
            self._changed.wait_for(is_room)
            if self._stopped:
                return False
            self._waiting.append(piece)
            self._bytes += size
            self._changed.notify_all()
            return True

    def end(self) -> None:
        """Says that there are no more pieces."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Says that no more pieces are taken."""
        with self._changed:
            self._stopped = True
            self._waiting.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[HostShard]:
        """The pieces, until the end.

        Raises:
          RuntimeError: when the loop's thread failed to hand over the rest.
        """
        while (piece := self._take()) is not None:
            yield piece

    def _take(self) -> HostShard | None:
        """The next piece; `None` after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended or self._error)
            if self._error is not None:
                raise RuntimeError("the state could not be read to its end") from self._error
            if not self._waiting:
                return None
            piece = self._waiting.popleft()
            self._bytes -= piece.values.nbytes
            self._changed.notify_all()
            return piece
