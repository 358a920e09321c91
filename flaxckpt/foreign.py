"""Checkpoints that another library wrote, as sources of a restore."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flaxckpt.checkpoint import Checkpoint, open_checkpoint
from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from flaxckpt.formats import files
from flaxckpt.formats.reader import READERS, Reader, find_reader
from flaxckpt.leaves import handler
from flaxckpt.leaves.lazy import InMemory, LazyArray, LazyLeaf
from flaxckpt.leaves.record import LeafSpec
from flaxckpt.options import Options
from flaxckpt.source import SavedLeaf
from flaxckpt.storage.location import Location, PathLike, locate
from flaxckpt.tree.containers import Node
from flaxckpt.tree.structure import flatten


@dataclasses.dataclass(frozen=True)
class ForeignLeaf:
    """A leaf of a checkpoint of another format; a `SavedLeaf`."""

    name: str
    spec: LeafSpec
    array: LazyArray | None = None
    value: Any = None


@dataclasses.dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint of another format, opened.

    Attributes:
      path: its file or directory.
      format: what its format is called.
      nodes: its structure.
      leaves: its leaves.
    """

    path: Location
    format: str
    nodes: Sequence[Node | None]
    leaves: Sequence[SavedLeaf]

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Calls what goes missing while it is read damage; no id tells whether it was replaced."""
        with _explained(self.path, self.format):
            yield


def open_source(path: PathLike, options: Options) -> Checkpoint | ForeignCheckpoint:
    """Opens what is at `path`, whoever wrote it.

    Raises:
      CheckpointNotFoundError: when there is no checkpoint of any format that has a reader.
      CorruptCheckpointError: when it is damaged.
    """
    location = locate(path, options)
    try:
        return open_checkpoint(location, options)
    except CheckpointNotFoundError as error:
        reader = find_reader(location)
        if reader is None:
            raise CheckpointNotFoundError(f"{error}{_looked_for(location)}") from None
    return _open(location, reader)


def _open(path: Location, reader: Reader) -> ForeignCheckpoint:
    """What `reader` finds at `path`."""
    with _explained(path, reader.NAME):
        flat = flatten(reader.read(path))
        leaves = [_leaf(*pair) for pair in zip(flat.names, flat.leaves, strict=True)]
    return ForeignCheckpoint(path, reader.NAME, flat.nodes, leaves)


def _leaf(name: str, leaf: Any) -> ForeignLeaf:
    """The leaf `name` of a reader's tree."""
    if isinstance(leaf, LazyLeaf):
        return ForeignLeaf(name, leaf.spec, leaf.array)
    spec, stored = handler.encode(leaf, name)
    if isinstance(stored, np.ndarray):
        return ForeignLeaf(name, spec, InMemory(stored))
    return ForeignLeaf(name, spec, value=stored)


@contextlib.contextmanager
def _explained(path: Location, format_name: str) -> Iterator[None]:
    """Turns what a damaged file leads to into the error that says so."""
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"the {format_name} checkpoint at {path} is incomplete: {error.filename} is missing."
        ) from None


def _looked_for(path: Location) -> str:
    """What the readers look for, and where in `path` one of them finds something."""
    inside = [child for child in files.children(path) if find_reader(path / child) is not None]
    if inside:
        return f" It holds checkpoints of other formats: {', '.join(inside)}. Give one of them."
    lines = "".join(f"\n  {reader.NAME}: {reader.LOOKS_FOR}" for reader in READERS)
    return f" No other format was found either; looked for was{lines}"
