"""The places of the leaves and the empty nodes of a tree, for pairing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from flaxckpt.tree.keypaths import child_name
from flaxckpt.tree.node import Node
from flaxckpt.tree.optimizers import OPT_STATE, Known, State, as_state, optimizers, state_fields
from flaxckpt.tree.pairing import Place, spelling


class _Above(NamedTuple):
    """What is known of a node from those above it.

    Attributes:
      name: its name, `keys` and `positions`: its keys, as they are and as indices.
      root: the optimizer that it is in.
      state: the state that it is in, and `depth`: how many keys lead there.
      parent: the node above it, within the optimizer.
    """

    name: str = ""
    keys: tuple[Any, ...] = ()
    positions: tuple[Any, ...] = ()
    root: str | None = None
    state: State | None = None
    depth: int = 0
    parent: Node | None = None


def places(nodes: Sequence[Node | None], known: Known = Known()) -> dict[str, Place]:
    """The place of each leaf and of each empty node, by name.

    Args:
      nodes: a tree in preorder, `None` for a leaf.
      known: what the classes of the other tree tell.
    """
    found: dict[str, Place] = {}
    pending = [_Above()]
    for node, is_optimizer in zip(nodes, optimizers(nodes), strict=True):
        above = pending.pop()
        if node is None or not node.keys:
            found[above.name] = _place(above)
        elif node.is_box:
            pending.append(above)
        else:
            here = _entered(above, node, known) if _is_within(above, is_optimizer, known) else above
            pending += reversed(list(_below(here, node)))
    return found


def _place(above: _Above) -> Place:
    """The place of a leaf."""
    state = above.state and above.state._replace(inner=spelling(above.keys[above.depth :]))
    return Place(spelling(above.keys), spelling(above.positions), state)


def _is_within(above: _Above, is_optimizer: bool, known: Known) -> bool:
    """Whether a node is an optimizer, or a part of one."""
    named = bool(above.keys) and above.keys[-1] == OPT_STATE
    known_root = spelling(above.keys) in known.roots
    return above.root is not None or is_optimizer or named or known_root


def _entered(above: _Above, node: Node, known: Known) -> _Above:
    """What is known at a node of an optimizer."""
    root = spelling(above.keys) if above.root is None else above.root
    state = as_state(node, above.parent, root, known)
    if state is None:
        return above._replace(root=root)
    return above._replace(root=root, state=state, depth=len(above.keys))


def _below(above: _Above, node: Node) -> Iterator[_Above]:
    """What is known of each child of `node`."""
    parent = node if above.root is not None else None
    for index, key in enumerate(node.keys):
        position = index if node.kind == "namedtuple" else key.value
        yield above._replace(
            name=child_name(above.name, key.value),
            keys=(*above.keys, key.value),
            positions=(*above.positions, position),
            parent=parent,
        )


def known_by(nodes: Sequence[Node | None]) -> Known:
    """What the classes of a tree tell about another that has none."""
    states = (place.state for place in places(nodes).values())
    roots = frozenset(state.root for state in states if state is not None and state.class_name)
    return Known(state_fields(nodes), roots)
