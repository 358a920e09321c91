"""One checkpoint to write."""

from __future__ import annotations

import dataclasses

import tensorstore as ts

from flaxckpt.metadata.checkpoint import CheckpointMetadata
from flaxckpt.metadata.past import PastSave
from flaxckpt.options import Options
from flaxckpt.saving.contents import Item, Tree, WrittenTree
from flaxckpt.saving.tree_writing import TreeWriter
from flaxckpt.storage import location
from flaxckpt.storage.location import Location


@dataclasses.dataclass(frozen=True)
class Job:
    """One checkpoint to write: what, where, and what is known of it."""

    state: WrittenTree
    final: Location
    described: CheckpointMetadata
    overwrite: bool
    options: Options
    items: tuple[Item, ...] = ()
    past: tuple[PastSave, ...] = ()

    @property
    def trees(self) -> tuple[WrittenTree, ...]:
        """What is written like the state, which is the first."""
        return (self.state, *(item.tree for item in self.items if item.tree is not None))

    @property
    def directories(self) -> list[str]:
        """The innermost directories of the checkpoint."""
        others = (item.name for item in self.items if item.tree is None)
        return [*(tree.directory for tree in self.trees), *others]

    @property
    def held_bytes(self) -> int:
        """The size of what this process has of the arrays, each region once."""
        return sum(tree.plan.held_bytes for tree in self.trees)

    @property
    def total_bytes(self) -> int | None:
        """The same, where it is known from the start."""
        return self.held_bytes if isinstance(self.state, Tree) else None

    @property
    def is_marked(self) -> bool:
        """Whether the checkpoint becomes visible by a marker."""
        return not location.is_replaceable(self.final, self.options)

    def writers(self, directory: Location) -> list[TreeWriter]:
        """What writes its trees into `directory`."""
        context, attempt = ts.Context(), self.described.attempt
        return [
            TreeWriter(
                tree, directory / tree.directory, attempt, self.options, self.is_marked, context
            )
            for tree in self.trees
        ]
