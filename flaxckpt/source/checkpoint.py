"""An open checkpoint, and what can be restored from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from flaxckpt import garbage_collector
from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from flaxckpt.metadata import sealed_json, step_metadata, tree_metadata
from flaxckpt.metadata.sealed_json import read_json_file
from flaxckpt.metadata.step_metadata import CheckpointMetadata
from flaxckpt.metadata.tree_metadata import SavedTree, decode_tree
from flaxckpt.options import Options
from flaxckpt.source.chunk_reads import ChunkedArray
from flaxckpt.source.leaf import Leaf
from flaxckpt.store import layout
from flaxckpt.store.locate import locate
from flaxckpt.store.ocdbt import ValueIndex, read_index
from flaxckpt.store.store import Location
from flaxckpt.tree.node import Node

if TYPE_CHECKING:
    from etils import epath

# One committed checkpoint, opened: everything that is known of it without reading an array.


# What is said of a directory of which nothing is known.
NOTHING_KNOWN = ". Check the path."


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One committed checkpoint.

    Attributes:
      path: its directory.
      described: its times, metrics and metadata.
      tree: the structure of its tree and a record of every leaf.
      directory: where in it the tree is: the state, or an item beside it.
      is_part: whether it may lack what other processes have of it.
    """

    path: Location
    described: CheckpointMetadata
    tree: SavedTree
    directory: str = layout.ITEM
    is_part: bool = False

    @property
    def item(self) -> Location:
        """The directory of the tree."""
        return self.path / self.directory

    @property
    def nodes(self) -> Sequence[Node | None]:
        """Its structure."""
        return self.tree.nodes

    @property
    def leaves(self) -> Sequence[Leaf]:
        """Its leaves, which are made anew each time."""
        guard, leaves = self.unchanged, []
        for name, spec, stored, value in self.tree.records:
            array = None if stored is None else ChunkedArray(name, stored, self)
            leaves.append(Leaf(name, spec, array, value, origin=name, guard=guard))
        return leaves

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The user's own metadata."""
        return self.described.metadata

    def unchanged(self) -> AbstractContextManager[None]:
        """Makes sure that what is read in the block is this checkpoint; see `unchanged`."""
        return unchanged(self.path, self.described)

    @functools.cached_property
    def index(self) -> ValueIndex:
        """Where the values lie, when they were written by the save that wrote the metadata.

        Raises:
          CorruptCheckpointError: when they were not, or the database is damaged.
        """
        index = read_index(self.item)
        value = index.get(layout.ATTEMPT_KEY)
        if value != self.tree.attempt.encode():
            save = value.decode(errors="replace") if isinstance(value, bytes) else value
            of = "missing" if value is None else f"of the save {save}"
            raise CorruptCheckpointError(
                f"the arrays at {self.item} are {of}, and its metadata of the save "
                f"{self.tree.attempt}. Restore another step."
            )
        if not self.path.store.can.sizes:  # where there are sizes, they are checked by them
            stored = sum(len(v) if isinstance(v, bytes) else v.length for v in index.values())
            tree_metadata.check_claims(self.item, self.tree.records, stored)
        return index


@garbage_collector.paused()
def open_checkpoint(
    path: epath.PathLike, options: Options = Options(), *, is_part: bool = False
) -> Checkpoint:
    """Opens the checkpoint at `path`.

    Args:
      path: its directory, or its URL.
      options: how object stores are reached.
      is_part: whether it may lack what other processes have of it.

    Raises:
      CheckpointNotFoundError: when there is none, or `path` is a level too high or too deep.
      CorruptCheckpointError: when its metadata are damaged.
      UnsupportedFormatError: when a newer flaxckpt wrote it.
    """
    directory = locate(path, options)
    try:
        described = step_metadata.read(directory)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"{error}{_advice(directory)}") from None
    with explained(directory, described):
        tree = _read_tree(directory, layout.ITEM, described, is_part)
        return Checkpoint(directory, described, tree, is_part=is_part)


