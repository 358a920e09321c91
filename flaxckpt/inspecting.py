"""Looking into a checkpoint: inspect, lazy, verify."""

from __future__ import annotations

import dataclasses
import datetime
import html
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import crc32c
from etils import epath

from flaxckpt import text
from flaxckpt.arguments import checked
from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats.opening import open_source
from flaxckpt.leaves.dtypes import storage_of
from flaxckpt.leaves.spec import LeafInfo, LeafRecord
from flaxckpt.metadata.sealed_json import SavedFile
from flaxckpt.options import Options
from flaxckpt.sharding.chunks import chunks_of, whole
from flaxckpt.source.checkpoint import (
    Checkpoint,
    Source,
    open_checkpoint,
    open_item,
    unchanged,
)
from flaxckpt.source.chunk_reads import ArrayRead, check_arrays
from flaxckpt.source.leaf import Leaf
from flaxckpt.store import layout, ocdbt, zarr3
from flaxckpt.store.ocdbt import ValueRef, check_versions, read_index
from flaxckpt.store.store import Location
from flaxckpt.tree.node import Node, named_nodes

# One checkpoint as an object that prints as a table, without reading an array.


# Rows of `repr`, and of a notebook's table; deeper subtrees are one row each.
_REPR_ROWS, _HTML_ROWS = 20, 500


@dataclasses.dataclass(frozen=True)
class ItemInfo:
    """An item that a checkpoint has in addition to the state.

    Attributes:
      name: the name of the item.
      kind: the name of the handler that restores it.
      nbytes: the size of its files and arrays, in bytes.
      tree: its tree of `LeafInfo`s; `None` if the item is not a tree.
    """

    name: str
    kind: str
    nbytes: int
    tree: Any = None


@dataclasses.dataclass(frozen=True, repr=False)
class CheckpointInfo:
    """The contents of a checkpoint. It prints as a short table, in a notebook as a folded one.

    Attributes:
      path: the checkpoint.
      format: the name of its format, such as `flaxckpt` or `Orbax`.
      tree: the saved tree, with a `LeafInfo` for each leaf. It is also a target:
        `restore(path, info.tree)` restores each array onto its saved sharding if the devices form
        a mesh of that shape, and onto the default device otherwise.
      nbytes: the size of the arrays of `tree`, in bytes.
      items: the items in addition to the state, by name.
      metrics: the metrics of the step.
      metadata: the user's metadata.
      step: the step; `None` if the name of the directory is not a step.
      started: when the save began (UTC); `None` for another format.
      committed: when the save was committed (UTC); `None` for another format.
    """

    path: epath.Path
    format: str
    tree: Any
    nbytes: int
    items: Mapping[str, ItemInfo]
    metrics: Mapping[str, float]
    metadata: Mapping[str, Any]
    step: int | None
    started: datetime.datetime | None
    committed: datetime.datetime | None
    _root: Branch = dataclasses.field(compare=False)

    def __repr__(self) -> str:
        """The path, the metrics and the items, and a row for each of at most 20 subtrees."""
        found = list(_subtrees(self._root, _depth(self._root, _REPR_ROWS)))
        rows = [(text.clean(name) or "(the whole tree)", *_cells(branch)) for name, branch in found]
        rows, more = rows[:_REPR_ROWS], len(rows) - _REPR_ROWS
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*self._head(), *table, *([f"  ... {more:,} more"] if more > 0 else [])])

    def _repr_html_(self) -> str:
        """The same for a notebook; a click unfolds a subtree."""
        first, *rest = (html.escape(line) for line in self._head())
        head = f"<b>{first}</b>{''.join(f'<div>{line}</div>' for line in rest)}"
        return f"<div>{head}{_folded(self._root, _depth(self._root, _HTML_ROWS))}</div>"

    def _head(self) -> list[str]:
        age = self.committed and datetime.datetime.now(datetime.UTC) - self.committed
        counts = f"{text.plural(self._root.count, 'leaf')}, {text.size(self.nbytes)}"
        items = (f"{i.name} ({i.kind}, {text.size(i.nbytes)})" for i in self.items.values())
        facts = {
            "metrics": text.metrics(self.metrics),
            "metadata": text.short(str(dict(self.metadata))) if self.metadata else "",
            "items": ", ".join(items),
        }
        old = f", {text.age(age.total_seconds())} old" if age else ""
        lines = (f"{name}: {value}" for name, value in facts.items() if value)
        return [text.clean(x) for x in (f"{self.path}: {self.format}, {counts}{old}", *lines)]


