"""All that a checkpoint holds, as `show` wants it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flaxckpt.checkpoint import Checkpoint
from flaxckpt.cli.work.stats import Stats, stats_of
from flaxckpt.cli.work.trees import Branch, Item, branch_of, format_of, items_of, leaves_of, sort
from flaxckpt.leaves.lazy import nbytes_of
from flaxckpt.restoring.source import SavedLeaf, Source
from flaxckpt.storage.location import Location
from flaxckpt.tree.select import selector


@dataclasses.dataclass(frozen=True)
class Part:
    """The state, or an item.

    Attributes:
      item: the name of the item; `None` for the state.
      kind: of the item.
      files: the size of its files beside its tree.
      source: where its tree is.
      root: its tree, if it has one.
    """

    item: str | None
    kind: str
    files: int
    source: Source | None
    root: Branch | None

    @property
    def nbytes(self) -> int:
        """The size of all of it."""
        return self.files + (self.root.nbytes if self.root else 0)

    @property
    def leaves(self) -> list[SavedLeaf]:
        """Its leaves."""
        found = [] if self.root is None else list(leaves_of(self.root))
        return found if self.root is not None and self.root.count else []

    def documents(
        self, whole: int, stats: Mapping[tuple[str, str], Stats]
    ) -> Iterator[dict[str, Any]]:
        """Its leaves for programs; all there is has `whole` bytes."""
        for leaf in self.leaves:
            found = stats.get((self.item or "", leaf.name))
            yield _document(leaf, self.item, whole) | (
                {} if found is None else {"stats": found.document()}
            )


@dataclasses.dataclass(frozen=True)
class Content:
    """A checkpoint.

    Attributes:
      path: where it is.
      format: what its format is called.
      time: when it was committed, in seconds since 1970, if that is known.
      metrics: the user's metrics.
      metadata: the user's metadata.
      parts: the state and the items.
    """

    path: Location
    format: str
    time: float | None
    metrics: Mapping[str, float]
    metadata: Mapping[str, Any]
    parts: Sequence[Part]

    @property
    def count(self) -> int:
        """How many leaves it has."""
        return sum(part.root.count for part in self.parts if part.root is not None)

    @property
    def nbytes(self) -> int:
        """The size of all of it."""
        return sum(part.nbytes for part in self.parts)

    def stats(self) -> dict[tuple[str, str], Stats]:
        """What the values are like, by item (empty for the state) and name."""
        return {
            (part.item or "", name): found
            for part in self.parts
            if part.source is not None
            for name, found in stats_of(part.source, part.leaves).items()
        }


def content_of(source: Source, glob: str | None, order: str | None) -> Content:
    """What is in `source`; with a `glob`, of the state what fits and no item."""
    is_wanted = None if glob is None else selector(glob)
    parts = [Part(None, "", 0, source, branch_of(source, is_wanted))]
    parts += map(_part, items_of(source)) if glob is None else []
    for part in parts:
        if order is not None and part.root is not None:
            sort(part.root, order)
    if not isinstance(source, Checkpoint):
        return Content(source.path, format_of(source), None, {}, {}, parts)
    described = source.described
    seconds = described.committed_ns / 1e9
    return Content(source.path, "flaxckpt", seconds, described.metrics, described.metadata, parts)


def _part(item: Item) -> Part:
    """An item."""
    root = None if item.tree is None else branch_of(item.tree)
    return Part(item.name, item.kind, item.nbytes, item.tree, root)


def _document(leaf: SavedLeaf, item: str | None, whole: int) -> dict[str, Any]:
    """A leaf for programs."""
    spec, array = leaf.spec, leaf.array
    nbytes = 0 if array is None else nbytes_of(array)
    return {
        "name": leaf.name,
        "item": item,
        "type": str(spec),
        "kind": spec.kind,
        "dtype": spec.dtype or (array.dtype if array is not None else None),
        "shape": list(spec.shape),
        "impl": spec.impl or None,
        "nbytes": nbytes,
        "share": nbytes / whole if whole else 0.0,
        "chunks": None if array is None else list(array.chunks),
        "sharding": None if array is None else array.sharding,
        "value": leaf.value if array is None else None,
    }
