"""How two checkpoints differ."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from flaxckpt.formats import reading
from flaxckpt.leaves.dtypes import is_floating, parse_dtype
from flaxckpt.sharding.chunks import Region, Shape, chunks_of, whole
from flaxckpt.source.checkpoint import Checkpoint, Source, open_item
from flaxckpt.source.chunk_reads import ArrayRead, read_each
from flaxckpt.source.leaf import Leaf
from flaxckpt.store import layout
from flaxckpt.text import class_of
from flaxckpt.tree.node import Node, named_nodes

# The values of a checkpoint in blocks, of which only a few are in memory at a time.


BLOCK_BYTES = 4 << 20
# So much is read ahead of what is done with it.
AHEAD_BYTES = 8 * BLOCK_BYTES


class Block(NamedTuple):
    """A part of the array of a leaf, and its values."""

    leaf: Leaf
    region: Region
    values: np.ndarray


def wanted_blocks(leaves: Iterable[Leaf]) -> list[tuple[Leaf, Region]]:
    """All blocks of the arrays of `leaves`, in order."""
    return [
        (leaf, region)
        for leaf in leaves
        if leaf.array is not None
        for _, region in chunks_of(whole(leaf.array.shape), _block(leaf.array))
    ]


def read_blocks(regions: Sequence[tuple[Leaf, Region]]) -> Iterator[Block]:
    """The values of blocks, in their order.

    Raises:
      CorruptCheckpointError: when something is missing or damaged; the leaf is named.
    """
    values = read_each(reads(regions), AHEAD_BYTES)
    yield from (Block(*block, found) for block, found in zip(regions, values, strict=True))


def reads(regions: Sequence[tuple[Leaf, Region]]) -> list[ArrayRead]:
    """What is to be read for blocks."""
    return [
        ArrayRead(leaf.name, leaf.array, [region])
        for leaf, region in regions
        if leaf.array is not None
    ]


def is_number(dtype: np.dtype) -> bool:
    """Whether one can count with values of a dtype."""
    return dtype.kind in "biufc" or dtype.type.__module__ == "ml_dtypes"


def _block(array: Any) -> Shape:
    """The shape of the blocks of an array."""
    itemsize = parse_dtype(array.dtype).itemsize
    return reading.block_shape(array.shape, array.chunks, itemsize, BLOCK_BYTES)


# The trees of a checkpoint, its state and its items, as branches with names and sizes.


class Item(NamedTuple):
    """An item beside the state.

    Attributes:
      name: its name.
      kind: which handler reads it.
      nbytes: the size of its files, without those of its tree.
      checksums: those of the same files, by name.
      tree: its tree, if it has one.
    """

    name: str
    kind: str
    nbytes: int
    checksums: dict[str, int | None]
    tree: Source | None


def items_of(source: Source) -> list[Item]:
    """The items of a checkpoint; one of another format has none."""
    if not isinstance(source, Checkpoint):
        return []
    return [_item(source, name) for name in source.described.items]


def _item(checkpoint: Checkpoint, name: str) -> Item:
    """One item."""
    record = checkpoint.described.items[name]
    # Of a marker only its presence says something, and only to Orbax.
    files = {file: f for file, f in record.files.items() if file != layout.COMMIT_SUCCESS}
    size = sum(file.size for file in files.values())
    checksums = {file: found.crc32c for file, found in files.items()}
    tree = None if record.tree is None else open_item(checkpoint, name)
    return Item(name, record.kind, size, checksums, tree)


def format_of(source: Source) -> str:
    """What the format of a checkpoint is called."""
    return getattr(source, "format", "flaxckpt")


@dataclasses.dataclass
class Branch:
    """A node or a leaf, and what is below it.

    Attributes:
      key: the last part of its name.
      node: what it is; `None` for a leaf.
      leaf: the leaf.
      children: what is in a node.
      nbytes: the size of all its arrays.
      count: how many leaves it has.
    """

    key: str
    node: Node | None = None
    leaf: Leaf | None = None
    children: list[Branch] = dataclasses.field(default_factory=list)
    nbytes: int = 0
    count: int = 0


def branch_of(source: Source, is_wanted: Callable[[str], bool] | None = None) -> Branch:
    """The tree of `source`; with `is_wanted` only the leaves whose names are."""
    root = _nested(source)
    _count(root, is_wanted)
    return root


def _nested(source: Source) -> Branch:
    """The tree without sizes."""
    top, leaves = Branch(""), iter(source.leaves)
    # A node that is open, and how many of its children are still to come.
    stack: list[tuple[Branch, int]] = [(top, 1)]
    for name, node in named_nodes(source.nodes):
        while not stack[-1][1]:
            stack.pop()
        parent, missing = stack.pop()
        stack.append((parent, missing - 1))
        if node is not None and node.is_box:
            stack.append((parent, len(node.keys)))  # what is in a box has the name of the box
            continue
        branch = Branch(name.rpartition("/")[2], node, next(leaves) if node is None else None)
        parent.children.append(branch)
        if node is not None:
            stack.append((branch, len(node.keys)))
    return top.children[0]


def _count(branch: Branch, is_wanted: Callable[[str], bool] | None) -> None:
    """Adds up what is below a branch, and takes out what is not wanted."""
    if branch.leaf is not None:
        is_taken = is_wanted is None or is_wanted(branch.leaf.name)
        branch.count = int(is_taken)
        branch.nbytes = branch.leaf.nbytes if is_taken and branch.leaf else 0
        return
    for child in branch.children:
        _count(child, is_wanted)
    if is_wanted is not None:
        branch.children = [child for child in branch.children if child.count]
    branch.count = sum(child.count for child in branch.children)
    branch.nbytes = sum(child.nbytes for child in branch.children)


def leaves_of(branch: Branch) -> Iterator[Leaf]:
    """The leaves below a branch, in order."""
    if branch.leaf is not None:
        yield branch.leaf
    for child in branch.children:
        yield from leaves_of(child)


def sort(branch: Branch, by: str) -> None:
    """Sorts what is below a branch: the largest first, or by name."""
    if by == "size":
        branch.children.sort(key=lambda child: -child.nbytes)
    else:
        branch.children.sort(key=lambda child: child.key)
    for child in branch.children:
        sort(child, by)


# How two checkpoints differ: first in what they have, then in its values.


class Entry(NamedTuple):
    """What one side has at a name: what it is, and the leaf if it is one."""

    what: str
    leaf: Leaf | None = None


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
    pairs: list[tuple[Leaf, Leaf]] = []
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


def _is_array_of_same_shape(a: Leaf, b: Leaf) -> bool:
    """Whether two leaves are arrays that can be compared element by element."""
    return a.array is not None and b.array is not None and a.array.shape == b.array.shape


def _of_values(change: Change, a: Leaf, b: Leaf) -> Change:
    """Compares what is no array."""
    is_same = a.array is None and b.array is None and a.value == b.value
    change.changed = int(not is_same)
    return change


def _compare(
    a: Source,
    b: Source,
    pairs: list[tuple[Leaf, Leaf]],
    found: Mapping[str, Change],
) -> None:
    """Reads the arrays of both sides, block by block, and adds what differs to `found`."""
    others = {ours.name: theirs for ours, theirs in pairs}
    wanted = wanted_blocks(ours for ours, _ in pairs)
    theirs = [(others[leaf.name], region) for leaf, region in wanted]
    with a.unchanged(), b.unchanged():
        both = zip(read_blocks(wanted), read_blocks(theirs), strict=True)
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


# Subtrees of a state: which there are, and how many bytes each has. Pure.


ROOT = "(the whole state)"


@dataclasses.dataclass(frozen=True)
class Subtree:
    """A part of a state.

    Attributes:
      name: its key path; empty for all of it.
      nbytes: the size of its arrays, in bytes.
      leaves: how many leaves it has.
    """

    name: str
    nbytes: int
    leaves: int

    @property
    def parent(self) -> str | None:
        """The key path of what it is directly in; that of a single key is in the whole state."""
        return self.name.rpartition("/")[0] if self.name else None

    @property
    def label(self) -> str:
        """Its last key."""
        return self.name.rpartition("/")[2] or ROOT


def prefix(name: str, depth: int) -> str:
    """The first `depth` keys of the key path `name`."""
    return "/".join(name.split("/")[:depth])


def fitting_depth(names: Collection[str], most: int) -> int:
    """How many keys tell at most `most` subtrees apart; at least one.

    Example:
      >>> fitting_depth(["params/a/w", "params/b/w", "step"], 3)
      3
      >>> fitting_depth(["params/a/w", "params/b/w", "step"], 2)
      1
    """
    deepest = max((name.count("/") + 1 for name in names), default=1)
    for depth in range(1, deepest + 1):
        if len({prefix(name, depth) for name in names}) > most:
            return max(1, depth - 1)
    return deepest


def subtrees(leaves: Mapping[str, int], most: int) -> list[Subtree]:
    """All subtrees that have bytes, down to the depth of which there are at most `most`.

    Args:
      leaves: the size in bytes of each leaf, by key path.
      most: how many there may be at the deepest level.

    Example:
      >>> [(s.name, s.nbytes) for s in subtrees({"params/w": 8, "params/b": 2, "step": 4}, 10)]
      [('', 14), ('params', 10), ('params/w', 8), ('params/b', 2), ('step', 4)]
    """
    depth = fitting_depth(leaves, most)
    sizes: dict[str, list[int]] = {}
    for name, nbytes in leaves.items():
        for above in _prefixes(name, depth) if nbytes else ():
            found = sizes.setdefault(above, [0, 0])
            found[0] += nbytes
            found[1] += 1
    return [Subtree(name, nbytes, count) for name, (nbytes, count) in sizes.items()]


def _prefixes(name: str, depth: int) -> Iterable[str]:
    """The key paths of what the leaf `name` is in, the whole state first, without doubles."""
    return dict.fromkeys(prefix(name, n) for n in range(depth + 1))


# How much each part of the state changed from one step to the next, with bounded memory.


# Rows of the picture: more cannot be read.
MOST_ROWS = 24
# So many elements are computed with at once, as float64.
_PIECE = 1 << 20


class Part(Protocol):
    """A leaf that is read in parts; `flaxckpt.Leaf` is one."""

    @property
    def spec(self) -> Any:
        """Its type."""

    @property
    def array(self) -> Any:
        """Its array; `None` when it has none."""

    @property
    def nbytes(self) -> int:
        """The size of its array."""

    def read(self, index: Any = ...) -> Any:
        """What is at `index`."""


LeavesByName = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Changes:
    """The relative L2 norm of what changed.

    Attributes:
      pairs: the pairs of steps, in order.
      names: the subtrees; the empty name is the whole state.
      values: of each subtree, for each pair: |new - old| / |old|. 0 means that no bit of a value
        changed, infinity that everything was 0 before, NaN that there is nothing to compare, or
        that there are values which are not finite.
      uncompared: how many floating arrays are not in all steps with the same shape.
    """

    pairs: Sequence[tuple[int, int]]
    names: Sequence[str]
    values: Sequence[Sequence[float]]
    uncompared: int = 0


def floating(checkpoint: LeavesByName) -> dict[str, Part]:
    """The arrays of floating-point numbers of a checkpoint."""
    leaves: Iterator[tuple[str, Part]] = ((name, checkpoint[name]) for name in checkpoint)
    return {name: leaf for name, leaf in leaves if _is_floating(leaf)}


def _is_floating(leaf: Part) -> bool:
    """Whether it is an array of floating-point numbers."""
    is_array = leaf.array is not None and leaf.spec.kind in ("jax", "numpy")
    return is_array and is_floating(leaf.array.dtype)


def bytes_to_read(checkpoints: Mapping[int, LeavesByName]) -> int:
    """How many bytes `changes` reads of them."""
    every = (floating(checkpoint).values() for checkpoint in checkpoints.values())
    return sum(leaf.nbytes for leaves in every for leaf in leaves)


def subtree_changes(
    checkpoints: Mapping[int, LeavesByName],
    *,
    most_rows: int = MOST_ROWS,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Changes:
    """The changes between neighbours of `checkpoints`.

    Each array is read once from each step, a chunk at a time: two chunks are in memory.

    Args:
      checkpoints: by step, in order.
      most_rows: how many subtrees there may be, beside the whole state.
      progress: is given the bytes that were read, as they are.
    """
    steps = list(checkpoints)
    leaves = [floating(checkpoint) for checkpoint in checkpoints.values()]
    names = list(dict.fromkeys(name for step in reversed(leaves) for name in step))
    depth = fitting_depth(names, most_rows)
    sums: dict[str, np.ndarray] = {}
    for name in names:
        versions = [step.get(name) for step in leaves]
        found = _squares(versions)
        progress(sum(leaf.nbytes for leaf in versions if leaf is not None))
        for row in dict.fromkeys(("", prefix(name, depth))):
            sums[row] = sums.get(row, 0) + found
    values = [[_ratio(*pair) for pair in row] for row in sums.values()]
    uncompared = sum(not _is_in_all([step.get(name) for step in leaves]) for name in names)
    pairs = list(itertools.pairwise(steps))
    return Changes(pairs, list(sums), values, uncompared)


def _is_in_all(versions: Sequence[Part | None]) -> bool:
    """Whether every step has it, with the same shape."""
    return len({None if leaf is None else leaf.spec.shape for leaf in versions} - {None}) == 1 and (
        None not in versions
    )


def _squares(versions: Sequence[Part | None]) -> np.ndarray:
    """For each pair of versions of a leaf: the squares of the change, of the old values, and how
    many elements were compared.
    """
    sums = np.zeros((max(0, len(versions) - 1), 3))
    newest = next(leaf for leaf in reversed(versions) if leaf is not None)
    shape: Shape = newest.spec.shape
    fits = [leaf if leaf is not None and leaf.spec.shape == shape else None for leaf in versions]
    for _, region in chunks_of(whole(shape), newest.array.chunks):
        old = None
        for pair, leaf in enumerate(fits, start=-1):
            new = None if leaf is None else _flat(leaf, region)
            if old is not None and new is not None:
                sums[pair] += _difference(old, new)
            old = new
    return sums


def _flat(leaf: Part, region: Region) -> np.ndarray:
    """The values of a part of a leaf."""
    return np.asarray(leaf.read(region.slices)).reshape(-1)


def _difference(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """As a row of `_squares`."""
    change = size = 0.0
    with np.errstate(invalid="ignore", over="ignore"):  # infinities come out as NaN
        for i in range(0, len(old), _PIECE):
            before, after = (values[i : i + _PIECE].astype(np.float64) for values in (old, new))
            size += float(before @ before)
            after -= before
            change += float(after @ after)
    return np.array([change, size, len(old)])


def _ratio(change: float, size: float, count: float) -> float:
    """The relative change of a row of `_squares`."""
    if not count or not math.isfinite(change) or not math.isfinite(size):
        return math.nan
    if not change:
        return 0.0
    return math.sqrt(change / size) if size else math.inf