@checked(options=Options)
def inspect(path: epath.PathLike, *, options: Options = Options()) -> CheckpointInfo:
    """Describes the checkpoint at `path`, of any format. No array is read.

    Args:
      path: a checkpoint or a step of a run, as in `flaxckpt.restore`.
      options: how to connect to object stores.

    Raises:
      CheckpointNotFoundError: if there is no checkpoint at `path`.
      CorruptCheckpointError: if its metadata is damaged.

    Example:
      >>> import numpy as np
      >>> flaxckpt.save(tmp_path / "exported", {"kernel": np.ones((2, 3))})
      >>> info = flaxckpt.inspect(tmp_path / "exported")
      >>> info.tree["kernel"].shape, info.nbytes
      ((2, 3), 48)
    """
    source = open_source(path, options)
    described = source.described if isinstance(source, Checkpoint) else None
    items = (
        ItemInfo(item.name, item.kind, item.total_nbytes, item.tree and _tree_of(item.tree))
        for item in items_of(source)
    )
    return CheckpointInfo(
        epath.Path(source.path),
        format_of(source),
        _tree_of(source),
        sum(leaf.nbytes for leaf in source.leaves),
        {item.name: item for item in items},
        dict(described.metrics) if described else {},
        dict(source.metadata),
        layout.parse_step(source.path.name),
        _time(described.started_ns) if described else None,
        _time(described.committed_ns) if described else None,
        branch_of(source),
    )


def _tree_of(source: Source) -> Any:
    """The tree of `source`, with a `LeafInfo` for each leaf."""
    from flaxckpt.tree.rebuild import build  # `flaxckpt show` does without jax and flax

    return build(source.nodes, [_leaf_info(leaf) for leaf in source.leaves])


def _leaf_info(leaf: Leaf) -> LeafInfo:
    if leaf.array is None:
        return LeafInfo(leaf.name, leaf.spec)
    array, mesh = leaf.array, None
    partition: tuple[Any, ...] = ()
    if array.sharding is not None:
        axes = array.sharding["mesh"]
        mesh = dict(zip(axes["axis_names"], axes["shape"], strict=True))
        partition = tuple(tuple(p) if isinstance(p, list) else p for p in array.sharding["spec"])
    return LeafInfo(leaf.name, leaf.spec, leaf.nbytes, tuple(array.chunks), mesh, partition)


