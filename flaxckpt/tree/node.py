"""What a container is, as data: its kind, its class, and the keys of its children."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from flaxckpt.tree.keypaths import Key, child_name

NodeKind = Literal[
    "none", "dict", "OrderedDict", "defaultdict", "FrozenDict", "nnx.State", "list", "tuple",
    "namedtuple", "dataclass", "box", "object",
]  # fmt: skip

# The keys of these are dict keys; those of lists and tuples are indices, the rest attributes.
MAPPING_KINDS = frozenset({"dict", "OrderedDict", "defaultdict", "FrozenDict", "nnx.State"})
SEQUENCE_KINDS = frozenset({"list", "tuple"})


@dataclasses.dataclass(frozen=True)
class Node:
    """One container of a tree.

    Attributes:
      kind: what it is.
      keys: the keys of its children, in the order of `jax.tree.leaves`.
      class_name: `module.qualname` of its class; empty for builtins.
      static: the names of a dataclass' static fields, whose values are not saved.
      extra: JSON: the metadata of a box (axis names, tags), or the factory of a defaultdict.
    """

    kind: NodeKind
    keys: tuple[Key, ...] = ()
    class_name: str = ""
    static: tuple[str, ...] = ()
    extra: Any = None

    @property
    def is_box(self) -> bool:
        """Whether it only wraps one value, and so is no part of the value's name."""
        return self.kind == "box"


def named_nodes(nodes: Sequence[Node | None]) -> Iterator[tuple[str, Node | None]]:
    """Each node of a preorder with its name, boxes leaving no trace in it; `None` is a leaf.

    Raises:
      IndexError: when the nodes do not form one tree.

    Example:
      >>> tree = [Node("dict", (Key("dict", "a"),)), Node("list", (Key("seq", 0),)), None]
      >>> [name for name, _ in named_nodes(tree)]
      ['', 'a', 'a/0']
    """
    pending = [""]
    for node in nodes:
        name = pending.pop()
        yield name, node
        if node is not None:
            is_box = node.is_box
            pending.extend(
                name if is_box else child_name(name, key.value) for key in reversed(node.keys)
            )


def plain_value(data: Any) -> Any:
    """The box metadata that `_plain` wrote as `data`."""
    if isinstance(data, dict):
        return tuple(plain_value(i) for i in data["tuple"])
    return [plain_value(i) for i in data] if isinstance(data, list) else data
