"""What one checkpoint holds: the trees, of which the first is the state, and the items' files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import crc32c
import orjson

from flaxckpt.errors import UnsupportedKeyError, UnsupportedLeafError
from flaxckpt.items import kind as items_kind
from flaxckpt.items.item import JSON, ItemTree, ProcessRank, about
from flaxckpt.items.kind import EncodedItem
from flaxckpt.metadata.sealed_json import SavedFile
from flaxckpt.metadata.step_metadata import ItemRecord
from flaxckpt.saving.save_plan import SavePlan
from flaxckpt.saving.snapshot import PlannedTree, take_apart
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


def encode(items: Mapping[str, Any], rank: ProcessRank) -> dict[str, EncodedItem]:
    """The items as they are now, but for the arrays of those that are trees.

    Raises:
      ItemError: when no checkpoint can hold one.
    """
    return {name: items_kind.encode(name, value, rank) for name, value in items.items()}


def take_items_apart(
    items: Mapping[str, EncodedItem],
    rank: ProcessRank,
    chunk_bytes: int,
    plans: Mapping[str, SavePlan],
    process: int | None,
) -> tuple[list[WrittenItem], list[PlannedTree]]:
    """The items to write, and the trees of those that have one.

    Args:
      items: encoded.
      rank: of this process, as names of files say it.
      chunk_bytes: as for `take_apart`.
      plans: of the save before, by the names of the items, to be used where they fit.
      process: as for `take_apart`.

    Raises:
      UnsupportedLeafError: when there is a leaf that no checkpoint can hold.
      UnsupportedKeyError: when a key cannot be written down.
    """
    taken, states = [], []
    for name, chosen in items.items():
        tree = None
        if (inner := chosen.encoded.tree) is not None:
            states.append(_take_apart(name, inner, chunk_bytes, plans.get(name), process))
            directory = f"{name}/{inner.directory}" if inner.directory else name
            tree = WholeTree(directory, states[-1].plan, inner.has_plain_keys)
            # Not the arrays: the loop may want to free or to donate them.
            kept = dataclasses.replace(chosen.encoded, tree=inner._replace(value=None))
            chosen = EncodedItem(chosen.kind, kept)
        taken.append(WrittenItem(name, chosen, tree, rank))
    return taken, states


def _take_apart(
    name: str, tree: ItemTree, chunk_bytes: int, plan: SavePlan | None, process: int | None
) -> PlannedTree:
    """The tree of one item."""
    try:
        return take_apart(tree.value, chunk_bytes, plan, process)
    except (UnsupportedLeafError, UnsupportedKeyError) as error:
        raise type(error)(
            f"the item {name}: {error} Or call flaxckpt.register_item_handler for the whole item."
        ) from error


def plans_of(items: Sequence[WrittenItem]) -> dict[str, SavePlan]:
    """The plans of the items' trees, by the items' names."""
    return {item.name: item.tree.plan for item in items if item.tree is not None}