def _time(ns: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(ns / 1e9, datetime.UTC)


def _depth(root: Branch, most: int) -> int:
    """How many levels of the tree have at most `most` subtrees."""
    return fitting_depth([leaf.name for leaf in leaves_of(root)], most)


def _subtrees(branch: Branch, depth: int, name: str = "") -> Iterator[tuple[str, Branch]]:
    """The subtrees at `depth`, and the leaves above it, with their key paths."""
    if not depth or not branch.children:
        yield name, branch
    for child in branch.children if depth else ():
        yield from _subtrees(child, depth - 1, f"{name}/{child.key}".lstrip("/"))


def _cells(branch: Branch) -> tuple[str, str, str]:
    size = text.size(branch.nbytes) if branch.nbytes else "-"
    return branch.type(folded=True), size, branch.sharding


def _folded(branch: Branch, depth: int) -> str:
    """A subtree as HTML that opens with a click."""
    said = "  ".join((branch.key or "(the whole tree)", *filter(None, _cells(branch))))
    label = html.escape(text.clean(said))
    if not depth or not branch.children:
        return f"<div style='margin-left: 1em'>{label}</div>"
    shown, more = branch.children[:_HTML_ROWS], len(branch.children) - _HTML_ROWS
    inside = "".join(_folded(child, depth - 1) for child in shown)
    rest = f"<div style='margin-left: 1em'>... {more:,} more</div>" if more > 0 else ""
    return f"<details style='margin-left: 1em'><summary>{label}</summary>{inside}{rest}</details>"


# The tree of a checkpoint and its items as branches, with sizes. It needs no jax.


class OpenedItem(NamedTuple):
    """An item of a checkpoint.

    Attributes:
      name: the name of the item.
      kind: the name of the handler that restores it.
      nbytes: the size of its files, without the files of its tree.
      checksums: the checksum of each file, by name.
      tree: its tree; `None` if the item is not a tree.
    """

    name: str
    kind: str
    nbytes: int
    checksums: dict[str, int | None]
    tree: Checkpoint | None

    @property
    def total_nbytes(self) -> int:
        """The size of its files and arrays."""
        return self.nbytes + (sum(leaf.nbytes for leaf in self.tree.leaves) if self.tree else 0)


def items_of(source: Source) -> list[OpenedItem]:
    """The items of a checkpoint of flaxckpt; other formats have none."""
    if not isinstance(source, Checkpoint):
        return []
    return [_opened(source, name) for name in source.described.items]


def _opened(checkpoint: Checkpoint, name: str) -> OpenedItem:
    record = checkpoint.described.items[name]
    # A commit marker has no contents; only Orbax looks for it.
    files = {file: f for file, f in record.files.items() if file != layout.COMMIT_SUCCESS}
    size = sum(file.size for file in files.values())
    checksums = {file: found.crc32c for file, found in files.items()}
    tree = None if record.tree is None else open_item(checkpoint, name)
    return OpenedItem(name, record.kind, size, checksums, tree)


def format_of(source: Source) -> str:
    """The name of the format of a checkpoint."""
    return getattr(source, "format", "flaxckpt")


@dataclasses.dataclass
class Branch:
    """A node or a leaf, and everything below it.

    Attributes:
      key: the last component of its key path.
      node: the node; `None` for a leaf.
      leaf: the leaf; `None` for a node.
      children: the branches directly below a node.
      nbytes: the size of all its arrays.
      count: the number of its leaves.
    """

    key: str
    node: Node | None = None
    leaf: Leaf | None = None
    children: list[Branch] = dataclasses.field(default_factory=list)
    nbytes: int = 0
    count: int = 0

    @property
    def sharding(self) -> str:
        """The saved sharding of a leaf; empty if it has none."""
        array = None if self.leaf is None else self.leaf.array
        return "" if array is None else text.sharding(array.sharding)

    def type(self, *, folded: bool) -> str:
        """The type of a leaf or a node; of a `folded` node with the number of its leaves."""
        if self.leaf is not None:
            value = self.leaf.value
            shown = f" {text.short(repr(value))}" if isinstance(value, str) else ""
            return f"{self.leaf.spec}{shown}"
        assert self.node is not None, "it is not a leaf"
        name = text.class_of(self.node.kind, self.node.class_name)
        if not self.children:
            return f"{name or self.node.kind} (empty)"
        return f"{name} ({text.plural(self.count, 'leaf')})".strip() if folded else name


def branch_of(source: Source, is_wanted: Callable[[str], bool] | None = None) -> Branch:
    """The tree of `source`; with `is_wanted` only the leaves whose key paths it accepts."""
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
        branch.nbytes = branch.leaf.nbytes if is_taken else 0
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
    """Sorts the children of every node: the largest first, or by name."""
    if by == "size":
        branch.children.sort(key=lambda child: -child.nbytes)
    else:
        branch.children.sort(key=lambda child: child.key)
    for child in branch.children:
        sort(child, by)


def prefix(name: str, depth: int) -> str:
    """The first `depth` keys of the key path `name`."""
    return "/".join(name.split("/")[:depth])


def fitting_depth(names: Collection[str], most: int) -> int:
    """How many levels of key paths have at most `most` subtrees; at least one.

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


# A checkpoint as a mapping of leaves that are read when they are asked for.


class LazyCheckpoint(Mapping[str, Leaf]):
    """The leaves of a checkpoint by key path, in the order of `jax.tree.leaves`.

    Attributes:
      metadata: what it was saved with as `metadata=`.
    """

    def __init__(self, source: Source):
        """The leaves of `source`."""
        self._source = source
        self._leaves = {leaf.name: leaf for leaf in source.leaves}
        self.metadata = dict(source.metadata)

    def __getitem__(self, name: str) -> Leaf:
        """The leaf at the key path `name`."""
        return self._leaves[name]

    def __iter__(self) -> Iterator[str]:
        """The key paths."""
        return iter(self._leaves)

    def __len__(self) -> int:
        """The number of leaves."""
        return len(self._leaves)

    def __repr__(self) -> str:
        """Where it is, and how much of it."""
        return f"LazyCheckpoint({str(self._source.path)!r}, {len(self)} leaves)"


@checked(options=Options)
def lazy(path: epath.PathLike, *, options: Options = Options()) -> LazyCheckpoint:
    """Opens the checkpoint at `path`, of any format, without reading an array.

    Args:
      path: as for `flaxckpt.restore`.
      options: how to read.

    Raises:
      CheckpointNotFoundError: when there is no checkpoint at `path`.
      CorruptCheckpointError: when its metadata are damaged.

    Example:
      >>> import numpy as np
      >>> flaxckpt.save(tmp_path / "exported", {"params": {"kernel": np.eye(3)}})
      >>> kernel = flaxckpt.lazy(tmp_path / "exported")["params/kernel"]
      >>> kernel.shape, kernel.nbytes, kernel.read(np.s_[0])
      ((3, 3), 72, array([1., 0., 0.]))
    """
    return LazyCheckpoint(open_source(path, options))


# Reading every byte of a checkpoint and checking every checksum, without a device.


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
      path: the checkpoint.
      leaves: how many leaves it has, with those of items that are trees.
      nbytes: the size of its arrays, in bytes.
      problems: what is wrong, one line for each damaged leaf or file; empty when all is well.
    """

    path: epath.Path
    leaves: int
    nbytes: int
    problems: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether all is well."""
        return not self.problems


@checked(options=Options)
def verify(
    path: epath.PathLike,
    *,
    strict: bool = False,
    options: Options = Options(),
    progress: Callable[[int], None] = lambda nbytes: None,
) -> VerifyReport:
    """Reads every byte of the checkpoint at `path` and checks every checksum.

    It also finds chunks and files that are missing, that no leaf has, or of another size.

    Args:
      path: the directory of one checkpoint.
      strict: whether to raise when something is wrong.
      options: how to read; `max_host_bytes` bounds the memory.
      progress: is called with the number of bytes that were read since the last time.

    Raises:
      CheckpointNotFoundError: when there is no checkpoint at `path`, or it was deleted meanwhile.
      CorruptCheckpointError: when its metadata are damaged, or with `strict` anything is.

    Example:
      >>> flaxckpt.save(tmp_path / "exported", {"step": 7})
      >>> bool(flaxckpt.verify(tmp_path / "exported"))
      True
    """
    checkpoint = open_checkpoint(path, options)
    with unchanged(checkpoint.path, checkpoint.described):
        trees, unreadable = _trees(checkpoint)
        found = (
            *unreadable.values(),
            *_check_files(checkpoint, trees, unreadable),
            *(line for tree in trees for line in _check_tree(tree, options.buffer_bytes, progress)),
        )
    problems = tuple(dict.fromkeys(found))  # a damaged index is in the way of keys and of chunks
    if strict and problems:
        raise CorruptCheckpointError("\n".join(problems))
    records = [record for tree in trees for record in tree.tree.records]
    nbytes = sum(record.nbytes for record in records)
    return VerifyReport(epath.Path(checkpoint.path), len(records), nbytes, problems)


def _trees(checkpoint: Checkpoint) -> tuple[list[Checkpoint], dict[str, str]]:
    """The state and the items that are trees, and what is wrong with those that cannot be read."""
    trees, unreadable = [checkpoint], {}
    for name, item in checkpoint.described.items.items():
        try:
            trees += [] if item.tree is None else [open_item(checkpoint, name)]
        except CorruptCheckpointError as error:
            unreadable[name] = f"the item {name}: {error}"
    return trees, unreadable


def _check_files(
    checkpoint: Checkpoint, trees: Sequence[Checkpoint], unreadable: Container[str]
) -> Iterator[str]:
    """What is wrong with the files beside the metadata; not of items that are `unreadable`."""
    path, found = checkpoint.path, set(checkpoint.path.store.names(checkpoint.path))
    items = checkpoint.described.items.items()
    expected = {f"{t.directory}/{name}": file for t in trees for name, file in t.tree.files.items()}
    expected |= {f"{item}/{n}": file for item, record in items for n, file in record.files.items()}
    known = {f"{t.directory}/{layout.TREE_METADATA}" for t in trees} | layout.CHECKPOINT_ENTRIES
    if not path.store.can.sizes:  # of a bucket's data files nothing is known but their names
        known |= {name for name in found if any(_is_database(name, t.directory) for t in trees)}
    for name in sorted(found - known - expected.keys()):
        if name.split("/")[0] not in unreadable:
            yield f"the file {path}/{name} does not belong to the checkpoint"
    for name, file in expected.items():
        if name not in found:
            yield f"the file {path}/{name} is missing"
        elif problem := _file_problem(path / name, file):
            yield f"the file {path}/{name} {problem}"


def _is_database(name: str, directory: str) -> bool:
    """Whether a file is one of the key-value store of the tree in `directory`."""
    start = f"{directory}/"
    return name.startswith(start) and layout.is_of_database(name[len(start) :])


def _check_tree(tree: Checkpoint, ahead: int, progress: Callable[[int], None]) -> Iterator[str]:
    """What is wrong with the arrays of a tree."""
    where = "" if tree.directory == layout.ITEM else f"in {tree.directory}: "
    for line in (*_check_keys(tree), *_check_chunks(tree, ahead, progress)):
        yield f"{where}{line}"


def _file_problem(path: Location, file: SavedFile) -> str | None:
    """What is wrong with a file that is there."""
    found = path.store.stat(path)
    if found is not None and found.size not in (None, file.size):
        return f"has {found.size} bytes instead of {file.size}"
    if file.crc32c is None:
        return None
    same = crc32c.crc32c(path.read()) == file.crc32c
    return None if same else "does not match its checksum"


def _check_keys(checkpoint: Checkpoint) -> Iterator[str]:
    """What is in the key-value store and belongs to no leaf, or is missing or wrong there."""
    arrays = [r for r in checkpoint.tree.records if r.array is not None]
    if not arrays:
        return
    try:
        index = read_index(checkpoint.item)
        check_versions(checkpoint.item)
        requests = [_metadata_request(record) for record in arrays]
        found = [_value(checkpoint.item, index.get(k), len(v)) for k, v in requests]
    except CorruptCheckpointError as error:
        yield str(error)
        return
    for record, value, (_, expected) in zip(arrays, found, requests, strict=True):
        if value != expected:
            yield f"the leaf {record.name}: its zarr.json is missing or does not fit the tree"
    known = {layout.ATTEMPT_KEY, *(key for key, _ in requests)}.union(*map(_chunk_keys, arrays))
    for key in sorted(index.keys() - known):
        yield f"the value {key} in {checkpoint.item} belongs to no leaf"


def _value(directory: Location, place: ValueRef | bytes | None, size: int) -> bytes | None:
    """The value that lies at `place`, which should have `size` bytes; `None` when it has not."""
    if not isinstance(place, ValueRef):
        return place
    return bytes(ocdbt.read(directory, place)) if place.length == size else None


def _metadata_request(record: LeafRecord) -> tuple[str, bytes]:
    """The key of an array's metadata, and what they must be."""
    assert record.array is not None
    storage = storage_of(record.array.dtype)
    shape = zarr3.stored_shape(record.array.shape, storage)
    chunk = zarr3.stored_shape(record.array.chunks, storage)
    expected = zarr3.array_metadata(shape, chunk, storage.data_type)
    return zarr3.metadata_key(record.array.store), expected


def _chunk_keys(record: LeafRecord) -> set[str]:
    """The keys of the chunks of an array."""
    assert record.array is not None
    storage, array = storage_of(record.array.dtype), record.array
    region = zarr3.stored_region(whole(array.shape), storage)
    grids = chunks_of(region, zarr3.stored_shape(array.chunks, storage))
    return {zarr3.chunk_key(array.store, grid) for grid, _ in grids}


def _check_chunks(checkpoint: Checkpoint, ahead: int, progress: Callable[[int], None]) -> list[str]:
    """What is wrong with the chunks of each leaf."""
    reads = [
        ArrayRead(leaf.name, leaf.array, [whole(leaf.array.shape)])
        for leaf in checkpoint.leaves
        if leaf.array is not None
    ]
    try:
        return check_arrays(reads, ahead, progress)
    except CorruptCheckpointError as error:
        return [str(error)]
