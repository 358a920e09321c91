"""Items: what is saved beside the state."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import crc32c

from flaxckpt.errors import CorruptCheckpointError, ItemError, StoreError
from flaxckpt.metadata.sealed_json import SavedFile
from flaxckpt.metadata.step_metadata import ItemRecord
from flaxckpt.options import Options
from flaxckpt.restoring.restore import restore_tree
from flaxckpt.restoring.restore_plan import restore_arguments
from flaxckpt.source.checkpoint import Checkpoint, open_item
from flaxckpt.store import layout
from flaxckpt.store.store import Location

# What a handler makes of an item.


_HANDLERS = "orbax.checkpoint._src.handlers"
JSON = f"{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler"
STANDARD = f"{_HANDLERS}.standard_checkpoint_handler.StandardCheckpointHandler"
JAX_KEY = f"{_HANDLERS}.random_key_checkpoint_handler.JaxRandomKeyCheckpointHandler"
NUMPY_KEY = f"{_HANDLERS}.random_key_checkpoint_handler.NumpyRandomKeyCheckpointHandler"


@dataclasses.dataclass(frozen=True)
class ProcessRank:
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


# The names that items may have.


# These have another meaning in a checkpoint, to us or to Orbax; its `Composite` cannot take `self`.
RESERVED = frozenset(
    {layout.ITEM, layout.PINNED, "AUTO", "default", "descriptor", "metrics", "pytree", "self"}
)
MAX_LENGTH = 64


def check_names(names: Iterable[object]) -> None:
    """Refuses names that items cannot have.

    Raises:
      ItemError: for the first one.
    """
    for name in names:
        if not isinstance(name, str) or not layout.may_be_item(name) or len(name) > MAX_LENGTH:
            raise ItemError(
                f"{name!r} cannot be an item name: it needs a letter first, and at most "
                f"{MAX_LENGTH} ASCII letters, digits and underscores. Rename the item."
            )
        if name in RESERVED:
            raise ItemError(f"{name} is reserved and cannot be an item name. Rename the item.")


# An item of an open checkpoint, for the handler that reads it.


@dataclasses.dataclass(frozen=True)
class SavedItem:
    """One item of a checkpoint.

    Attributes:
      name: its name.
      record: what the checkpoint says of it.
      checkpoint: the checkpoint.
      rank: the process that reads.
      options: how to read.
    """

    name: str
    record: ItemRecord
    checkpoint: Checkpoint
    rank: ProcessRank
    options: Options

    def file(self, name: str) -> bytes:
        """The bytes of one of its files.

        Raises:
          CorruptCheckpointError: when they are not what was written.
        """
        if (file := self.record.files.get(name)) is None:
            raise self.damage(f"its file {name} is not listed")
        data, problem = checked(self.checkpoint.path / self.name / name, file)
        if problem:
            raise self.damage(f"its file {name} {problem}")
        return data

    def files(self, directory: str) -> dict[str, bytes]:
        """Its files in one of its directories, by their names there."""
        start = f"{directory}/"
        names = [name for name in self.record.files if name.startswith(start)]
        return {name[len(start) :]: self.file(name) for name in names}

    def own(self, *, is_shared: bool = False) -> dict[str, bytes]:
        """What this process wrote for itself, by the ends of the names.

        Args:
          is_shared: whether another process's will do, when all wrote the same.

        Raises:
          ItemError: when another number of processes wrote it.
        """
        index, files = self.rank.index, self._own_files()
        count = max(n for _, n in files)
        if count != self.rank.count:
            if not is_shared or not self._is_same(files, count):
                raise ItemError(self._other_count(count))
            index = 0
        if (index, count) not in files:
            raise self.damage(f"it has no file of process {index} of {count}")
        return {suffix: self.file(name) for suffix, name in files[index, count].items()}

    def _own_files(self) -> Mapping[tuple[int, int], dict[str, str]]:
        """The names of the files of each process, by the ends of the names."""
        files: dict[tuple[int, int], dict[str, str]] = {}
        for name in self.record.files:
            if (found := layout.parse_own_file(name)) is not None:
                index, count, suffix = found
                files.setdefault((index, count), {})[suffix] = name
        if not files:
            raise self.damage("it has no file of any process")
        return files

    def _is_same(self, files: Mapping[tuple[int, int], dict[str, str]], count: int) -> bool:
        """Whether all of `count` processes wrote the same."""
        found = [
            {suffix: self.record.files[name] for suffix, name in names.items()}
            for names in files.values()
        ]
        return len(found) == count and all(one == found[0] for one in found)

    def _other_count(self, count: int) -> str:
        """Says that another number of processes wrote it."""
        return (
            f"the item {self.name} at {self.checkpoint.path} holds per-process state of "
            f"{count} process{'es' * (count != 1)}, but this job has {self.rank.count}. Restore "
            f"with {count}, or omit {self.name!r} from items= to start it fresh."
        )

    def tree(self, target: Any = None) -> Any:
        """Its tree, like `target`.

        Raises:
          StructureMismatchError: when it does not fit the target.
          CorruptCheckpointError: when it is damaged.
        """
        source = open_item(self.checkpoint, self.name)
        return restore_tree(source, target, restore_arguments(), self.options)[0]

    def detail(self, name: str) -> str:
        """What the record says under `name`, which is a string."""
        return str(self.record.details.get(name))

    def damage(self, what: str) -> CorruptCheckpointError:
        """The error that says what is wrong with it."""
        return CorruptCheckpointError(
            f"the item {self.name} at {self.checkpoint.path} is damaged: {what}. "
            "Restore another step."
        )


def checked(path: Location, file: SavedFile) -> tuple[bytes, str]:
    """The bytes of a file of an item, and what is wrong with them, if anything is."""
    try:
        data = path.store.read_own(path, file.size)
    except StoreError:
        raise
    except FileNotFoundError:
        return b"", "is missing"
    except OSError as error:
        return b"", f"cannot be read: {error}"
    if len(data) != file.size:
        return b"", f"has {len(data)} bytes instead of {file.size}"
    return data, "" if crc32c.crc32c(data) == file.crc32c else "does not match its checksum"
