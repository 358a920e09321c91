"""What a restore reads from: a checkpoint of flaxckpt, or of any format that has a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from flaxckpt.leaves.lazy import LazyArray
from flaxckpt.leaves.record import LeafSpec, StoredArray
from flaxckpt.storage.location import Location
from flaxckpt.tree.node import Node


class SavedLeaf(Protocol):
    """One leaf of a source. (A `LeafRecord` is one.)"""

    @property
    def name(self) -> str:
        """Its key path."""

    @property
    def spec(self) -> LeafSpec:
        """Its type."""

    @property
    def array(self) -> StoredArray | LazyArray | None:
        """Its array, when it has one: in flaxckpt's own format, or one that reads itself."""

    @property
    def value(self) -> Any:
        """Otherwise its value, as its handler encodes it."""


class Source(Protocol):
    """An opened checkpoint, of which no array was read yet."""

    @property
    def path(self) -> Location:
        """Where it lies."""

    @property
    def nodes(self) -> Sequence[Node | None]:
        """Its structure: the nodes in preorder, `None` for a leaf."""

    @property
    def leaves(self) -> Sequence[SavedLeaf]:
        """Its leaves, in the same order."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The user's own metadata."""

    def unchanged(self) -> AbstractContextManager[None]:
        """Makes sure that what is read in the block is what was opened."""
