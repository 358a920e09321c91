"""Rebuilding a tree from data alone, without a target and without trusting the data.

A checkpoint never makes its reader import a module or call a function that it names. Builtins,
`FrozenDict` and `nnx.State` are rebuilt as they were; NamedTuples, dataclasses and boxes when
their class belongs to optax, flax or clu, or was registered by the user. Everything else, and
every dataclass with static fields (a `TrainState` has its `tx` there), becomes a `SavedNode`: a
mapping that says what it was, with everything inside exact.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax.core import FrozenDict
from flax.core import meta as flax_meta

from flaxckpt.tree.node import Node, plain_value
from flaxckpt.tree.structure import FACTORIES, class_name

Build = Callable[[Mapping[Any, Any]], Any]

# Packages whose NamedTuples, dataclasses and boxes are rebuilt. Nothing in them runs on creation.
TRUSTED_PACKAGES = ("optax", "flax", "clu")

_REGISTERED: dict[str, Build] = {}


@jax.tree_util.register_pytree_with_keys_class
class SavedNode(Mapping[Any, Any]):
    """A node that cannot be rebuilt from data alone: its children by their keys, and what it was.

    Attributes:
      class_name: `module.qualname` of the class that was saved.
      static: the names of its static fields, whose values a checkpoint does not hold.
    """

    def __init__(self, class_name: str, children: Mapping[Any, Any], static: Sequence[str] = ()):
        """A node of `class_name` with `children`."""
        self.class_name = class_name
        self.static = tuple(static)
        self._children = dict(children)

    def __getitem__(self, key: Any) -> Any:
        """The child at `key`."""
        return self._children[key]

    def __iter__(self) -> Iterator[Any]:
        """The keys, in the order in which they were saved."""
        return iter(self._children)

    def __len__(self) -> int:
        """The number of children."""
        return len(self._children)

    def __repr__(self) -> str:
        """The class it was, and the children."""
        return f"SavedNode({self.class_name}, {self._children!r})"

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Children under dict keys; the class and the keys are static."""
        children = [(jax.tree_util.DictKey(k), v) for k, v in self._children.items()]
        return children, (self.class_name, tuple(self._children), self.static)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Sequence[Any]) -> SavedNode:
        """The inverse of `tree_flatten_with_keys`."""
        name, keys, static = aux
        return cls(name, dict(zip(keys, children, strict=True)), static)


def register_node(cls: type, build: Build | None = None) -> None:
    """Lets restores without a target rebuild nodes of the class `cls`.

    Args:
      cls: a class that jax knows as a pytree node.
      build: makes an instance from `{key: child}`, the keys being field names, dict keys or
        indices; by default `cls(**children)`. It must give the static fields a value.

    Example:
      >>> import collections
      >>> Point = collections.namedtuple("Point", ["x", "y"])
      >>> flaxckpt.register_node(Point)
    """
    _REGISTERED[class_name(cls)] = build or (lambda children: cls(**children))


def build(nodes: Sequence[Node | None], leaves: Sequence[Any]) -> Any:
    """The tree of `nodes` in preorder (`None` for a leaf) over `leaves`.

    Raises:
      ValueError: when the nodes do not form one tree over the leaves.
    """
    if sum(node is None for node in nodes) != len(leaves):
        raise ValueError("the structure and the list of leaves have different lengths")
    remaining = list(leaves)
    stack: list[Any] = []
    # Backwards, every child is on the stack before its parent: no recursion, so no depth limit.
    for node in reversed(nodes):
        if node is None:
            stack.append(remaining.pop())
            continue
        if len(stack) < len(node.keys):
            raise ValueError("the structure ends within a node")
        children = [stack.pop() for _ in node.keys]
        stack.append(_construct(node, children))
    if len(stack) != 1:
        raise ValueError("the structure is not one tree")
    return stack[0]


def _construct(node: Node, children: list[Any]) -> Any:
    """One node over its rebuilt children."""
    items = {key.value: child for key, child in zip(node.keys, children, strict=True)}
    match node.kind:
        case "none":
            return None
        case "dict":
            return items
        case "list":
            return children
        case "tuple":
            return tuple(children)
        case "OrderedDict":
            return collections.OrderedDict(items)
        case "FrozenDict":
            return FrozenDict(items)
        case "nnx.State":
            return _nnx().State(items)
        case "defaultdict" if node.extra in FACTORIES:
            return collections.defaultdict(FACTORIES[node.extra], items)
    return _construct_class(node, items)


def _construct_class(node: Node, items: dict[Any, Any]) -> Any:
    """A node of a class that is not a builtin, as far as it may be built."""
    if registered := _REGISTERED.get(node.class_name):
        return registered(items)
    cls = _trusted_class(node.class_name)
    if cls is not None:
        if node.kind == "namedtuple" and _fields(cls) == set(items):
            return cls(**items)
        if node.kind == "dataclass" and not node.static and _fields(cls) == set(items):
            return cls(**items)
        if node.kind == "box" and len(items) == 1:
            return _construct_box(cls, node, next(iter(items.values())))
    return SavedNode(node.class_name or node.kind, items, node.static)


def _construct_box(cls: Any, node: Node, value: Any) -> Any:
    """A box around `value`: a flax `Partitioned` with its names, or an `nnx.Variable`."""
    metadata = {key: plain_value(item) for key, item in (node.extra or {}).items()}
    try:
        if issubclass(cls, flax_meta.Partitioned):
            return cls(value, **metadata)
        if issubclass(cls, _nnx().Variable):
            return cls.from_metadata(value, metadata)
    except (TypeError, ValueError, KeyError):
        pass  # metadata of another version of flax, or made up
    return SavedNode(node.class_name, {"value": value})


def _fields(cls: type) -> set[str] | None:
    """The names of the fields of a NamedTuple or a `flax.struct.dataclass`."""
    if issubclass(cls, tuple):
        return set(getattr(cls, "_fields", ()))
    if dataclasses.is_dataclass(cls) and hasattr(cls, "_flax_dataclass"):
        return {f.name for f in dataclasses.fields(cls)}
    return None


def _trusted_class(name: str) -> Any:
    """The class called `name` (`module.qualname`) in a trusted package, or `None`.

    Only modules that are loaded are looked into: the packages are imported by the names above,
    never by a name from the file.
    """
    package = name.partition(".")[0]
    module_name, _, attribute = name.rpartition(".")
    if package not in TRUSTED_PACKAGES:
        return None
    if package == "optax":
        import optax.contrib  # noqa: F401
    elif package == "flax":
        import flax.linen
        import flax.nnx  # noqa: F401
    else:
        import clu.metrics  # noqa: F401
    found = getattr(sys.modules.get(module_name), attribute, None)
    return found if isinstance(found, type) and class_name(found) == name else None


def _nnx() -> Any:
    """`flax.nnx`, imported where it is needed: it takes a quarter of a second."""
    from flax import nnx

    return nnx
