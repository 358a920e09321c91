from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.core import FrozenDict
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt.errors import UnsupportedKeyError
from flaxckpt.tree.keypaths import Key
from flaxckpt.tree.node import plain_value
from flaxckpt.tree.structure import class_name, split_container
from tests.tree.strategies import Pair, Plain, Point


@pytest.mark.parametrize(
    ("value", "kind", "key_kind"),
    [
        (None, "none", None),
        ({"a": 1}, "dict", "dict"),
        (collections.OrderedDict(a=1), "OrderedDict", "dict"),
        (collections.defaultdict(list, a=1), "defaultdict", "dict"),
        (FrozenDict(a=1), "FrozenDict", "dict"),
        (nnx.State({"a": nnx.Param(1)}), "nnx.State", "dict"),
        ([1], "list", "seq"),
        ((1,), "tuple", "seq"),
        (Point(1, 2), "namedtuple", "attr"),
        (Pair(1, 2), "dataclass", "attr"),
        (Plain(1), "dataclass", "attr"),
        (nn.Partitioned(1, names=("a",)), "box", None),
        (nnx.Param(1), "box", None),
    ],
)
def test_each_container_has_its_kind(value, kind, key_kind):
    node, children = split_container(value, ())
    assert node.kind == kind
    assert len(children) == len(node.keys)
    assert key_kind is None or {key.kind for key in node.keys} == {key_kind}


@pytest.mark.parametrize("value", [1, "a", b"a", 1.5, object(), {1, 2}, jnp.ones(2), range(3)])
def test_what_jax_has_as_a_leaf_is_a_leaf(value):
    assert split_container(value, ()) is None


@pytest.mark.parametrize("base", [dict, list, tuple])
def test_a_subclass_of_a_builtin_is_a_leaf_as_in_jax(base):
    value = type("Mine", (base,), {})()
    assert split_container(value, ()) is None
    assert jax.tree.leaves(value) == [value]


def test_the_keys_of_a_dict_are_sorted_as_in_jax():
    node, children = split_container({"b": 1, "a": 2}, ())
    assert [key.value for key in node.keys] == ["a", "b"]
    assert children == [2, 1]


def test_the_keys_of_an_ordered_dict_keep_their_order():
    node, _ = split_container(collections.OrderedDict(b=1, a=2), ())
    assert [key.value for key in node.keys] == ["b", "a"]


@pytest.mark.parametrize("cls", [dict, FrozenDict, lambda d: collections.defaultdict(int, d)])
def test_keys_that_cannot_be_sorted_are_refused_with_their_place(cls):
    with pytest.raises(UnsupportedKeyError, match="the dict at params/0 cannot be sorted"):
        split_container(cls({1: 1, "a": 2}), (Key("dict", "params"), Key("seq", 0)))


def test_static_fields_are_named():
    @flax.struct.dataclass
    class State:
        step: int
        fn: object = flax.struct.field(pytree_node=False)

    node, children = split_container(State(1, print), ())
    assert (node.static, children) == (("fn",), [1])


def test_the_class_of_a_node_is_named_in_full():
    assert split_container(Point(1, 2), ())[0].class_name == "tests.tree.strategies.Point"
    assert class_name(FrozenDict) == "flax.core.frozen_dict.FrozenDict"


@pytest.mark.parametrize(("factory", "name"), [(list, "list"), (int, "int"), (print, None)])
def test_a_factory_is_named_when_a_reader_may_call_it(factory, name):
    assert split_container(collections.defaultdict(factory), ())[0].extra == name


def test_a_box_keeps_its_axis_names():
    node, _ = split_container(nn.Partitioned(1, names=("a", None)), ())
    assert {key: plain_value(v) for key, v in node.extra.items()} == {"names": ("a", None)}


def test_metadata_of_a_variable_that_json_cannot_hold_is_left_out():
    node, _ = split_container(nnx.Param(1, tag="x", hook=print, axes=("a", ("b", 1))), ())
    assert "hook" not in node.extra
    assert plain_value(node.extra["tag"]) == "x"
    assert plain_value(node.extra["axes"]) == ("a", ("b", 1))


_plain_values = st.recursive(
    st.none() | st.text() | st.booleans() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(_plain_values)
def test_plain_box_metadata_comes_back_exactly(value):
    node, _ = split_container(nnx.Param(1, mine=value), ())
    assert repr(plain_value(node.extra["mine"])) == repr(value)


def test_a_class_that_is_registered_without_keys_has_indices():
    class Mine:
        pass

    jax.tree_util.register_pytree_node(Mine, lambda _: ((1, 2), None), lambda *_: Mine())
    node, children = split_container(Mine(), ())
    assert (node.kind, node.keys, children) == ("object", (Key("seq", 0), Key("seq", 1)), [1, 2])


def test_a_named_tuple_that_was_registered_is_flattened_as_jax_does():
    class Half(NamedTuple):
        a: int
        b: int

    jax.tree_util.register_pytree_node(Half, lambda h: ((h.a,), h.b), lambda b, c: Half(c[0], b))
    assert split_container(Half(1, 2), ())[1] == jax.tree.leaves(Half(1, 2)) == [1]


def test_a_node_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        split_container([], ())[0].kind = "tuple"
