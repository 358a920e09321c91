"""The kinds of items, and restoring them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import jax

from flaxckpt.arguments import checked
from flaxckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FlaxckptError,
    ItemError,
)
from flaxckpt.items.item import Encoded, ProcessRank, SavedItem, about
from flaxckpt.items.json_item import JsonItems
from flaxckpt.items.numpy_random import GeneratorItems, NumpyKeyItems, RandomStateItems
from flaxckpt.items.proto import ProtoItems
from flaxckpt.items.stateful import StatefulItems
from flaxckpt.items.tree_item import JaxKeyItems, TreeItems
from flaxckpt.metadata.step_metadata import is_file_name
from flaxckpt.options import Options
from flaxckpt.source.checkpoint import Checkpoint, open_checkpoint
from flaxckpt.store import layout

if TYPE_CHECKING:
    from etils import epath

# Items of a type that the user has registered a handler for.


@dataclasses.dataclass(frozen=True)
class RegisteredItems:
    """The handler of one type of the user's."""

    kind: str
    cls: type
    to_files: Callable[[Any], Mapping[str, bytes]]
    from_files: Callable[[Mapping[str, bytes], Any], Any]

    def knows(self, value: Any, rank: ProcessRank) -> bool:
        """See `ItemHandler`."""
        del rank
        return isinstance(value, self.cls)

    def encode(self, value: Any) -> Encoded:
        """The files that the user's function makes."""
        files = dict(self.to_files(value))
        for name, data in files.items():
            if not is_file_name(name) or not isinstance(data, bytes):
                raise ItemError(
                    f"its handler {self.kind!r} gave a file {name!r:.80} of type "
                    f"{type(data).__name__}. Let it give bytes, by names that are relative paths."
                )
        placed = {f"{layout.USER_FILES}/{name}": data for name, data in files.items()}
        return Encoded(about(self.kind) | placed)

    def read(self, saved: SavedItem, target: Any) -> Callable[[], Any]:
        """The user's function makes the value, when everything else is read."""
        return functools.partial(self.from_files, saved.files(layout.USER_FILES), target)


# The protocol of item handlers, how one is chosen, and how a user adds one.


# Gives the value of an item, and puts it into the target, if it was given one.
Finish = Callable[[], Any]


class ItemHandler(Protocol):
    """Turns items of some kind into files or a tree, and back."""

    def knows(self, value: Any, rank: ProcessRank) -> bool:
        """Whether it is the one for `value`, on a process of a job."""

    def encode(self, value: Any) -> Encoded:
        """What is written of a value that it knows.

        Raises:
          ItemError: when that cannot be; the caller says which item it is.
        """

    def read(self, saved: SavedItem, target: Any) -> Finish:
        """Reads and checks all of an item, and changes nothing before it is finished.

        Raises:
          ItemError: when it does not fit the target.
          CorruptCheckpointError: when it is damaged.
        """


# In the order in which they are asked.
_BUILTIN: dict[str, ItemHandler] = {
    "proto": ProtoItems(),
    "generator": GeneratorItems(),
    "numpy_key": NumpyKeyItems(),
    "random_state": RandomStateItems(),
    "jax_key": JaxKeyItems(),
    "stateful": StatefulItems(),
    "json": JsonItems(),
    "tree": TreeItems(),
}
_REGISTERED: dict[str, ItemHandler] = {}
# What comes of bytes that no handler wrote.
_NO_VALUE = (
    TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError
)  # fmt: skip


