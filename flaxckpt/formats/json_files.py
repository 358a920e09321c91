"""JSON files of other libraries: data that is not trusted, and errors that say what is wrong."""

from __future__ import annotations

import json
from typing import Any

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats import files
from flaxckpt.metadata.limits import MAX_DEPTH
from flaxckpt.storage.location import Location


class Wrong(ValueError):
    """What is wrong with a file, without its name."""


def read_json(path: Location) -> Any:
    """The value in a JSON file; NaN and infinities are allowed, as Python writes them.

    Raises:
      FileNotFoundError: when there is none.
      CorruptCheckpointError: when it is not JSON.
    """
    try:
        return parse(files.read(path))
    except Wrong as error:
        raise damaged(path, error) from None


def parse(text: str | bytes) -> Any:
    """The value in `text`.

    Raises:
      Wrong: when it is not JSON, or too deep.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Wrong(f"it is not JSON: {error}") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return value
    raise Wrong(f"it is more than {MAX_DEPTH} levels deep")


def _children(node: Any) -> list[Any]:
    """What is in a container."""
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def damaged(path: Location, why: object) -> CorruptCheckpointError:
    """The error that says what is wrong with the file at `path`."""
    return CorruptCheckpointError(f"{path} is damaged: {why}. Restore another step.")


def member(data: Any, name: str, kind: type, default: Any = None) -> Any:
    """The member `name` of the object `data`; `default`, if that is given, when there is none.

    Raises:
      Wrong: when it is missing or of another type than `kind`.
    """
    if not isinstance(data, dict):
        raise Wrong(f"there is a {type(data).__name__} where an object with {name!r} belongs")
    value = data.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not kind:
        found = "missing" if name not in data else f"a {type(value).__name__}"
        raise Wrong(f"{name!r} is {found}, and must be a {kind.__name__}")
    return value