@garbage_collector.paused()
def open_item(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """The tree of the item `name`, which has one, as if it were the state of the checkpoint.

    Raises:
      CorruptCheckpointError: when its metadata are damaged.
    """
    path, described = checkpoint.path, checkpoint.described
    inner = described.items[name].tree
    directory = f"{name}/{inner}" if inner else name
    with explained(path, described):
        tree = _read_tree(path, directory, described, checkpoint.is_part)
    return dataclasses.replace(checkpoint, tree=tree, directory=directory)


def read_tree(item: Location) -> SavedTree:
    """The tree in the directory `item`, as its metadata say; what they claim is not checked.

    Raises:
      FileNotFoundError: when there are none.
      CorruptCheckpointError: when they are damaged.
      UnsupportedFormatError: when a newer flaxckpt wrote them.
    """
    file = item / layout.TREE_METADATA
    data = sealed_json.unseal(read_json_file(file), str(file))
    return decode_tree(data.get("flaxckpt"), str(file))


def _read_tree(
    directory: Location, inner: str, described: CheckpointMetadata, is_part: bool
) -> SavedTree:
    """A tree of the checkpoint that `described` belongs to, with what it claims checked."""
    item = directory / inner
    file, tree = item / layout.TREE_METADATA, read_tree(item)
    if tree.attempt != described.attempt:
        raise CorruptCheckpointError(
            f"the files at {directory} are of two different saves ({described.attempt} and "
            f"{tree.attempt}). Restore another step."
        )
    tree_metadata.check_structure(tree.nodes, tree.records, str(file))
    if item.store.can.sizes and not is_part:
        tree_metadata.check_sizes(item, tree.records)
    return tree


@contextlib.contextmanager
def unchanged(path: Location, described: CheckpointMetadata) -> Iterator[None]:
    """Makes sure that what is read in the block is the checkpoint that `described` belongs to.

    Retention deletes steps, and `overwrite=True` replaces them, while others may read them. What
    was read of two checkpoints is refused.

    Raises:
      CheckpointNotFoundError: when the checkpoint was deleted or replaced.
      CorruptCheckpointError: when it is there, but a file of it is not.
    """
    with explained(path, described):
        yield
    _check_there(path, described, None)


@contextlib.contextmanager
def explained(path: Location, described: CheckpointMetadata) -> Iterator[None]:
    """As `unchanged`, for a block that itself refuses data of two checkpoints.

    If the checkpoint is gone, raises `CheckpointNotFoundError` instead of reporting damage.
    """
    try:
        yield
    except (CorruptCheckpointError, FileNotFoundError) as error:
        _check_there(path, described, error)
        if isinstance(error, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError(
            f"the checkpoint at {path} is incomplete: {error.filename} is missing. "
            "Restore another step."
        ) from None


def _check_there(path: Location, described: CheckpointMetadata, error: Exception | None) -> None:
    """Refuses a checkpoint that is not the one that `described` belongs to any more."""
    try:
        if step_metadata.read(path).attempt == described.attempt:
            return
    except CheckpointNotFoundError:
        pass
    raise CheckpointNotFoundError(
        f"the checkpoint at {path} was deleted or replaced while it was read. Restore another "
        "step; a step that is needed for long can be pinned."
    ) from error


def _advice(directory: Location) -> str:
    """What the user of a path without a checkpoint most likely meant."""
    if steps := _steps(directory):
        return (
            f": it is a run with the steps {steps[0]} to {steps[-1]}. Use {directory}/{steps[-1]} "
            f"for the newest, or flaxckpt.CheckpointManager({str(directory)!r})."
        )
    if not directory.store.can.directories:
        return ". Check the URL."
    if (found := directory.store.stat(directory)) is None:
        return ": there is no such directory. Check the path."
    if not found.is_directory:
        return ": it is a file. Give the directory that was saved to."
    if directory.name == layout.ITEM and (directory.parent / layout.CHECKPOINT_METADATA).exists():
        return f": it lies within a checkpoint. Use {directory.parent}."
    if (directory / layout.ITEM).exists():
        return ": it is half of one, whose save never ended. Restore another step."
    return NOTHING_KNOWN


def _steps(directory: Location) -> list[int]:
    """The steps that a run in `directory` would have."""
    names = directory.store.checkpoints(directory)
    return sorted(step for name in names if (step := layout.parse_step(name)) is not None)


# What a restore reads from: a checkpoint of flaxckpt, or of any format that has a reader.


class Source(Protocol):
    """An opened checkpoint, of which no array was read yet."""

    @property
    def path(self) -> Location:
        """Where it lies."""

    @property
    def nodes(self) -> Sequence[Node | None]:
        """Its structure: the nodes in preorder, `None` for a leaf."""

    @property
    def leaves(self) -> Sequence[Leaf]:
        """Its leaves, in the same order."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The user's own metadata."""

    def unchanged(self) -> AbstractContextManager[None]:
        """Makes sure that what is read in the block is what was opened."""