def register_item_handler(
    kind: str,
    cls: type,
    encode: Callable[[Any], Mapping[str, bytes]],
    decode: Callable[[Mapping[str, bytes], Any], Any],
) -> None:
    """Lets checkpoints hold items of the type `cls`, before any other way to hold them.

    In a job of several processes, the item must be the same on all of them.

    Args:
      kind: the name of the type in checkpoints; it must never change.
      cls: the type; subclasses are included.
      encode: makes files of an item: their names and their bytes.
      decode: makes the item of these again; it is given the target of the restore, too, and may
        change that and return it.

    Raises:
      ValueError: when `kind` is one of flaxckpt's own.

    Example:
      >>> import pathlib
      >>> flaxckpt.register_item_handler(
      ...     "path",
      ...     pathlib.PurePath,
      ...     lambda path: {"path.txt": str(path).encode()},
      ...     lambda files, target: pathlib.Path(files["path.txt"].decode()),
      ... )
    """
    if kind in _BUILTIN:
        raise ValueError(f"{kind!r} is a kind of flaxckpt's own. Choose another name.")
    _REGISTERED[kind] = RegisteredItems(kind, cls, encode, decode)


class EncodedItem(NamedTuple):
    """An item, encoded by the handler of its kind."""

    kind: str
    encoded: Encoded


def encode(name: str, value: Any, rank: ProcessRank) -> EncodedItem:
    """What is written of the item `name`.

    Raises:
      ItemError: when no checkpoint can hold it, or its handler failed.
    """
    try:
        handlers = (*_REGISTERED.items(), *_BUILTIN.items())
        kind, handler = next(pair for pair in handlers if pair[1].knows(value, rank))
        return EncodedItem(kind, handler.encode(value))
    except FlaxckptError as error:
        raise ItemError(f"the item {name}: {error}") from None
    except Exception as error:
        raise ItemError(
            f"the item {name} cannot be saved: {type(error).__name__}: {error}. Fix the "
            "cause, or omit the item."
        ) from error


def read(saved: SavedItem, target: Any) -> Finish:
    """Reads and checks an item; what this returns puts it into `target`.

    Raises:
      ItemError: when it does not fit the target, or no handler here knows its kind.
      CorruptCheckpointError: when it is damaged.
    """
    name, kind = saved.name, saved.record.kind
    handler = _REGISTERED.get(kind) or _BUILTIN.get(kind)
    if handler is None:
        raise ItemError(
            f"the item {name} was saved by a handler of kind {kind!r}, which is not registered "
            f"here. Call flaxckpt.register_item_handler({kind!r}, ...) before restoring."
        )
    try:
        return functools.partial(_finished, name, handler.read(saved, target))
    except FlaxckptError:
        raise
    except _NO_VALUE as error:
        raise CorruptCheckpointError(
            f"the item {name} is damaged: what is stored is no {kind}: {error}. "
            "Restore another step."
        ) from error


def _finished(name: str, finish: Finish) -> Any:
    """The value of an item, or the error of its handler."""
    try:
        return finish()
    except FlaxckptError:
        raise
    except Exception as error:
        raise ItemError(
            f"the item {name} cannot be restored: {type(error).__name__}: {error}. Fix the "
            "cause, or omit the item from items=."
        ) from error


# Restoring the items of a checkpoint.


T = TypeVar("T")


@checked(options=Options)
def restore_items(
    path: epath.PathLike, targets: Mapping[str, Any], options: Options = Options()
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


def _place() -> ProcessRank:
    """Of this process; a process that is alone asks for no device."""
    if not jax.distributed.is_initialized():
        return ProcessRank(0, 1)
    return ProcessRank(jax.process_index(), jax.process_count())


def read_items(
    checkpoint: Checkpoint, targets: Mapping[str, Any], rank: ProcessRank, options: Options
) -> dict[str, Finish]:
    """Reads and checks items, and sets nothing before each is finished; see `restore_items`.

    The `rank` is that of this process in its job.
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
            name: read(SavedItem(name, saved[name], checkpoint, rank, options), target)
            for name, target in sorted(targets.items())  # the same order on all processes
        }


def finish(read: Mapping[str, Finish]) -> dict[str, Any]:
    """The values of items that were read, put where they belong."""
    return {name: settle() for name, settle in read.items()}
