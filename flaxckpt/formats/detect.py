"""Which format a path has."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from flaxckpt.formats import (
    big_vision,
    clu,
    flax_msgpack,
    levanter,
    orbax,
    reading,
    safetensors,
    t5x,
)
from flaxckpt.source.checkpoint import NOTHING_KNOWN
from flaxckpt.source.leaf import Leaf, as_leaf
from flaxckpt.store.store import Location
from flaxckpt.tree.node import Node
from flaxckpt.tree.structure import flatten

# What every reader of another library's format has, and finding the one for a path.


class Reader(Protocol):
    """A module that reads one format."""

    # What the format is called, and what `detect` looks for; both for errors.
    NAME: str
    LOOKS_FOR: str

    def detect(self, path: Location) -> bool:
        """Whether there is a checkpoint of this format at `path`, by names and a few bytes."""

    def read(self, path: Location) -> Any:
        """The tree: containers over `Leaf`s, numpy arrays, numbers and strings.

        Raises:
          CorruptCheckpointError: when it is damaged or not what the format says.
        """


# In this order: what is more special comes first.
READERS: tuple[Reader, ...] = (t5x, orbax, levanter, big_vision, safetensors, clu, flax_msgpack)


def find_reader(path: Location) -> Reader | None:
    """The reader of what is at `path`; `None` when none knows it."""
    return next((reader for reader in READERS if reader.detect(path)), None)


# Checkpoints that another library wrote, as sources of a restore.


# In so many members of a directory it is looked for checkpoints, for an error.
MAX_LOOKS = 20


@dataclasses.dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint of another format, opened.

    Attributes:
      path: its file or directory.
      format: what its format is called.
      nodes: its structure.
      leaves: its leaves.
      metadata: none: it is where each library's own users put it.
    """

    path: Location
    format: str
    nodes: Sequence[Node | None]
    leaves: Sequence[Leaf]
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Calls what goes missing while it is read damage; no id tells whether it was replaced."""
        with _explained(self.path, self.format):
            yield


def open_foreign(path: Location, error: CheckpointNotFoundError) -> ForeignCheckpoint:
    """Opens what another library wrote at `path`; flaxckpt itself found none, hence `error`.

    Raises:
      CheckpointNotFoundError: when no reader knows it either.
      CorruptCheckpointError: when it is damaged.
    """
    reader = find_reader(path)
    if reader is None:
        raise CheckpointNotFoundError(_nothing(path, str(error))) from None
    with _explained(path, reader.NAME):
        flat = flatten(reader.read(path))
        leaves = [as_leaf(leaf, name) for name, leaf in zip(flat.names, flat.leaves, strict=True)]
    return ForeignCheckpoint(path, reader.NAME, flat.nodes, leaves)


@contextlib.contextmanager
def _explained(path: Location, format_name: str) -> Iterator[None]:
    """Turns what a damaged file leads to into the error that says so."""
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"the {format_name} checkpoint at {path} is incomplete: {error.filename} is missing. "
            "Restore another step."
        ) from None


def _nothing(path: Location, error: str) -> str:
    """What is said when no reader knows what is at `path`, nor flaxckpt itself, hence `error`."""
    children = reading.children(path)
    inside = [child for child in children[-MAX_LOOKS:] if find_reader(path / child) is not None]
    if inside:
        names = ", ".join(inside)
        return f"{path} holds checkpoints of another library: {names}. Give the path of one."
    if not children or not error.endswith(NOTHING_KNOWN):
        return error  # there is nothing, or what is there is known
    lines = "".join(f"\n  {reader.NAME}: {reader.LOOKS_FOR}" for reader in READERS)
    return f"{error} No other format was found either; looked for was{lines}"
