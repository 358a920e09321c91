"""The protocol of item handlers, how one is chosen, and how a user adds one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from flaxckpt.errors import CorruptCheckpointError, FlaxckptError, ItemError
from flaxckpt.items.encoded import Encoded, Place
from flaxckpt.items.json_item import JsonItems
from flaxckpt.items.numpy_random import Generators, NumpyKeys, RandomStates
from flaxckpt.items.proto import Protos
from flaxckpt.items.registered import RegisteredItems
from flaxckpt.items.saved import SavedItem
from flaxckpt.items.stateful import StatefulItems
from flaxckpt.items.tree_item import JaxKeys, TreeItems

# Gives the value of an item, and puts it into the target, if it was given one.
Finish = Callable[[], Any]


class ItemHandler(Protocol):
    """Turns items of some kind into files or a tree, and back."""

    def knows(self, value: Any, place: Place) -> bool:
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
    "proto": Protos(),
    "generator": Generators(),
    "numpy_key": NumpyKeys(),
    "random_state": RandomStates(),
    "jax_key": JaxKeys(),
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


class Chosen(NamedTuple):
    """An item, encoded by the handler of its kind."""

    kind: str
    encoded: Encoded


def encode(name: str, value: Any, place: Place) -> Chosen:
    """What is written of the item `name`.

    Raises:
      ItemError: when no checkpoint can hold it, or its handler failed.
    """
    try:
        handlers = (*_REGISTERED.items(), *_BUILTIN.items())
        kind, handler = next(pair for pair in handlers if pair[1].knows(value, place))
        return Chosen(kind, handler.encode(value))
    except FlaxckptError as error:
        raise ItemError(f"the item {name}: {error}") from None
    except Exception as error:
        raise ItemError(
            f"the item {name} cannot be saved: {type(error).__name__}: {error}. Correct that, or "
            "leave the item out."
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
            f"the item {name} cannot be restored: {type(error).__name__}: {error}. Correct that, "
            "or leave the item out of items=."
        ) from error
