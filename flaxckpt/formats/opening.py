"""Opening a checkpoint of any format, without jax if flaxckpt wrote it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from flaxckpt.formats import detect
from flaxckpt.options import Options
from flaxckpt.source.checkpoint import NOTHING_KNOWN, Source, open_checkpoint
from flaxckpt.source.leaf import Leaf, as_leaf
from flaxckpt.store.locate import locate
from flaxckpt.store.store import Location
from flaxckpt.tree.node import Node

if TYPE_CHECKING:
    from etils import epath

# An error that finds no checkpoint looks for some in at most so many members of a directory.
MAX_LOOKS = 20


def open_source(path: epath.PathLike, options: Options) -> Source:
    """Opens the checkpoint at `path`, of flaxckpt or of any format that has a reader.

    Raises:
      CheckpointNotFoundError: if there is no checkpoint at `path`.
      CorruptCheckpointError: if its metadata is damaged.
    """
    location = locate(path, options)
    try:
        return open_checkpoint(location, options)
    except CheckpointNotFoundError as error:
        return _open_foreign(location, error)


@dataclasses.dataclass(frozen=True)
class ForeignCheckpoint:
    """An open checkpoint of another format.

    Attributes:
      path: its file or directory.
      format: what its format is called.
      nodes: its structure.
      leaves: its leaves.
      metadata: empty, because each library's users put theirs elsewhere.
    """

    path: Location
    format: str
    nodes: Sequence[Node | None]
    leaves: Sequence[Leaf]
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def unchanged(self) -> AbstractContextManager[None]:
        """Calls what goes missing while it is read damage; no id tells whether it was replaced."""
        return _explained(self.path, self.format)


def _open_foreign(path: Location, error: CheckpointNotFoundError) -> ForeignCheckpoint:
    """Opens the checkpoint of another library at `path`; `error` says that it is not flaxckpt's.

    Raises:
      CheckpointNotFoundError: if no reader knows it either.
      CorruptCheckpointError: if it is damaged.
    """
    reader = detect.find_reader(path)
    if reader is None:
        raise CheckpointNotFoundError(_nothing(path, str(error))) from None
    from flaxckpt.tree.structure import flatten  # which needs flax

    guard = functools.partial(_explained, path, reader.NAME)
    with guard():
        flat = flatten(reader.read(path))
    leaves = []
    for name, value in zip(flat.names, flat.leaves, strict=True):
        leaf = as_leaf(value, name)
        leaves.append(Leaf(name, leaf.spec, leaf.array, leaf.value, origin=name, guard=guard))
    return ForeignCheckpoint(path, reader.NAME, flat.nodes, leaves)


@contextlib.contextmanager
def _explained(path: Location, format_name: str) -> Iterator[None]:
    """Turns a missing file into the error that says that the checkpoint is incomplete."""
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"the {format_name} checkpoint at {path} is incomplete: {error.filename} is missing. "
            "Restore another step."
        ) from None


def _nothing(path: Location, error: str) -> str:
    """The message if no reader knows what is at `path`, nor flaxckpt itself, which says `error`."""
    children = path.children()
    inside = [c for c in children[-MAX_LOOKS:] if detect.find_reader(path / c) is not None]
    if inside:
        names = ", ".join(inside)
        return f"{path} holds checkpoints of another library: {names}. Give the path of one."
    if not children or not error.endswith(NOTHING_KNOWN):
        return error  # there is nothing, or what is there is known
    lines = "".join(f"\n  {reader.NAME}: {reader.LOOKS_FOR}" for reader in detect.readers())
    return f"{error} No other format was found either; looked for was{lines}"
