"""Compares checkpoints of any formats: two for `flaxckpt diff`, the steps of a run for its report.

Both read the same blocks of all checkpoints side by side, and keep only a few blocks in memory.
It needs no jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats.reading import block_shape
from flaxckpt.inspecting import fitting_depth, items_of, prefix
from flaxckpt.leaves.dtypes import is_floating, parse_dtype
from flaxckpt.sharding.chunks import Region, chunks_of, whole
from flaxckpt.source.checkpoint import Source
from flaxckpt.source.chunk_reads import ArrayRead, read_each
from flaxckpt.source.leaf import Leaf
from flaxckpt.text import class_of
from flaxckpt.tree.node import named_nodes

# The values of checkpoints in blocks.


BLOCK_BYTES = 4 << 20
# How many bytes are read before they are asked for.
AHEAD_BYTES = 8 * BLOCK_BYTES


class LeafBlock(NamedTuple):
    """A block of the array of a leaf, and its values."""

    leaf: Leaf
    region: Region
    values: np.ndarray


def blocks_of(leaves: Iterable[Leaf]) -> list[tuple[Leaf, Region]]:
    """All blocks of the arrays of `leaves`, in order."""
    found = []
    for leaf in leaves:
        if (array := leaf.array) is not None:
            itemsize = parse_dtype(array.dtype).itemsize
            shape = block_shape(array.shape, array.chunks, itemsize, BLOCK_BYTES)
            found += [(leaf, region) for _, region in chunks_of(whole(array.shape), shape)]
    return found


def read_blocks(
    blocks: Sequence[tuple[Leaf, Region]],
    *,
    ahead: int = AHEAD_BYTES,
    held: list[CorruptCheckpointError] | None = None,
) -> Iterator[LeafBlock]:
    """The values of blocks, in their order.

    Args:
      blocks: the blocks; each leaf has an array.
      ahead: how many bytes are read before they are asked for.
      held: collects the errors, if they are not to be raised; a damaged block has any values.

    Raises:
      CorruptCheckpointError: if something is missing or damaged; it names the leaf.
    """
    reads = [ArrayRead(n.name, n.array, [region]) for n, region in blocks if n.array is not None]
    values = read_each(reads, ahead, held)
    yield from (LeafBlock(*block, found) for block, found in zip(blocks, values, strict=True))


def _side_by_side(
    sources: Sequence[Source], leaves: Sequence[Sequence[Leaf | None]]
) -> Iterator[tuple[int, list[np.ndarray | None]]]:
    """The same block of every source, one after the other, with the index of its leaf.

    Args:
      sources: the checkpoints.
      leaves: the versions of each leaf, one for each source; `None` if a source has none. All
        versions have an array of one shape.
    """
    wanted = [
        (i, region)
        for i, versions in enumerate(leaves)
        for _, region in blocks_of([next(leaf for leaf in reversed(versions) if leaf)])
    ]
    with contextlib.ExitStack() as stack:
        readers = []
        for number, source in enumerate(sources):
            stack.enter_context(source.unchanged())
            blocks = [(leaf, region) for i, region in wanted if (leaf := leaves[i][number])]
            readers.append(read_blocks(blocks, ahead=AHEAD_BYTES // len(sources)))
        for i, _ in wanted:
            versions = zip(leaves[i], readers, strict=True)
            yield i, [next(reader).values if leaf else None for leaf, reader in versions]
        for reader in readers:
            next(reader, None)  # lets it notice that it is done


# How two checkpoints differ: first their names and types, then their values.


@dataclasses.dataclass
class ValueChange:
    """How the values of one leaf differ.

    Attributes:
      name: the key path.
      what: the type.
      is_number: whether a difference is meaningful; for the words of random keys it is not.
      count: the number of elements.
      changed: how many elements differ.
      max_abs: the largest difference; NaN if one side has a NaN, `None` if it is not a number.
      max_rel: the largest difference, relative to the larger of both values.
    """

    name: str
    what: str
    is_number: bool = True
    count: int = 1
    changed: int = 0
    max_abs: float | None = None
    max_rel: float | None = None

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """Counts a block of the values of both sides."""
        if np.array_equal(_bytes(a), _bytes(b)):
            return
        if not (self.is_number and is_number(a.dtype)):
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
        """Sorts the largest difference first, and NaN before all."""
        size = self.max_abs
        is_largest = size is None or math.isnan(size)
        return (-math.inf if is_largest or size is None else -size, self.name)


class Comparison(NamedTuple):
    """How checkpoint B differs from checkpoint A.

    Attributes:
      only_in_a: the type of each name that only A has.
      only_in_b: the type of each name that only B has.
      other_type: both types of each name whose type differs.
      changed: the leaves whose values differ, the largest difference first.
      equal: how many leaves are equal; `None` if the values were not compared.
    """

    only_in_a: Mapping[str, str]
    only_in_b: Mapping[str, str]
    other_type: Mapping[str, tuple[str, str]]
    changed: Sequence[ValueChange]
    equal: int | None

    @property
    def is_same(self) -> bool:
        """Whether there is no difference."""
        return not (self.only_in_a or self.only_in_b or self.other_type or self.changed)


class _Named(NamedTuple):
    """A leaf, an empty node or an item of a checkpoint; an item without a tree has checksums."""

    what: str
    leaf: Leaf | None = None
    checksums: Mapping[str, int | None] | None = None


def compare(a: Source, b: Source, *, values: bool) -> Comparison:
    """How two checkpoints differ, in their items too.

    Raises:
      CorruptCheckpointError: if something is missing or damaged; it names the leaf.
    """
    ours, theirs = _contents(a), _contents(b)
    first, second = _flat(ours), _flat(theirs)
    common = [name for name in first if name in second]
    found: list[ValueChange] = []
    for start in ours if values else ():
        if start in theirs:
            found += _changes(start, *ours[start], *theirs[start])
    return Comparison(
        {name: n.what for name, n in first.items() if name not in second},
        {name: n.what for name, n in second.items() if name not in first},
        {n: (first[n].what, second[n].what) for n in common if first[n].what != second[n].what},
        sorted((c for c in found if c.changed), key=lambda change: change.order),
        sum(not c.changed for c in found) if values else None,
    )


_Contents = dict[str, tuple[Source, dict[str, _Named]]]


def _contents(source: Source) -> _Contents:
    """The state, the items and the trees of the items, by the beginning of all their names."""
    items = items_of(source)
    files = {f"item:{item.name}": _Named(item.kind, checksums=item.checksums) for item in items}
    trees = {f"item:{item.name}/": item.tree for item in items if item.tree is not None}
    found = {"": source, **trees}
    return {start: (tree, _entries(tree)) for start, tree in found.items()} | {
        "item": (source, {name.removeprefix("item"): named for name, named in files.items()})
    }


def _flat(contents: _Contents) -> dict[str, _Named]:
    return {start + name: n for start, (_, names) in contents.items() for name, n in names.items()}


def _entries(source: Source) -> dict[str, _Named]:
    """The leaves and the empty nodes of a tree."""
    leaves, found = iter(source.leaves), {}
    for name, node in named_nodes(source.nodes):
        if node is None:
            leaf = next(leaves)
            found[name] = _Named(str(leaf.spec), leaf)
        elif not node.keys:
            found[name] = _Named(f"{class_of(node.kind, node.class_name) or 'dict'} (empty)")
    return found


def _changes(
    start: str, a: Source, ours: dict[str, _Named], b: Source, theirs: dict[str, _Named]
) -> list[ValueChange]:
    """The leaves and items of one type on both sides, each with how its values differ."""
    found: list[ValueChange] = []
    arrays: list[tuple[ValueChange, tuple[Leaf, Leaf]]] = []
    for name, one in ours.items():
        other = theirs.get(name)
        if other is None or other.what != one.what:
            continue
        change = ValueChange(start + name, one.what)
        if one.leaf is None or other.leaf is None:
            change.changed = int(one.checksums != other.checksums)
            found += [change] if one.checksums else []
            continue
        found.append(change)
        x, y = one.leaf.array, other.leaf.array
        if x is not None and y is not None and x.shape == y.shape:
            change.count, change.is_number = math.prod(x.shape), one.leaf.spec.kind != "prng_key"
            arrays.append((change, (one.leaf, other.leaf)))
        else:
            change.changed = int(x is not y or one.leaf.value != other.leaf.value)
    for i, (old, new) in _side_by_side([a, b], [pair for _, pair in arrays]):
        if old is not None and new is not None:  # both have all of them
            arrays[i][0].add(old, new)
    return found


def is_number(dtype: np.dtype) -> bool:
    """Whether arithmetic with values of a dtype is possible."""
    return dtype.kind in "biufc" or dtype.type.__module__ == "ml_dtypes"


def _bytes(values: np.ndarray) -> np.ndarray:
    """The bytes of an array. If they are equal, nothing else has to be compared."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _distances(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both sides as wide numbers, and their distances: 0 for equal infinities and for two NaNs."""
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
    """The largest of `before` and some values; NaN if one of them is."""
    return float(np.max([values.max(), -math.inf if before is None else before]))


