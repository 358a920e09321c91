"""Which format a path has. The readers are imported once there is something to look at."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, Protocol, cast

from flaxckpt.store.store import Location

# The modules of this package that read a format each, the more special ones first.
FORMATS = ("t5x", "orbax", "levanter", "big_vision", "safetensors", "clu", "flax_msgpack")


class Reader(Protocol):
    """A module that reads one format."""

    # What the format is called, and what `detect` looks for; both for errors.
    NAME: str
    LOOKS_FOR: str

    def detect(self, path: Location) -> bool:
        """Whether there is a checkpoint of this format at `path`, by names and a few bytes."""

    def read(self, path: Location) -> Any:
        """The tree: containers over `Leaf`s without a name, numpy arrays, numbers and strings.

        Raises:
          CorruptCheckpointError: if it is damaged, or not what the format says.
        """


def readers() -> Iterator[Reader]:
    """The readers of all formats."""
    for name in FORMATS:
        yield cast(Reader, importlib.import_module(f"flaxckpt.formats.{name}"))


def find_reader(path: Location) -> Reader | None:
    """The reader of the checkpoint at `path`; `None` if no reader knows it."""
    named = path.parent / f"{path.name}-LAST"  # of big_vision: the newest of several
    if not (path.is_file() or path.children() or named.is_file()):
        return None
    return next((reader for reader in readers() if reader.detect(path)), None)
