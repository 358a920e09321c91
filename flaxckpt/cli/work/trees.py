"""The trees of a checkpoint, its state and its items, as branches with names and sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from flaxckpt.checkpoint import Checkpoint, open_item
from flaxckpt.leaves.lazy import nbytes_of
from flaxckpt.restoring.source import SavedLeaf, Source
from flaxckpt.storage import layout
from flaxckpt.tree.node import Node, named_nodes


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
    leaf: SavedLeaf | None = None
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
        branch.nbytes = nbytes_of(branch.leaf.array) if is_taken and branch.leaf.array else 0
        return
    for child in branch.children:
        _count(child, is_wanted)
    if is_wanted is not None:
        branch.children = [child for child in branch.children if child.count]
    branch.count = sum(child.count for child in branch.children)
    branch.nbytes = sum(child.nbytes for child in branch.children)


def leaves_of(branch: Branch) -> Iterator[SavedLeaf]:
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