def _count_different(a: np.ndarray, b: np.ndarray) -> int:
    """How many elements differ in their bytes."""
    rows = _bytes(a).reshape(a.size, -1) != _bytes(b).reshape(b.size, -1)
    return int(rows.any(axis=1).sum())


# How much each subtree changed from one step to the next.


# Rows of the picture: more cannot be read.
MOST_ROWS = 24
# How many elements are converted to float64 at once.
_PIECE = 1 << 20


@dataclasses.dataclass(frozen=True)
class SubtreeChanges:
    """The relative L2 norm of the changes.

    Attributes:
      pairs: the pairs of steps, in order.
      names: the subtrees; the empty name is the whole state.
      values: for each subtree and each pair |new - old| / |old|: 0 if no bit of a value changed,
        infinity if all was 0 before, NaN if there is nothing to compare, or not all is finite.
      uncompared: how many floating-point arrays are not in all steps with the same shape.
    """

    pairs: Sequence[tuple[int, int]]
    names: Sequence[str]
    values: Sequence[Sequence[float]]
    uncompared: int = 0


def floating(source: Source) -> dict[str, Leaf]:
    """The arrays of floating-point numbers of a checkpoint, by key path."""
    return {
        leaf.name: leaf
        for leaf in source.leaves
        if leaf.array is not None
        and leaf.spec.kind in ("jax", "numpy")
        and is_floating(leaf.array.dtype)
    }


