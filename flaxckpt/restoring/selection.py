"""What of a source is wanted, before it is fitted to a target. No I/O."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flax import traverse_util

from flaxckpt.errors import RuleError
from flaxckpt.options import Options
from flaxckpt.restoring.leaf import Leaf, saved_leaf
from flaxckpt.restoring.source import SavedLeaf, Source
from flaxckpt.tree.keypaths import name_of, parse_name
from flaxckpt.tree.node import Node, named_nodes
from flaxckpt.tree.select import Only, selector, subtree_of


class Saved(NamedTuple):
    """The wanted part of a source.

    Attributes:
      leaves: by key path; that of a subtree begins at its root.
      nodes: the structure around them.
      is_whole: whether the structure has these leaves and no others.
    """

    leaves: Mapping[str, SavedLeaf]
    nodes: Sequence[Node | None]
    is_whole: bool


def select(source: Source, only: Only | None) -> Saved:
    """The part of `source` that `only` selects.

    Raises:
      RuleError: when that is nothing.
    """
    if only is None:
        return Saved({leaf.name: leaf for leaf in source.leaves}, source.nodes, is_whole=True)
    root = subtree_of(only)
    if root is not None:
        return _subtree(source, root)
    wanted = selector(only)
    leaves = {leaf.name: leaf for leaf in source.leaves if wanted(leaf.name)}
    if not leaves:
        raise _nothing(source, only)
    return Saved(leaves, source.nodes, is_whole=False)


def _subtree(source: Source, root: str) -> Saved:
    """The node at `root` and all below it, as a tree of its own."""
    root = root.strip("/")
    begin = next((i for i, (name, _) in enumerate(named_nodes(source.nodes)) if name == root), None)
    if begin is None:
        raise _nothing(source, root)
    nodes = source.nodes[begin : _end(source.nodes, begin)]
    skipped = sum(node is None for node in source.nodes[:begin])
    found = source.leaves[skipped : skipped + sum(node is None for node in nodes)]
    cut = len(root) + 1 if root else 0
    leaves = {leaf.name[cut:]: leaf for leaf in found}
    return Saved(leaves, nodes, is_whole=True)


def _end(nodes: Sequence[Node | None], begin: int) -> int:
    """Where the tree that begins at `begin` of a preorder ends."""
    open_nodes, end = 1, begin
    while open_nodes:
        node = nodes[end]
        open_nodes += -1 if node is None else len(node.keys) - 1
        end += 1
    return end


def _nothing(source: Source, only: Only) -> RuleError:
    """The error of a selection that selects nothing."""
    names = [name for name, _ in named_nodes(source.nodes) if name]
    wanted = only if isinstance(only, str) else ""
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    top = list(dict.fromkeys(name.partition("/")[0] for name in names))[:10]
    return RuleError(
        f"only={only!r} selects nothing of the checkpoint at {source.path}. It has "
        f"{', '.join(close or top) or 'no leaves'}. Correct the path."
    )


def readable(source: Source, saved: Saved, options: Options) -> dict[str, Leaf]:
    """The leaves of `saved`, each as one that can be read by itself."""
    return {name: saved_leaf(source, leaf, name, options) for name, leaf in saved.leaves.items()}


def nested(values: Mapping[str, Any]) -> Any:
    """`values`, by key path, as dicts within dicts.

    Raises:
      RuleError: when a path leads through another one's value.

    Example:
      >>> nested({"params/kernel": 1, "step": 2})
      {'params': {'kernel': 1}, 'step': 2}
    """
    paths = {parse_name(name): value for name, value in values.items()}
    for path in paths:
        if any(path[:length] in paths for length in range(len(path))):
            name = name_of(path)
            raise RuleError(f"{name} lies below another leaf. Rename or drop one of the two.")
    return paths[()] if () in paths else traverse_util.unflatten_dict(paths)
