from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import given

from flaxckpt.errors import UnsupportedKeyError
from flaxckpt.tree.node import Node, named_nodes
from flaxckpt.tree.structure import flatten
from tests.tree.strategies import Point, trees


@given(trees)
def test_leaves_are_those_of_jax_in_the_same_order(tree):
    ours, theirs = flatten(tree).leaves, jax.tree.leaves(tree)
    assert len(ours) == len(theirs)
    assert all(a is b for a, b in zip(ours, theirs, strict=True))


@given(trees)
def test_names_are_unique(tree):
    names = flatten(tree).names
    assert len(set(names)) == len(names)


@given(trees)
def test_every_leaf_has_a_name_and_a_path(tree):
    flat = flatten(tree)
    assert len(flat.names) == len(flat.paths) == len(flat.leaves) == flat.nodes.count(None)


@given(trees)
def test_named_nodes_names_the_leaves_as_flatten_does(tree):
    flat = flatten(tree)
    assert [name for name, node in named_nodes(flat.nodes) if node is None] == list(flat.names)


@given(trees)
def test_every_node_without_children_is_an_empty(tree):
    flat = flatten(tree)
    empties = [(name, n) for name, n in named_nodes(flat.nodes) if n is not None and not n.keys]
    assert empties == [(name, node) for name, _, node in flat.empties]


@pytest.mark.parametrize("empty", [None, (), [], {}, optax.EmptyState(), optax.MaskedNode()])
def test_an_empty_node_is_kept_and_is_no_leaf(empty):
    flat = flatten({"a": empty, "b": 1})
    assert flat.names == ("b",)
    assert [name for name, _, _ in flat.empties] == ["a"]


def test_keys_that_orbax_confuses_have_two_names():
    assert flatten({"a.b": 1, "a": {"b": 2}}).names == ("a/b", "a.b")


def test_an_index_and_a_string_of_digits_have_two_names():
    assert flatten([1]).names != flatten({"0": 1}).names


def test_an_index_and_an_int_key_have_one_name():
    assert flatten([1]).names == flatten({0: 1}).names


def test_a_field_and_a_dict_key_have_one_name():
    assert flatten(Point(1, 2)).names == flatten({"x": 1, "y": 2}).names == ("x", "y")


@pytest.mark.parametrize(
    "box", [nn.Partitioned(1, names=("a",)), nn.LogicallyPartitioned(1, names=("a",))]
)
def test_a_flax_box_leaves_no_trace_in_the_name(box):
    assert flatten({"kernel": box}).names == flatten({"kernel": 1}).names == ("kernel",)


def test_an_nnx_variable_leaves_no_trace_in_the_name():
    assert flatten({"kernel": nnx.Param(jnp.ones(2))}).names == ("kernel",)


def test_a_path_has_the_box_that_the_name_leaves_out():
    (path,) = flatten({"kernel": nn.Partitioned(1, names=("a",))}).paths
    assert [key.value for key in path] == ["kernel", "value"]


def test_a_leaf_alone_is_a_tree():
    flat = flatten(3)
    assert (flat.nodes, flat.leaves, flat.names, flat.empties) == ((None,), (3,), ("",), ())


def test_depth_is_not_limited_by_recursion():
    tree = 1
    for _ in range(5000):
        tree = [tree]
    assert flatten(tree).leaves == (1,)


def test_two_leaves_of_one_name_are_refused():
    class Twice:
        pass

    key = jax.tree_util.DictKey("k")
    jax.tree_util.register_pytree_with_keys(
        Twice, lambda _: (((key, 1), (key, 2)), None), lambda _, children: Twice()
    )
    with pytest.raises(UnsupportedKeyError, match="two leaves of the tree have the key path 'a/k'"):
        flatten({"a": Twice()})


def test_named_nodes_refuses_nodes_that_are_no_tree():
    with pytest.raises(IndexError):
        list(named_nodes([Node("none"), None]))
