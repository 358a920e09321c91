"""A pytree taken apart: its nodes in preorder, and its leaves under their key paths.

The order of the leaves is that of `jax.tree.leaves`. Empty nodes (`None`, `()`, `EmptyState()`,
...) are nodes like any other, with no children; they are never leaves and never dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from flaxckpt.errors import UnsupportedKeyError
from flaxckpt.tree import containers
from flaxckpt.tree.containers import Node
from flaxckpt.tree.keypaths import KeyPath, name_of


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
    leaf_paths: list[tuple[tuple[Any, ...], KeyPath]] = []
    empties: list[tuple[str, KeyPath, Node]] = []
    stack: list[tuple[Any, tuple[Any, ...], KeyPath]] = [(tree, (), ())]
    while stack:
        value, keys, path = stack.pop()
        split = containers.split(value, path)
        if split is None:
            nodes.append(None)
            leaves.append(value)
            leaf_paths.append((keys, path))
            continue
        node, children = split
        nodes.append(node)
        if not children:
            empties.append((name_of(keys), path, node))
        for key, child in zip(reversed(node.keys), reversed(children), strict=True):
            stack.append((child, keys if node.is_box else (*keys, key.value), (*path, key)))
    names = tuple(name_of(keys) for keys, _ in leaf_paths)
    _check_unique(names)
    return Flat(
        tuple(nodes), tuple(leaves), names, tuple(path for _, path in leaf_paths), tuple(empties)
    )


def named_nodes(nodes: Sequence[Node | None]) -> Iterator[tuple[str, Node | None]]:
    """Each node of a preorder with its name, boxes leaving no trace in it; `None` is a leaf.

    Raises:
      IndexError: when the nodes do not form one tree.

    Example:
      >>> [name for name, _ in named_nodes(flatten({"a": [1, None]}).nodes)]
      ['', 'a', 'a/0', 'a/1']
    """
    pending: list[tuple[Any, ...]] = [()]
    for node in nodes:
        keys = pending.pop()
        yield name_of(keys), node
        for key in reversed(node.keys) if node else ():
            pending.append(keys if node and node.is_box else (*keys, key.value))


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
