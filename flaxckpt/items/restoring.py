"""Restoring the items of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from flaxckpt.checkpoint import Checkpoint, open_checkpoint
from flaxckpt.errors import CheckpointNotFoundError
from flaxckpt.items import handler
from flaxckpt.items.encoded import Place
from flaxckpt.items.handler import Finish
from flaxckpt.items.saved import SavedItem
from flaxckpt.options import Options
from flaxckpt.storage.location import PathLike

T = TypeVar("T")


def restore_items(
    path: PathLike, targets: Mapping[str, Any], options: Options = Options()
) -> dict[str, Any]:
    """Restores items of the checkpoint at `path`: things that were saved beside the tree.

    Args:
      path: the directory of one checkpoint, or its URL; a step of a run is one too.
      targets: which items, and what each is restored into. An iterator, or another object with a
        state, is set in place; so are numpy generators and messages. For a message the class will
        do. A tree comes back like its target, as from `restore`. With `None`, plain data, trees,
        generators and keys come back as they were saved, and of an object its bare state.
      options: how to read.

    Returns:
      The items by name; what was set in place is there, too.

    Raises:
      CheckpointNotFoundError: when there is no checkpoint at `path`, or it lacks an item.
      ItemError: when an item does not fit its target, or was saved by another number of processes
        of which each has its own.
      StructureMismatchError: when a tree does not fit its target.
      CorruptCheckpointError: when bytes are missing or do not match their checksum. No object was
        set then.

    Example:
      >>> flaxckpt.save(tmp_path / "exported", {"step": 7}, items={"config": {"layers": 12}})
      >>> flaxckpt.restore_items(tmp_path / "exported", {"config": None})
      {'config': {'layers': 12}}
    """
    return finish(read_items(open_checkpoint(path, options), targets, _place(), options))


def _place() -> Place:
    """Of this process; a process that is alone asks for no device."""
    if not jax.distributed.is_initialized():
        return Place(0, 1)
    return Place(jax.process_index(), jax.process_count())


def read_items(
    checkpoint: Checkpoint, targets: Mapping[str, Any], place: Place, options: Options
) -> dict[str, Finish]:
    """Reads and checks items, and sets nothing before each is finished; see `restore_items`.

    The `place` is that of this process in its job.
    """
    saved = checkpoint.described.items
    if not targets:
        return {}
    for name in targets:
        if name not in saved:
            there = f"It has {', '.join(saved)}." if saved else "It has none."
            raise CheckpointNotFoundError(
                f"the checkpoint at {checkpoint.path} has no item {name}. {there} Leave {name} "
                "out, or restore a step that has it."
            )
    with checkpoint.unchanged():
        return {
            name: handler.read(SavedItem(name, saved[name], checkpoint, place, options), target)
            for name, target in sorted(targets.items())  # the same order on all processes
        }


def finish(read: Mapping[str, Finish]) -> dict[str, Any]:
    """The values of items that were read, put where they belong."""
    return {name: settle() for name, settle in read.items()}


@dataclasses.dataclass
class WantedItems:
    """The items that a restore is asked for, which go with the tree: both, or neither.

    Attributes:
      targets: as for `restore_items`.
      place: of this process.
      options: how to read.
    """

    targets: Mapping[str, Any]
    place: Place
    options: Options
    _read: dict[str, Finish] = dataclasses.field(default_factory=dict)

    def with_tree(self, restore: Callable[[Checkpoint], T]) -> Callable[[Checkpoint], T]:
        """As `restore`, and reads the items of the same checkpoint; a later one's replace them."""

        def both(checkpoint: Checkpoint) -> T:
            restored = restore(checkpoint)
            self._read = read_items(checkpoint, self.targets, self.place, self.options)
            return restored

        return both

    def finish(self) -> dict[str, Any]:
        """The items of the checkpoint that was restored last, put where they belong."""
        return finish(self._read)
