"""What a handler makes of an item."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from flaxckpt.storage import layout

_HANDLERS = "orbax.checkpoint._src.handlers"
JSON = f"{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler"
STANDARD = f"{_HANDLERS}.standard_checkpoint_handler.StandardCheckpointHandler"
JAX_KEY = f"{_HANDLERS}.random_key_checkpoint_handler.JaxRandomKeyCheckpointHandler"
NUMPY_KEY = f"{_HANDLERS}.random_key_checkpoint_handler.NumpyRandomKeyCheckpointHandler"


@dataclasses.dataclass(frozen=True)
class Place:
    """Which process of how many."""

    index: int
    count: int


class ItemTree(NamedTuple):
    """A pytree of an item.

    Attributes:
      directory: where it lies within the item; empty for the item's own directory.
      value: the tree.
      has_plain_keys: whether Orbax is to see the words of PRNG keys, and no keys.
    """

    directory: str
    value: Any
    has_plain_keys: bool = False


@dataclasses.dataclass(frozen=True)
class Encoded:
    """An item as it is written; nothing that the caller does changes it, but for its tree.

    Attributes:
      files: what process 0 writes; it must be the same on all processes.
      own: what each process writes for itself, by the ends of the names (see `layout.own_file`).
      details: what else is needed to read it, as JSON.
      tree: what is written like the state.
      orbax: the name of the handler of Orbax that reads it.
    """

    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    own: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tree: ItemTree | None = None
    orbax: str = JSON


def about(kind: str) -> dict[str, bytes]:
    """The file that stands, for Orbax, for an item that it has no reader of.

    An item without a reader would keep it from restoring the others, unless it is told which.
    """
    text = {"flaxckpt": {"kind": kind, "read_by": "flaxckpt.restore_items"}}
    return {layout.JSON_FILE: json.dumps(text).encode()}
