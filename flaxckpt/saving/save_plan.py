"""The plan of a save: which process writes which chunk of which leaf."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import ml_dtypes
import numpy as np
import orjson

from flaxckpt import garbage_collector
from flaxckpt.errors import UnsupportedKeyError, UnsupportedLeafError
from flaxckpt.leaves import kinds
from flaxckpt.leaves.array import check_concrete, is_key_dtype
from flaxckpt.leaves.dtypes import Storage, dtype_name, parse_dtype, storage_of
from flaxckpt.leaves.spec import LeafRecord, LeafSpec, StoredArray
from flaxckpt.metadata import orbax_metadata, tree_metadata
from flaxckpt.metadata.tree_metadata import encode_structure, spec_of
from flaxckpt.options import SaveDtype
from flaxckpt.sharding.chunks import Region, Shape, chunk_shape, chunks_of, region_of, whole
from flaxckpt.sharding.specs import describe_sharding
from flaxckpt.store import layout, zarr3
from flaxckpt.tree import nnx_objects
from flaxckpt.tree.keypaths import component, first_match
from flaxckpt.tree.structure import Flat, flatten

# How one array is written: its place in the checkpoint, and the chunks that are ours to write.


AnyArray = jax.Array | np.ndarray


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
      is_parted: whether the values are fetched shard by shard. Arrays on accelerators always
        are, because jax caches the host copy on the fetched array, and the user's would keep it.
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


def plan_array(
    store: str, array: AnyArray, chunk_bytes: int, process: int | None = None
) -> ArrayPlan:
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


class _Replica(NamedTuple):
    """The share of one process in writing a region: it is the `rank`-th of `holders` processes."""

    rank: int
    holders: int

    def of(self, chunks: tuple[tuple[str, Region], ...]) -> tuple[tuple[str, Region], ...]:
        """This holder's contiguous slice of `chunks`; a single chunk goes to the first holder."""
        start, stop = (-(-len(chunks) * n // self.holders) for n in (self.rank, self.rank + 1))
        return chunks[start:stop]


def _held(array: AnyArray, process: int | None) -> Iterator[tuple[int, Region, _Replica]]:
    """Yields each region once: shard index, region, and this process's share of the region.

    The index is that of the first addressable shard that has the region.
    """
    if isinstance(array, np.ndarray) or len(array.sharding.device_set) == 1:
        yield 0, whole(array.shape), _Replica(0, 1)
        return
    ranks = {} if process is None else _holders(array.sharding, array.shape)
    seen = set()
    for index, shard in enumerate(array.addressable_shards):
        region = region_of(shard.index, array.shape)
        if region not in seen:
            seen.add(region)
            holders = ranks.get(region, [process])
            yield index, region, _Replica(holders.index(process), len(holders))


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


def _is_of_one_process(array: AnyArray) -> bool:
    """Whether all of `array` is on this process, as far as that knows."""
    return isinstance(array, np.ndarray) or array.is_fully_addressable


# What a save will write, as far as structure, types and shardings decide it. No I/O.
#
# A training loop saves the same kind of state again and again: the names, the records, the chunks
# and the metadata are worked out for the first save and kept for the next.


# Orbax's file of shardings has some 15 bytes for each device of each leaf. On large meshes it would
# have more than all other metadata; without it, Orbax asks to be told where arrays are to lie.
MAX_SHARDING_DEVICES = 1 << 20


class _EncodedLeaf(NamedTuple):
    """A leaf that is no jax array: its position, its name, and what its handler made of it."""

    position: int
    name: str
    spec: LeafSpec
    made: Any


@dataclasses.dataclass(frozen=True)
class SavePlan:
    """What the saves of one kind of state have in common.

    Attributes:
      flat: the structure and the names; the leaves are not kept.
      records: what the checkpoint says of each leaf.
      arrays: the arrays to write, in the order of the leaves.
    """

    flat: Flat
    records: tuple[LeafRecord, ...]
    arrays: tuple[ArrayPlan, ...]
    _treedef: Any
    _devices: tuple[int, ...]
    _signature: tuple[list[Any], ...]
    _others: tuple[_EncodedLeaf, ...]
    _has_odd_keys: bool

    @classmethod
    def of_parts(
        cls, flat: Flat, records: tuple[LeafRecord, ...], arrays: tuple[ArrayPlan, ...]
    ) -> Self:
        """A plan for what was written in parts, which fits no other state."""
        kept = dataclasses.replace(flat, leaves=())
        return cls(kept, records, arrays, None, (), ([],), (), _has_odd_keys=False)

    @property
    def treedef(self) -> Any:
        """The structure as jax has it."""
        return self._treedef

    @functools.cached_property
    def nbytes(self) -> int:
        """The size of all arrays."""
        return sum(array.stored.nbytes for array in self.arrays)

    @functools.cached_property
    def held_bytes(self) -> int:
        """The size of what this process has of them, each region once."""
        return sum(
            math.prod(shard.region.shape) * array.storage.dtype.itemsize
            for array, shard in self.shards
        )

    @functools.cached_property
    def shards(self) -> tuple[tuple[ArrayPlan, ShardPlan], ...]:
        """All that this process writes, shard by shard."""
        return tuple((array, shard) for array in self.arrays for shard in array.shards)

    @functools.cached_property
    def array_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """The keys and the values of the metadata of the arrays."""
        return tuple(array.metadata() for array in self.arrays)

    def data(self, tree: Any, treedef: Any, leaves: Sequence[Any]) -> list[AnyArray] | None:
        """The arrays of `tree`, of `treedef` and `leaves`, if it is of this kind; `None` if not.

        Raises:
          UnsupportedLeafError: when the buffer of a leaf was deleted.
        """
        if not _equal(treedef, self._treedef):
            return None
        # To a dict, and so to jax, 1 and True and 1.0 are one key.
        if self._has_odd_keys and _names(flatten(tree)) != _names(self.flat):
            return None
        on_devices = [leaves[i] for i in self._devices]
        if _types(on_devices) != self._signature[0] or _signature(on_devices) != self._signature:
            return None
        data = list(leaves)
        for position, name, spec, made in self._others:
            found, value = kinds.encode(leaves[position], name)
            if (found, _made(value, name)) != (spec, made):
                return None
            data[position] = value
        if any(leaf.is_deleted() for leaf in on_devices):
            for leaf, name in zip(leaves, self.flat.names, strict=True):
                kinds.encode(leaf, name)  # names the first one
        return [data[i] for i, record in enumerate(self.records) if record.array is not None]

    @functools.cached_property
    def structure(self) -> dict[str, orjson.Fragment]:
        """What `_METADATA` says of the tree, encoded."""
        return _fragments(encode_structure(self.flat.nodes, self.records))

    @functools.cached_property
    def strings(self) -> dict[str, Any]:
        """The strings of the tree, as Orbax finds them."""
        return orbax_metadata.strings_file(self.flat.paths, self.records)

    @functools.cached_property
    def is_seen_by_orbax(self) -> bool:
        """Whether Orbax finds anything in the tree; it cannot restore one that is all hidden."""
        records = zip(self.flat.paths, self.records, strict=True)
        seen = (orbax_metadata.visible(path, record, self.strings) for path, record in records)
        return bool(self.flat.empties) or any(seen)

    @functools.cached_property
    def orbax_members(self) -> dict[str, orjson.Fragment]:
        """The members of `_METADATA` that Orbax reads, encoded."""
        flat = self.flat
        return _fragments(
            orbax_metadata.tree_metadata(flat.paths, self.records, flat.empties, self.strings)
        )

    @functools.cached_property
    def orbax_files(self) -> dict[str, bytes]:
        """The files beside `_METADATA` that only Orbax reads."""
        files = {}
        shardings = {a.stored.store: a.sharding for a in self.arrays if a.sharding is not None}
        # It repeats the devices of the mesh for each leaf.
        if 0 < sum(len(s.device_set) for s in shardings.values()) <= MAX_SHARDING_DEVICES:
            files[layout.SHARDING] = orjson.dumps(orbax_metadata.sharding_file(shardings))
        if any(record.spec.kind == "prng_key" for record in self.records):
            name = f"{layout.ARRAY_METADATAS}/process_0"
            files[name] = orjson.dumps(orbax_metadata.array_metadatas_file(self.records))
        if self.strings:
            files[layout.STRINGS] = orjson.dumps(self.strings)
        return files


class PlannedTree(NamedTuple):
    """A tree's plan and its arrays, which are still on their devices."""

    plan: SavePlan
    data: list[AnyArray]


@garbage_collector.paused()
def plan_tree(
    tree: Any, chunk_bytes: int, plan: SavePlan | None = None, process: int | None = None
) -> PlannedTree:
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
    return PlannedTree(plan, data)


def make_plan(
    tree: Any, treedef: Any, chunk_bytes: int, process: int | None = None
) -> tuple[SavePlan, list[AnyArray]]:
    """The plan of `tree`, whose structure is `treedef`, and its arrays; see `plan_array`.

    Raises:
      UnsupportedLeafError: when there is a leaf that no checkpoint can hold.
      UnsupportedKeyError: when a key cannot be written down.
    """
    flat = flatten(tree)
    encoded = [kinds.encode(*pair) for pair in zip(flat.leaves, flat.names, strict=True)]
    records: list[LeafRecord] = []
    arrays, data = [], []
    for (spec, value), name, store in zip(
        encoded, flat.names, orbax_metadata.store_names(flat.paths), strict=True
    ):
        if not isinstance(value, jax.Array | np.ndarray):
            records.append(LeafRecord(name, spec, value=_as_json(value, name)))
            continue
        arrays.append(plan_array(store, value, chunk_bytes, process))
        data.append(value)
        stored = arrays[-1].stored
        spec = spec_of(spec.kind, stored, spec.weak_type, spec.impl)
        records.append(LeafRecord(name, spec, stored))
    check_limits(flat, records)
    devices = tuple(i for i, (spec, _) in enumerate(encoded) if spec.kind == "jax")
    others = tuple(
        _EncodedLeaf(i, flat.names[i], spec, _made(value, flat.names[i]))
        for i, (spec, value) in enumerate(encoded)
        if spec.kind != "jax"
    )
    signature = _signature([flat.leaves[i] for i in devices])
    kept = dataclasses.replace(flat, leaves=())
    odd = any(
        key.kind == "dict" and type(key.value) is not str
        for node in flat.nodes
        if node is not None
        for key in node.keys
    )
    plan = SavePlan(kept, tuple(records), tuple(arrays), treedef, devices, signature, others, odd)
    return plan, data


def _names(flat: Flat) -> tuple[tuple[str, ...], list[str]]:
    """The names of the leaves and of the empty nodes, which tell the types of keys."""
    return flat.names, [name for name, _, _ in flat.empties]


def _equal(treedef: Any, other: Any) -> bool:
    """Whether two structures are equal; static fields that cannot be compared are not."""
    try:
        return bool(treedef == other)
    except (TypeError, ValueError):
        return False


def _types(leaves: Sequence[Any]) -> list[Any]:
    """The type of each leaf."""
    return list(map(type, leaves))


def _signature(leaves: Sequence[jax.Array]) -> tuple[list[Any], ...]:
    """All that a plan depends on of some jax arrays; as few new objects as possible."""
    return (
        _types(leaves),
        [leaf.shape for leaf in leaves],
        [leaf.dtype for leaf in leaves],
        [leaf.sharding for leaf in leaves],
        [leaf.weak_type for leaf in leaves],
    )


def _made(value: Any, name: str) -> Any:
    """All that a plan depends on of what a handler made of a leaf."""
    if isinstance(value, jax.Array):
        return value.shape, value.dtype, value.sharding
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype
    return orjson.dumps(_as_json(value, name))


def _fragments(members: Mapping[str, Any]) -> dict[str, orjson.Fragment]:
    """The members of a JSON object, each encoded."""
    return {name: orjson.Fragment(orjson.dumps(value)) for name, value in members.items()}


def check_limits(flat: Flat, records: Sequence[LeafRecord]) -> None:
    """Refuses what a reader would refuse.

    Raises:
      UnsupportedLeafError: when the tree, or an array of it, is too large.
    """
    try:
        tree_metadata.check_tree(flat.nodes, records)
        for record in records:
            if record.array is not None:
                tree_metadata.check_array(record.array)
    except ValueError as error:
        raise UnsupportedLeafError(
            f"the tree cannot be held by a checkpoint: {error}. Save it in parts, at paths of "
            "their own."
        ) from None


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


# Saving floats with fewer bits than the state has.


def as_saved(tree: Any, wanted: SaveDtype | None) -> Any:
    """`tree` with its floating arrays as they are to be saved; nothing else changes.

    Example:
      >>> tree = {"w": np.ones(2, np.float32), "step": 3}
      >>> as_saved(tree, {"w|b": "float16"})["w"].dtype, as_saved(tree, None) is tree
      (dtype('float16'), True)
    """
    if wanted is None:
        return tree
    stateful = nnx_objects.split(tree)[0]
    flat = flatten(stateful)
    rules = {"": wanted} if isinstance(wanted, str) else wanted
    dtypes = first_match(rules, flat.names, "Options(save_dtype=...)")
    pairs = zip(flat.leaves, flat.names, strict=True)
    cast = [_cast(leaf, name, dtypes.get(name)) for leaf, name in pairs]
    return jax.tree.unflatten(jax.tree.structure(stateful), cast)


def _cast(leaf: Any, name: str, dtype: str | None) -> Any:
    """The leaf `name` as it is saved: never with more bits than it has.

    Raises:
      UnsupportedLeafError: when it is abstract or deleted.
    """
    if dtype is None or not isinstance(leaf, jax.Array | np.ndarray) or is_key_dtype(leaf.dtype):
        return leaf
    if not jax.dtypes.issubdtype(leaf.dtype, np.floating) or _bits(leaf.dtype) <= _bits(dtype):
        return leaf
    try:
        concrete = check_concrete(leaf) if isinstance(leaf, jax.Array) else leaf
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(f"the leaf {name}: {error}") from None
    return concrete.astype(parse_dtype(dtype))


def _bits(dtype: Any) -> int:
    """The size of a floating-point number."""
    return int(ml_dtypes.finfo(parse_dtype(dtype) if isinstance(dtype, str) else dtype).bits)


# The plan of a tree that was saved in parts.


class _LeafRef:
    """Stands for a leaf in the structure of a part: the number of the part, and of the leaf."""

    def __init__(self, part: int, number: int):
        self.part, self.number = part, number


class PartialPlan(NamedTuple):
    """Plans of parts, and the structure of them all, with a stand-in for each leaf."""

    plans: tuple[SavePlan, ...] = ()
    tree: Any = None

    def with_part(self, plan: SavePlan) -> PartialPlan:
        """These and one more.

        Raises:
          UnsupportedKeyError: when a leaf of it is there already, or its parent is.
        """
        leaves = [_LeafRef(len(self.plans), number) for number in range(len(plan.records))]
        part = jax.tree.unflatten(plan.treedef, leaves)
        tree = _merged(self.tree, part, "") if self.plans else part
        stored = {array.stored.store for known in self.plans for array in known.arrays}
        for array in plan.arrays:
            if array.stored.store in stored:
                raise UnsupportedKeyError(
                    f"two parts have an array that Orbax calls {array.stored.store!r}. Save them "
                    "in one part, or rename one."
                )
        return PartialPlan((*self.plans, plan), tree)

    def merged(self) -> SavePlan:
        """One plan for all of it.

        Raises:
          UnsupportedLeafError: when that is too large.
        """
        flat = flatten(self.tree)
        by_record = [dict(_arrays(plan)) for plan in self.plans]
        order = [(leaf.part, leaf.number) for leaf in flat.leaves]
        records = tuple(self.plans[part].records[number] for part, number in order)
        arrays = tuple(by_record[p][number] for p, number in order if number in by_record[p])
        check_limits(flat, records)
        return SavePlan.of_parts(flat, records, arrays)


def _arrays(plan: SavePlan) -> Sequence[tuple[int, Any]]:
    """The arrays of a plan, by the numbers of their leaves."""
    numbers = [i for i, record in enumerate(plan.records) if record.array is not None]
    return list(zip(numbers, plan.arrays, strict=True))


def _merged(first: Any, second: Any, path: str) -> Any:
    """Two trees as one: dicts are joined, and nothing else can be.

    Raises:
      UnsupportedKeyError: when both have something else at one path.
    """
    if type(first) is not dict or type(second) is not dict:
        raise UnsupportedKeyError(
            f"two parts have something at {path or 'the root'} that is no dict in both. Parts are "
            "joined by the keys of their dicts, so give each leaf in one part only."
        )
    joined = dict(first)
    for key, value in second.items():
        name = f"{path}/{component(key)}" if path else component(key)
        joined[key] = _merged(first[key], value, name) if key in first else value
    return joined
