"""JSON items."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from flaxckpt.errors import ItemError
from flaxckpt.items.item import Encoded, ProcessRank, SavedItem
from flaxckpt.store import layout

# JSON that gives back exactly what was written.


MAX_DEPTH = 500
_PLAIN = (str, int, float, bool, type(None))


def is_plain(value: Any) -> bool:
    """Whether `value` is what JSON has: dicts with str keys, lists, str, numbers, bool, None."""
    return next((False for _, inner in walk(value) if not _is_json_type(inner)), True)


def _is_json_type(value: Any) -> bool:
    """`is_plain` without what is inside; subclasses would come back as something else."""
    if type(value) is dict:
        return all(type(key) is str for key in value)
    return type(value) is list or type(value) in _PLAIN


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """`value` and all that is inside of it, each with the way to it.

    Raises:
      ValueError: when it goes too deep, such as into itself.
    """
    waiting = [("", 0, value)]
    while waiting:
        path, depth, found = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        yield path, found
        pairs: Any = found.items() if type(found) is dict else ()
        pairs = enumerate(found) if type(found) is list else pairs
        waiting += [(f"{path}[{key!r}]", depth + 1, inner) for key, inner in pairs]


def dumps(value: Any) -> bytes:
    """`value` as JSON.

    Raises:
      ValueError: when JSON does not give it back as it is; it says where and why.
    """
    for path, inner in walk(value):
        if not _is_json_type(inner):
            raise ValueError(f"{path or 'it'} is a {type(inner).__name__}, {inner!r:.80}")
        if isinstance(inner, float) and not math.isfinite(inner):
            raise ValueError(f"{path or 'it'} is {inner}, which JSON cannot represent")
    text = json.dumps(value)
    if json.loads(text) == value:
        return text.encode()
    raise ValueError("it has strings that are no valid unicode")


# Configurations and other plain data, as JSON.


class JsonItems:
    """Dicts with str keys, lists, strings, numbers, bools and None; nothing else inside."""

    def knows(self, value: Any, rank: ProcessRank) -> bool:
        """See `ItemHandler`."""
        del rank
        return is_plain(value)

    def encode(self, value: Any) -> Encoded:
        """One file, which Orbax reads."""
        try:
            return Encoded({layout.JSON_FILE: dumps(value)})
        except ValueError as error:
            raise ItemError(
                f"it does not survive a JSON round trip: {error}. Use plain dicts, lists, "
                "strings and finite numbers."
            ) from None

    def read(self, saved: SavedItem, target: Any) -> Callable[[], Any]:
        """A new value; the target is not looked at."""
        del target
        value = json.loads(saved.file(layout.JSON_FILE))
        return lambda: value