def bytes_to_read(sources: Iterable[Source]) -> int:
    """How many bytes `subtree_changes` reads of them."""
    return sum(leaf.nbytes for source in sources for leaf in floating(source).values())


def subtree_changes(
    sources: Mapping[int, Source],
    *,
    most_rows: int = MOST_ROWS,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> SubtreeChanges:
    """How much each subtree changed between neighbouring steps. Each array is read once.

    Args:
      sources: the checkpoints by step, in order.
      most_rows: the largest number of subtrees, in addition to the whole state.
      progress: takes the number of bytes that were read since its last call.

    Raises:
      CorruptCheckpointError: if something is missing or damaged; it names the leaf.
    """
    found = [floating(source) for source in sources.values()]
    names = list(dict.fromkeys(name for leaves in reversed(found) for name in leaves))
    versions = [[leaves.get(name) for leaves in found] for name in names]
    shapes = [{None if leaf is None else leaf.spec.shape for leaf in v} for v in versions]
    depth = fitting_depth(names, most_rows)
    zeros = np.zeros((max(0, len(sources) - 1), 3))
    rows = {row: zeros.copy() for name in names for row in ("", prefix(name, depth))}
    for i, values in _side_by_side(list(sources.values()), [_alike(v) for v in versions]):
        progress(sum(v.nbytes for v in values if v is not None))
        sums = zeros.copy()
        for pair, (old, new) in enumerate(itertools.pairwise(values)):
            if old is not None and new is not None:
                sums[pair] = _squares(old.reshape(-1), new.reshape(-1))
        for row in {"", prefix(names[i], depth)}:
            rows[row] += sums
    return SubtreeChanges(
        list(itertools.pairwise(sources)),
        list(rows),
        [[_ratio(*pair) for pair in row] for row in rows.values()],
        sum(len(shape) > 1 for shape in shapes),
    )


def _alike(versions: Sequence[Leaf | None]) -> list[Leaf | None]:
    """The versions of a leaf that have the shape of the newest one."""
    shape = next(leaf.spec.shape for leaf in reversed(versions) if leaf is not None)
    return [leaf if leaf is not None and leaf.spec.shape == shape else None for leaf in versions]


def _squares(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The sum of squares of the change and of the old values, and the number of elements."""
    change = size = 0.0
    with np.errstate(invalid="ignore", over="ignore"):  # infinities come out as NaN
        for i in range(0, len(old), _PIECE):
            before, after = (values[i : i + _PIECE].astype(np.float64) for values in (old, new))
            size += float(before @ before)
            after -= before
            change += float(after @ after)
    return np.array([change, size, len(old)])


def _ratio(change: float, size: float, count: float) -> float:
    """The relative change, from sums of `_squares`."""
    if not count or not math.isfinite(change) or not math.isfinite(size):
        return math.nan
    if not change:
        return 0.0
    return math.sqrt(change / size) if size else math.inf
