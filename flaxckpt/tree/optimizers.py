"""The states of optimizers within a tree: NamedTuples of optax, or what other trees make of them.

An optimizer is the topmost node of which nothing but states lies below: a NamedTuple of optax, a
tuple of these; and whatever is called `opt_state`. In trees that have lost the classes (nnx, other
libraries), a state is a mapping that has the fields of one, or one member of a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flaxckpt.tree.node import MAPPING_KINDS, SEQUENCE_KINDS, Node

# What flax calls the state of an optimizer in its own classes.
OPT_STATE = "opt_state"

Fields = frozenset[Any]


class State(NamedTuple):
    """The state of one gradient transformation that a leaf lies in.

    Attributes:
      root: the keys of the optimizer that it belongs to, and `inner` those from the state to the
        leaf, in the spelling that all trees have in common.
      class_name: its class, without the module; empty in trees that do not tell.
      fields: the names of its fields.
    """

    root: str
    class_name: str
    fields: Fields
    inner: str = ""


class Known(NamedTuple):
    """What the classes of one tree tell about another that has none.

    Attributes:
      fields: the fields of each class of state.
      roots: the keys of the optimizers, in the common spelling.
    """

    fields: frozenset[Fields] = frozenset()
    roots: frozenset[str] = frozenset()


def is_state(node: Node | None) -> bool:
    """Whether a node is the state of one of optax's gradient transformations."""
    return node is not None and node.kind == "namedtuple" and node.class_name.startswith("optax.")


def state_fields(nodes: Sequence[Node | None]) -> frozenset[Fields]:
    """The fields of each class of optimizer state in a tree."""
    return frozenset(_fields(node) for node in nodes if node is not None and is_state(node)) - {
        frozenset()
    }


def _fields(node: Node) -> Fields:
    """The keys of a node."""
    return frozenset(key.value for key in node.keys)


def optimizers(nodes: Sequence[Node | None]) -> list[bool]:
    """Whether each node of a preorder has nothing but states of optax in it, and at least one."""
    found = [(False, False)] * len(nodes)
    stack: list[tuple[bool, bool]] = []  # of the children: nothing else in it, a state in it
    for position in reversed(range(len(nodes))):
        node = nodes[position]
        below = [stack.pop() for _ in node.keys] if node is not None else []
        if node is None:
            found[position] = (False, False)
        elif is_state(node) or not node.keys:
            found[position] = (True, is_state(node))
        elif node.kind in SEQUENCE_KINDS:
            found[position] = (all(only for only, _ in below), any(has for _, has in below))
        stack.append(found[position])
    return [only and has for only, has in found]


def as_state(node: Node, parent: Node | None, root: str, known: Known) -> State | None:
    """The state that `node` is, within the optimizer `root`; `None` when it is none.

    The `parent` is that of the node; the optimizer itself has none.
    """
    if is_state(node):
        return State(root, node.class_name.rpartition(".")[2], _fields(node))
    if node.kind not in MAPPING_KINDS or not node.keys:
        return None
    fields = _fields(node)
    if known.fields:
        return State(root, "", fields) if fields in known.fields else None
    is_member = parent is None or _is_chain(parent)
    return State(root, "", fields) if is_member and not _is_chain(node) else None


def _is_chain(node: Node) -> bool:
    """Whether a node is a sequence, also one that has become a mapping by index."""
    if node.kind in SEQUENCE_KINDS:
        return True
    keys = (str(key.value) for key in node.keys)
    return node.kind in MAPPING_KINDS and all(key.isdecimal() for key in keys)
