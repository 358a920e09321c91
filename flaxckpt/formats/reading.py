"""Reading files of other libraries."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.metadata.sealed_json import MAX_DEPTH
from flaxckpt.sharding.chunks import Region, Shape
from flaxckpt.store.store import Location

# Deeper than any state: a tree that is built by recursion must not end in a RecursionError.
MAX_TREE_DEPTH = 128

# JSON files of other libraries: data that is not trusted, and errors that say what is wrong.


class Wrong(ValueError):
    """What is wrong with a file, without its name."""


def read_json(path: Location) -> Any:
    """The value in a JSON file; NaN and infinities are allowed, as Python writes them.

    Raises:
      FileNotFoundError: when there is none.
      CorruptCheckpointError: when it is not JSON.
    """
    try:
        return parse(path.read())
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
    check_depth(value, _children)
    return value


def check_depth(tree: Any, children: Callable[[Any], Iterable[Any]]) -> None:
    """Refuses a tree that is too deep, level by level; `children` are those of a node.

    Raises:
      Wrong: if it is.
    """
    level = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in children(node)]
    if level:
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


# Where parts of an array lie that is one piece of a file, in C order. Pure arithmetic.


def leading_rows(shape: Shape, itemsize: int, limit: int) -> Shape:
    """The part of an array that is one piece of the file and has at most `limit` bytes.

    It has one element at the least, and in every axis.

    Example:
      >>> leading_rows((10, 1024, 1024), 4, 1 << 20)
      (1, 256, 1024)
    """
    rows = [1] * len(shape)
    size = itemsize
    for axis in reversed(range(len(shape))):
        rows[axis] = max(1, min(shape[axis], limit // size))
        if rows[axis] < shape[axis]:
            break
        size *= max(1, shape[axis])
    return tuple(rows)


def block_shape(shape: Shape, chunk: Shape, itemsize: int, limit: int) -> Shape:
    """The shape of the blocks to read a chunked array in: no chunk is read for two of them.

    A block is one piece of the file where so many rows of chunks fit into `limit` bytes, and else a
    chunk.

    Example:
      >>> block_shape((10, 1024), (3, 512), 4, 7 * 4096)
      (6, 1024)
      >>> block_shape((10, 1024), (3, 512), 4, 4096)
      (3, 512)
    """
    rows = leading_rows(shape, itemsize, limit)
    block = tuple(
        n if n >= length else n - n % size
        for n, size, length in zip(rows, chunk, shape, strict=True)
    )
    return block if all(block) else tuple(chunk)


def runs(part: Region, shape: Shape, itemsize: int, gap: int = 0) -> Iterator[tuple[int, int]]:
    """The bytes of a part of an array: start and end of each run, from the start of the array.

    Args:
      part: not empty.
      shape: of the array.
      itemsize: bytes of an element.
      gap: what lies between two runs and has at most so many bytes joins them.

    Example:
      >>> list(runs(Region((2, 1), (2, 3)), (4, 5), 1))
      [(11, 14), (16, 19)]
      >>> list(runs(Region((2, 1), (2, 3)), (4, 5), 1, gap=2))
      [(11, 19)]
    """
    start, stride, extent = 0, itemsize, itemsize
    steps: list[range] = []
    for axis in reversed(range(len(shape))):
        start += part.start[axis] * stride
        count = part.shape[axis]
        if not steps and stride - extent <= gap:
            extent += (count - 1) * stride
        elif count > 1:
            steps.insert(0, range(0, count * stride, stride))
        stride *= shape[axis]
    for offsets in itertools.product(*steps):
        found = start + sum(offsets)
        yield found, found + extent


def joined(found: Iterable[tuple[int, int]], gap: int) -> list[tuple[int, int]]:
    """Runs in their order, without overlaps; what is at most `gap` bytes apart is one.

    Example:
      >>> joined([(8, 9), (0, 4), (2, 6)], gap=1)
      [(0, 6), (8, 9)]
    """
    result: list[tuple[int, int]] = []
    for start, end in sorted(found):
        if result and start - result[-1][1] <= gap:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result
