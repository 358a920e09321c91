"""Hostile keys and trees, for property tests."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import numpy as np
import optax
from flax.core import FrozenDict
from hypothesis import strategies as st

import flaxckpt

HOSTILE_STRINGS = (
    "", "a.b", "a/b", ".", "..", "/", "%", "%%", "%!", "%2E", "%2F", "%25", "%!{}", "%30", "0", "7",
    "-7", "00", "-", "+1", "1.0", "True", "None", "zarr.json", "c", "_METADATA", "é", "日本", "😀",
    " ", "\n", "\0", "~1", '"', "\\", "٣", "flaxckpt", "value",
)  # fmt: skip

strings = st.sampled_from(HOSTILE_STRINGS) | st.text(max_size=4)
ints = (
    st.integers(-9, 9) | st.integers() | st.sampled_from((2**63 - 1, 2**63, -(2**63) - 1, 10**40))
)
_flat_keys = strings | ints | st.booleans() | st.floats() | st.binary(max_size=3) | st.none()
keys = _flat_keys | st.recursive(
    _flat_keys, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4
)


class Point(NamedTuple):
    """A NamedTuple of the user's."""

    x: Any
    y: Any


class Nothing(NamedTuple):
    """A NamedTuple without fields."""


@flax.struct.dataclass
class Pair:
    """A flax dataclass; its fields are not in the order of the alphabet."""

    second: Any
    first: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Plain:
    """A dataclass that only jax knows."""

    only: Any


for _cls in (Point, Nothing, Pair, Plain):
    flaxckpt.register_node(_cls)

leaves = st.one_of(
    st.integers(),
    st.floats(),
    st.text(max_size=2),
    st.binary(max_size=2),
    st.booleans(),
    st.builds(np.arange, st.integers(0, 3)),
)
_empties = st.sampled_from((None, (), Nothing(), optax.EmptyState(), optax.MaskedNode()))
# jax sorts the keys of a dict, so those of one dict are of one type.
_sortable = (strings, ints, st.booleans(), st.binary(max_size=2), st.floats(allow_nan=False),
             st.tuples(strings))  # fmt: skip


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Every kind of container over `inner`."""
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        *(st.dictionaries(key, inner, max_size=3) for key in _sortable),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        # A FrozenDict makes plain dicts of the dicts directly in it.
        st.dictionaries(strings, st.lists(inner, max_size=2), max_size=3).map(FrozenDict),
        st.dictionaries(strings, st.dictionaries(strings, leaves | _empties)).map(FrozenDict),
        st.dictionaries(ints, inner, max_size=2).map(lambda d: collections.defaultdict(list, d)),
        st.builds(Point, inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(Plain, inner),
    )


trees = st.recursive(leaves | _empties, _containers, max_leaves=12)


def same_tree(a: Any, b: Any) -> bool:
    """Whether two trees have the same containers, exact keys, and the very same leaves."""
    structures = jax.tree.structure(a), jax.tree.structure(b)
    paths = [[repr(path) for path, _ in jax.tree.leaves_with_path(tree)] for tree in (a, b)]
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=False)
    return (
        structures[0] == structures[1]
        and str(structures[0]) == str(structures[1])
        and paths[0] == paths[1]
        and all(x is y for x, y in pairs)
    )
