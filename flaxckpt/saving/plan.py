"""What a save will write, as far as structure, types and shardings decide it. No I/O.

A training loop saves the same kind of state again and again: the names, the records, the chunks
and the metadata are worked out for the first save and kept for the next.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import orjson

from flaxckpt.errors import UnsupportedLeafError
from flaxckpt.leaves import handler
from flaxckpt.leaves.record import LeafRecord, LeafSpec
from flaxckpt.metadata import limits, orbax
from flaxckpt.metadata.tree import encode_structure, spec_of
from flaxckpt.saving.array_plan import Array, ArrayPlan, ShardPlan, plan_array
from flaxckpt.storage import layout
from flaxckpt.tree.structure import Flat, flatten

# Orbax's file of shardings has some 15 bytes for each device of each leaf. On large meshes it would
# have more than all other metadata; without it, Orbax asks to be told where arrays are to lie.
MAX_SHARDING_DEVICES = 1 << 20


class _Other(NamedTuple):
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
    _others: tuple[_Other, ...]
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

    def data(self, tree: Any, treedef: Any, leaves: Sequence[Any]) -> list[Array] | None:
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
            found, value = handler.encode(leaves[position], name)
            if (found, _made(value, name)) != (spec, made):
                return None
            data[position] = value
        if any(leaf.is_deleted() for leaf in on_devices):
            for leaf, name in zip(leaves, self.flat.names, strict=True):
                handler.encode(leaf, name)  # names the first one
        return [data[i] for i, record in enumerate(self.records) if record.array is not None]

    @functools.cached_property
    def structure(self) -> dict[str, orjson.Fragment]:
        """What `_METADATA` says of the tree, encoded."""
        return _fragments(encode_structure(self.flat.nodes, self.records))

    @functools.cached_property
    def strings(self) -> dict[str, Any]:
        """The strings of the tree, as Orbax finds them."""
        return orbax.strings_file(self.flat.paths, self.records)

    @functools.cached_property
    def is_seen_by_orbax(self) -> bool:
        """Whether Orbax finds anything in the tree; it cannot restore one that is all hidden."""
        records = zip(self.flat.paths, self.records, strict=True)
        seen = (orbax.visible(path, record, self.strings) for path, record in records)
        return bool(self.flat.empties) or any(seen)

    @functools.cached_property
    def orbax_members(self) -> dict[str, orjson.Fragment]:
        """The members of `_METADATA` that Orbax reads, encoded."""
        flat = self.flat
        return _fragments(orbax.tree_metadata(flat.paths, self.records, flat.empties, self.strings))

    @functools.cached_property
    def orbax_files(self) -> dict[str, bytes]:
        """The files beside `_METADATA` that only Orbax reads."""
        files = {}
        shardings = {a.stored.store: a.sharding for a in self.arrays if a.sharding is not None}
        # It repeats the devices of the mesh for each leaf.
        if 0 < sum(len(s.device_set) for s in shardings.values()) <= MAX_SHARDING_DEVICES:
            files[layout.SHARDING] = orjson.dumps(orbax.sharding_file(shardings))
        if any(record.spec.kind == "prng_key" for record in self.records):
            name = f"{layout.ARRAY_METADATAS}/process_0"
            files[name] = orjson.dumps(orbax.array_metadatas_file(self.records))
        if self.strings:
            files[layout.STRINGS] = orjson.dumps(self.strings)
        return files


def make_plan(
    tree: Any, treedef: Any, chunk_bytes: int, process: int | None = None
) -> tuple[SavePlan, list[Array]]:
    """The plan of `tree`, whose structure is `treedef`, and its arrays; see `plan_array`.

    Raises:
      UnsupportedLeafError: when there is a leaf that no checkpoint can hold.
      UnsupportedKeyError: when a key cannot be written down.
    """
    flat = flatten(tree)
    encoded = [handler.encode(*pair) for pair in zip(flat.leaves, flat.names, strict=True)]
    records: list[LeafRecord] = []
    arrays, data = [], []
    for (spec, value), name, store in zip(
        encoded, flat.names, orbax.store_names(flat.paths), strict=True
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
        _Other(i, flat.names[i], spec, _made(value, flat.names[i]))
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
        limits.check_tree(flat.nodes, records)
        for record in records:
            if record.array is not None:
                limits.check_array(record.array)
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
