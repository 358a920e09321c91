"""What one checkpoint holds: the trees, of which the last is the state, and the items' files."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import crc32c
import orjson

from flaxckpt.errors import UnsupportedKeyError, UnsupportedLeafError
from flaxckpt.items import item_kinds
from flaxckpt.items.item import JSON, ProcessRank, about
from flaxckpt.items.item_kinds import EncodedItem
from flaxckpt.metadata.sealed_json import SavedFile
from flaxckpt.metadata.step_metadata import ItemRecord
from flaxckpt.saving.save_plan import PartialPlan, PlannedTree, SavePlan, plan_tree
from flaxckpt.store import layout


class WrittenTree(Protocol):
    """A tree of a checkpoint, as it is written; all but its directory is asked for at the end."""

    @property
    def directory(self) -> str:
        """Where in the checkpoint it is written."""

    @property
    def plan(self) -> SavePlan:
        """How."""

    @property
    def orbax_files(self) -> dict[str, bytes]:
        """The files beside `_METADATA` that only Orbax reads."""


class WholeTree(NamedTuple):
    """A tree that is known from the start.

    Attributes:
      directory: where in the checkpoint it is written.
      plan: how.
      has_plain_keys: whether Orbax is to see the words of PRNG keys, and no keys.
    """

    directory: str
    plan: SavePlan
    has_plain_keys: bool = False

    @property
    def orbax_files(self) -> dict[str, bytes]:
        """The files beside `_METADATA` that only Orbax reads."""
        files = self.plan.orbax_files
        if not self.has_plain_keys:
            return files
        return {n: f for n, f in files.items() if not n.startswith(f"{layout.ARRAY_METADATAS}/")}


class PartialTree:
    """A tree that is saved in parts, so that its plan is known only at the end."""

    directory = layout.ITEM

    def __init__(self) -> None:
        """No part is known yet."""
        self.parts = PartialPlan()

    @functools.cached_property
    def plan(self) -> SavePlan:
        """The plan of all parts; only asked for when there are no more."""
        return self.parts.merged()

    @property
    def orbax_files(self) -> dict[str, bytes]:
        """The files beside `_METADATA` that only Orbax reads."""
        return self.plan.orbax_files


@dataclasses.dataclass(frozen=True)
class WrittenItem:
    """One item, as the background writes it.

    Attributes:
      name: its name.
      chosen: what it is, and its files.
      tree: its tree, if it has one.
      rank: of this process.
    """

    name: str
    chosen: EncodedItem
    tree: WholeTree | None
    rank: ProcessRank

    @property
    def files(self) -> Mapping[str, bytes]:
        """What process 0 writes, by names in the directory of the item."""
        is_seen = self.tree is None or self.tree.plan.is_seen_by_orbax
        return self.chosen.encoded.files if is_seen else about(self.chosen.kind)

    def own(self, attempt: str) -> dict[str, bytes]:
        """What this process writes for itself; an `attempt` becomes part of the names."""
        index, count = self.rank.index, self.rank.count
        return {
            layout.own_file(index, count, end, attempt): data
            for end, data in self.chosen.encoded.own.items()
        }

    @property
    def digest(self) -> int:
        """A checksum of all that must be the same on all processes, but for the tree."""
        kind, encoded = self.chosen
        rest = [kind, self.tree and self.tree.directory, dict(encoded.details)]
        files = [[name, crc32c.crc32c(data)] for name, data in sorted(encoded.files.items())]
        return crc32c.crc32c(orjson.dumps([rest, files]))

    def record(self, files: Mapping[str, SavedFile]) -> ItemRecord:
        """What the checkpoint says of it; `files` are all that it has but those of its tree."""
        kind, encoded = self.chosen
        is_seen = self.tree is None or self.tree.plan.is_seen_by_orbax
        inner = None if encoded.tree is None else encoded.tree.directory
        return ItemRecord(kind, files, inner, encoded.details, encoded.orbax if is_seen else JSON)


def plan_items(
    items: Mapping[str, Any],
    rank: ProcessRank,
    chunk_bytes: int,
    plans: Mapping[str, SavePlan],
    process: int | None,
) -> tuple[list[WrittenItem], list[PlannedTree]]:
    """The items to write as they are now, and the trees of those that have one.

    Args:
      items: objects by name.
      rank: of this process, as names of files give it.
      chunk_bytes: as for `plan_tree`.
      plans: of the previous save, by directory, to be used where they fit.
      process: as for `plan_tree`.

    Raises:
      ItemError: if an item cannot be serialized.
      UnsupportedLeafError: if a leaf of a tree cannot be serialized.
      UnsupportedKeyError: if a key of a tree cannot be serialized.
    """
    encoded = {name: item_kinds.encode(name, value, rank) for name, value in items.items()}
    written, planned = [], []
    for name, item in encoded.items():
        tree = None
        if (inner := item.encoded.tree) is not None:
            directory = f"{name}/{inner.directory}" if inner.directory else name
            try:
                taken = plan_tree(inner.value, chunk_bytes, plans.get(directory), process)
            except (UnsupportedLeafError, UnsupportedKeyError) as error:
                raise type(error)(
                    f"the item {name}: {error} Or call flaxckpt.register_item_handler for the "
                    "whole item."
                ) from error
            planned.append(taken)
            tree = WholeTree(directory, taken.plan, inner.has_plain_keys)
            # Not the arrays: the loop may want to free or to donate them.
            kept = dataclasses.replace(item.encoded, tree=inner._replace(value=None))
            item = item._replace(encoded=kept)
        written.append(WrittenItem(name, item, tree, rank))
    return written, planned
