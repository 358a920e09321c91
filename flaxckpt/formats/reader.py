"""What every reader of another library's format has, and finding the one for a path."""

from __future__ import annotations

from typing import Any, Protocol

from flaxckpt.formats import big_vision, clu, flax_msgpack, levanter, orbax, safetensors, t5x
from flaxckpt.storage.location import Location


class Reader(Protocol):
    """A module that reads one format."""

    # What the format is called, and what `detect` looks for; both for errors.
    NAME: str
    LOOKS_FOR: str

    def detect(self, path: Location) -> bool:
        """Whether there is a checkpoint of this format at `path`, by names and a few bytes."""

    def read(self, path: Location) -> Any:
        """The tree: containers over `LazyLeaf`s, numpy arrays, numbers and strings.

        Raises:
          CorruptCheckpointError: when it is damaged or not what the format says.
        """


# In this order: what is more special comes first.
READERS: tuple[Reader, ...] = (t5x, orbax, levanter, big_vision, safetensors, clu, flax_msgpack)


def find_reader(path: Location) -> Reader | None:
    """The reader of what is at `path`; `None` when none knows it."""
    return next((reader for reader in READERS if reader.detect(path)), None)
