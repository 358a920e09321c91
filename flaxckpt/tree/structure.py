"""A tree taken apart: its nodes, its containers, its leaves by name."""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import sys
from collections.abc import Sequence
from typing import Any

import jax
from flax.core import FrozenDict
from flax.core import meta as flax_meta

from flaxckpt.errors import UnsupportedKeyError
from flaxckpt.tree.keypaths import Key, KeyPath, child_name, name_of
from flaxckpt.tree.node import Node, NodeKind

# What a container is, as data: its kind, its class, and the keys of its children.


# defaultdict factories that a reader may call.
FACTORIES: dict[str, type] = {t.__name__: t for t in (list, dict, set, tuple, int, float, str)}


# Taking containers apart: each as a node and its children.


def split_container(value: Any, path: KeyPath) -> tuple[Node, list[Any]] | None:
    """The container `value` as a node and its children; `None` when `value` is a leaf.

    `path` is where `value` stands, for the error of a dict that jax cannot flatten.
    """
    cls = type(value)
    if cls is dict:
        return _split_dict(_jax_order(value, path))
    if cls is list or cls is tuple:
        return _split_sequence("list" if cls is list else "tuple", value)
    if value is None:
        return Node("none"), []
    if isinstance(value, tuple) and hasattr(cls, "_fields") and not _is_registered(value):
        keys = tuple(Key("attr", field) for field in cls._fields)
        return Node("namedtuple", keys, class_name(cls)), list(value)
    return _split_registered(value, path)


def _split_sequence(kind: NodeKind, value: Sequence[Any]) -> tuple[Node, list[Any]]:
    """A list or tuple node."""
    return Node(kind, _indices(len(value))), list(value)


def _jax_order(value: dict[Any, Any], path: KeyPath) -> list[tuple[Any, Any]]:
    """The items of a dict in the order in which jax flattens them: sorted by key."""
    try:
        return sorted(value.items(), key=operator.itemgetter(0))
    except TypeError as error:
        raise _unsortable(path, error) from None


def _unsortable(path: KeyPath, error: TypeError) -> UnsupportedKeyError:
    """The error of a mapping whose keys cannot be compared."""
    where = name_of(tuple(key.value for key in path)) or "the root"
    return UnsupportedKeyError(
        f"the keys of the dict at {where} cannot be sorted, so jax cannot flatten it: {error}. "
        "Use keys of one type, or an OrderedDict."
    )


def _is_registered(value: Any) -> bool:
    """Whether a NamedTuple was registered with jax, which then flattens it in its own way."""
    _, aux = jax.tree_util.default_registry.flatten_one_level(value)
    return aux is not type(value)


def _split_registered(value: Any, path: KeyPath) -> tuple[Node, list[Any]] | None:
    """`split` for what jax's registry knows."""
    try:
        pairs = jax.tree_util.default_registry.flatten_one_level_with_keys(value)
    except TypeError as error:
        mapping = isinstance(value, FrozenDict | collections.defaultdict)
        if not (mapping or _is_nnx(type(value), "State")):
            raise
        raise _unsortable(path, error) from None
    if pairs is None:
        return None
    items = [(_key_of(key), child) for key, child in pairs[0]]
    keys, children = tuple(k for k, _ in items), [child for _, child in items]
    cls = type(value)
    if cls is collections.OrderedDict:
        return Node("OrderedDict", keys), children
    if cls is FrozenDict:
        return Node("FrozenDict", keys), children
    if cls is collections.defaultdict:
        return Node("defaultdict", keys, extra=_factory_name(value)), children
    if _is_nnx(cls, "State"):
        return Node("nnx.State", keys), children
    if len(keys) == 1 and (isinstance(value, flax_meta.AxisMetadata) or _is_nnx(cls, "Variable")):
        return Node("box", keys, class_name(cls), extra=_box_metadata(value)), children
    if dataclasses.is_dataclass(cls):
        return Node("dataclass", keys, class_name(cls), _static_fields(cls, keys)), children
    return Node("object", keys, class_name(cls)), children


def _split_dict(items: list[tuple[Any, Any]]) -> tuple[Node, list[Any]]:
    """A dict node over `items`."""
    return Node("dict", tuple(Key("dict", k) for k, _ in items)), [child for _, child in items]


@functools.lru_cache
def _indices(count: int) -> tuple[Key, ...]:
    """The keys of a sequence of `count` children."""
    return tuple(Key("seq", i) for i in range(count))


def _key_of(key: Any) -> Key:
    """A key of jax as ours."""
    match key:
        case jax.tree_util.DictKey():
            return Key("dict", key.key)
        case jax.tree_util.GetAttrKey():
            return Key("attr", key.name)
        case jax.tree_util.SequenceKey():
            return Key("seq", key.idx)
        case jax.tree_util.FlattenedIndexKey():
            return Key("seq", key.key)
    return Key("dict", str(key))


def class_name(cls: type) -> str:
    """The name under which a class stands in a checkpoint."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_nnx(cls: type, name: str) -> bool:
    """Whether `cls` is nnx's class `name`, without importing nnx for those who do not use it."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and issubclass(cls, getattr(nnx, name))


def _static_fields(cls: Any, keys: tuple[Key, ...]) -> tuple[str, ...]:
    """The fields of a dataclass that are not children."""
    children = {key.value for key in keys}
    return tuple(f.name for f in dataclasses.fields(cls) if f.name not in children)


def _factory_name(value: collections.defaultdict[Any, Any]) -> str | None:
    """The factory of a defaultdict, when a reader may call it."""
    return next((n for n, t in FACTORIES.items() if t is value.default_factory), None)


def _box_metadata(value: Any) -> dict[str, Any]:
    """What a box says of its value, as far as JSON can hold it."""
    if isinstance(value, flax_meta.AxisMetadata):
        return {"names": _plain(getattr(value, "names", None))}
    return {key: _plain(item) for key, item in value.get_metadata().items() if _is_plain(item)}


def _is_plain(item: Any) -> bool:
    """Whether JSON can hold `item` (tuples as lists)."""
    if isinstance(item, tuple | list):
        return all(map(_is_plain, item))
    return item is None or isinstance(item, str | bool | int | float)


def _plain(item: Any) -> Any:
    """`item` with its tuples marked, so that they come back as tuples."""
    if isinstance(item, tuple):
        return {"tuple": [_plain(i) for i in item]}
    return [_plain(i) for i in item] if isinstance(item, list) else item


# A pytree taken apart: its nodes in preorder, and its leaves under their key paths.
#
# The order of the leaves is that of `jax.tree.leaves`. Empty nodes (`None`, `()`, `EmptyState()`,
# ...) are nodes like any other, with no children; they are never leaves and never dropped.


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
        split = split_container(value, path)
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
