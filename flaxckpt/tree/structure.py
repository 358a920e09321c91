"""A pytree taken apart: its nodes in preorder, and its leaves under their key paths.

The order of the leaves is that of `jax.tree.leaves`. Empty nodes (`None`, `()`, `EmptyState()`,
...) are nodes like any other, with no children; they are never leaves and never dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flaxckpt.errors import UnsupportedKeyError
from flaxckpt.tree import containers
from flaxckpt.tree.keypaths import KeyPath, child_name
from flaxckpt.tree.node import Node


@dataclasses.dataclass(frozen=True)
class Flat:
    """A pytree as data.

    Attributes:
      nodes: every node in preorder, `None` for a leaf.
      leaves: the leaves, in the order of `jax.tree.leaves`.
      names: the name of each leaf; boxes (`nn.Partitioned`, `nnx.Variable`) leave no trace in it.
      paths: the key path of each leaf as jax has it, boxes included.
      empties: the name and the key path of each empty node, with the node.
    """

    nodes: tuple[Node | None, ...]
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    paths: tuple[KeyPath, ...]
    empties: tuple[tuple[str, KeyPath, Node], ...]


def flatten(tree: Any) -> Flat:
    """Takes `tree` apart.

    Raises:
      UnsupportedKeyError: when a key cannot be written down, or two leaves would share a name.

    Example:
      >>> flatten({"a": [1, None]}).names
      ('a/0',)
    """
    nodes: list[Node | None] = []
    leaves: list[Any] = []
    names: list[str] = []
    paths: list[KeyPath] = []
    empties: list[tuple[str, KeyPath, Node]] = []
    stack: list[tuple[Any, str, KeyPath]] = [(tree, "", ())]
    while stack:
        value, name, path = stack.pop()
        split = containers.split(value, path)
        if split is None:
            nodes.append(None)
            leaves.append(value)
            names.append(name)
            paths.append(path)
            continue
        node, children = split
        nodes.append(node)
        if not children:
            empties.append((name, path, node))
        for key, child in zip(reversed(node.keys), reversed(children), strict=True):
            inner = name if node.is_box else child_name(name, key.value)
            stack.append((child, inner, (*path, key)))
    _check_unique(names)
    return Flat(tuple(nodes), tuple(leaves), tuple(names), tuple(paths), tuple(empties))


def _check_unique(names: Sequence[str]) -> None:
    """Refuses two leaves of one name."""
    if len(set(names)) == len(names):
        return
    seen: set[str] = set()
    twice = next(n for n in names if n in seen or seen.add(n))  # type: ignore[func-returns-value]
    raise UnsupportedKeyError(
        f"two leaves of the tree have the key path {twice!r}. Give the children of that node "
        "different keys (jax.tree_util.register_pytree_with_keys)."
    )
