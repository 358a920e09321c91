"""How two checkpoints differ: first in what they have, then in its values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from flaxckpt.cli.text import class_of
from flaxckpt.cli.work import blocks
from flaxckpt.cli.work.trees import Item, items_of
from flaxckpt.restoring.source import SavedLeaf, Source
from flaxckpt.tree.node import named_nodes


class Entry(NamedTuple):
    """What one side has at a name: what it is, and the leaf if it is one."""

    what: str
    leaf: SavedLeaf | None = None


class Tree(NamedTuple):
    """The state of a checkpoint, or an item; `prefix` begins the names of all in it."""

    prefix: str
    source: Source
    entries: Mapping[str, Entry]


@dataclasses.dataclass
class Change:
    """A leaf whose values differ.

    Attributes:
      name: of the leaf.
      what: its type.
      is_number: whether a difference says something; the words of random keys are none.
      count: how many elements it has.
      changed: how many of them differ.
      max_abs: the largest difference; NaN where one side has a NaN, `None` for what is no number.
      max_rel: the largest difference as a part of the larger of both values.
    """

    name: str
    what: str
    is_number: bool = True
    count: int = 1
    changed: int = 0
    max_abs: float | None = None
    max_rel: float | None = None

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """Takes a part of the values of both sides into account."""
        if np.array_equal(_bytes(a), _bytes(b)):
            return
        if not (self.is_number and blocks.is_number(a.dtype)):
            self.changed += _count_different(a, b)
            return
        a, b, distance = _distances(a, b)
        is_changed = distance != 0
        if not is_changed.any():
            return
        self.changed += int(is_changed.sum())
        scale = np.maximum(np.abs(a), np.abs(b))[is_changed].astype(np.float64)
        with np.errstate(invalid="ignore"):
            relative = distance[is_changed] / scale
        self.max_abs = _largest(self.max_abs, distance[is_changed])
        self.max_rel = _largest(self.max_rel, relative)

    @property
    def order(self) -> tuple[float, str]:
        """What differs most comes first, NaN before all."""
        size = self.max_abs
        is_largest = size is None or math.isnan(size)
        return (-math.inf if is_largest or size is None else -size, self.name)


def trees_of(source: Source) -> tuple[list[Tree], dict[str, Item]]:
    """The state and the items that are trees; and the items, by the prefixes of their names."""
    items = {f"item:{item.name}": item for item in items_of(source)}
    found = [Tree("", source, _entries(source))]
    for prefix, item in items.items():
        if item.tree is not None:
            found.append(Tree(f"{prefix}/", item.tree, _entries(item.tree)))
    return found, items


def _entries(source: Source) -> dict[str, Entry]:
    """The leaves of a tree, and the nodes in which there is nothing."""
    leaves, found = iter(source.leaves), {}
    for name, node in named_nodes(source.nodes):
        if node is None:
            leaf = next(leaves)
            found[name] = Entry(str(leaf.spec), leaf)
        elif not node.keys:
            found[name] = Entry(f"{class_of(node.kind, node.class_name) or 'dict'} (empty)")
    return found


def changes(a: Tree, b: Tree) -> Iterator[Change]:
    """The leaves of one type on both sides, each with how its values differ."""
    arrays: dict[str, Change] = {}
    pairs: list[tuple[SavedLeaf, SavedLeaf]] = []
    for name, entry in a.entries.items():
        other = b.entries.get(name)
        if other is None or other.what != entry.what or not (entry.leaf and other.leaf):
            continue
        if _is_array_of_same_shape(entry.leaf, other.leaf):
            count = math.prod(entry.leaf.array.shape)  # type: ignore[union-attr]
            is_number = entry.leaf.spec.kind != "prng_key"
            arrays[name] = Change(a.prefix + name, entry.what, is_number, count)
            pairs.append((entry.leaf, other.leaf))
        else:
            yield _of_values(Change(a.prefix + name, entry.what), entry.leaf, other.leaf)
    _compare(a.source, b.source, pairs, arrays)
    yield from arrays.values()


def _is_array_of_same_shape(a: SavedLeaf, b: SavedLeaf) -> bool:
    """Whether two leaves are arrays that can be compared element by element."""
    return a.array is not None and b.array is not None and a.array.shape == b.array.shape


def _of_values(change: Change, a: SavedLeaf, b: SavedLeaf) -> Change:
    """Compares what is no array."""
    is_same = a.array is None and b.array is None and a.value == b.value
    change.changed = int(not is_same)
    return change


def _compare(
    a: Source,
    b: Source,
    pairs: list[tuple[SavedLeaf, SavedLeaf]],
    found: Mapping[str, Change],
) -> None:
    """Reads the arrays of both sides, block by block, and adds what differs to `found`."""
    others = {ours.name: theirs for ours, theirs in pairs}
    wanted = blocks.wanted(ours for ours, _ in pairs)
    theirs = [(others[leaf.name], region) for leaf, region in wanted]
    with a.unchanged(), b.unchanged():
        both = zip(blocks.read(a, wanted), blocks.read(b, theirs), strict=True)
        for first, second in both:
            found[first.leaf.name].add(first.values, second.values)


def _bytes(values: np.ndarray) -> np.ndarray:
    """The bytes of an array; what is equal in them needs no other look."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _distances(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both sides as numbers that can be counted with, and how far apart they are.

    Values that are NaN on both sides are no distance apart, and equal infinities neither.
    """
    if a.dtype.kind in "iu" and b.dtype == a.dtype:
        # The distance of two 64-bit integers may need all 64 bits, and floats have fewer.
        distance = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
        return a.astype(np.float64), b.astype(np.float64), distance.astype(np.float64)
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(a - b)
    distance[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
    return a, b, distance


def _largest(before: float | None, values: np.ndarray) -> float:
    """The largest of some values and of those before; NaN if one is."""
    return float(np.max([values.max(), -math.inf if before is None else before]))


def _count_different(a: np.ndarray, b: np.ndarray) -> int:
    """How many elements differ, of those that are no numbers."""
    rows = _bytes(a).reshape(a.size, -1) != _bytes(b).reshape(b.size, -1)
    return int(rows.any(axis=1).sum())
