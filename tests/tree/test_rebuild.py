from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import flaxckpt
from flaxckpt.tree.keypaths import Key
from flaxckpt.tree.node import Node
from flaxckpt.tree.rebuild import SavedNode, build
from flaxckpt.tree.structure import flatten
from tests.tree.strategies import same_tree, trees


def rebuilt(tree: Any) -> Any:
    flat = flatten(tree)
    return build(flat.nodes, flat.leaves)


@given(trees)
def test_a_tree_comes_back_with_its_containers_and_leaves(tree):
    assert same_tree(rebuilt(tree), tree)


@given(trees, st.data())
def test_a_damaged_structure_is_a_value_error_or_another_tree(tree, data):
    flat = flatten(tree)
    nodes = list(flat.nodes)
    at = data.draw(st.integers(0, len(nodes) - 1))
    nodes[at : at + data.draw(st.integers(0, 2))] = data.draw(
        st.lists(st.sampled_from([None, Node("none"), *nodes]), max_size=2)
    )
    with contextlib.suppress(ValueError):
        build(nodes, flat.leaves)


@pytest.mark.parametrize(
    ("nodes", "leaves"),
    [
        ([], []),
        ([None], []),
        ([], [1]),
        ([None, None], [1, 2]),
        ([Node("list", (Key("seq", 0),))], []),
        ([Node("none"), Node("none")], []),
    ],
)
def test_nodes_that_are_no_tree_over_the_leaves_are_refused(nodes, leaves):
    with pytest.raises(ValueError, match="structure"):
        build(nodes, leaves)


def test_the_state_of_an_optimizer_comes_back_in_its_own_types():
    state = optax.adamw(1e-3).init({"w": jnp.ones(2)})
    assert same_tree(rebuilt(state), state)


def test_a_default_dict_keeps_its_factory():
    tree = rebuilt(collections.defaultdict(set, a=1))
    assert tree.default_factory is set


def test_a_default_dict_with_another_factory_becomes_a_saved_node():
    tree = rebuilt(collections.defaultdict(lambda: 0, a=1))
    assert isinstance(tree, SavedNode)
    assert dict(tree) == {"a": 1}


def test_a_class_that_nobody_registered_becomes_a_saved_node():
    tree = rebuilt(collections.namedtuple("Unknown", ["a"])(1))
    assert isinstance(tree, SavedNode)
    assert tree.class_name.endswith("Unknown")
    assert tree["a"] == 1


def test_a_dataclass_with_static_fields_becomes_a_saved_node_that_names_them():
    @flax.struct.dataclass
    class State:
        step: int
        fn: Any = flax.struct.field(pytree_node=False)

    tree = rebuilt(State(3, print))
    assert (dict(tree), tree.static) == ({"step": 3}, ("fn",))


def test_a_registered_builder_gives_static_fields_a_value():
    @flax.struct.dataclass
    class Model:
        step: int
        fn: Any = flax.struct.field(pytree_node=False)

    flaxckpt.register_node(Model, lambda children: Model(**children, fn=len))
    assert rebuilt(Model(3, print)) == Model(3, len)


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "flax.io.os.system", "optax", ""])
def test_no_function_is_called_because_a_checkpoint_names_it(name):
    node = Node("namedtuple", (Key("attr", "command"),), name)
    assert isinstance(build([node, None], ["true"]), SavedNode)


def test_no_module_is_imported_because_a_checkpoint_names_it():
    build([Node("dataclass", (), "optax.contrib.antigravity.X"), *[]], [])
    build([Node("dataclass", (), "antigravity.X")], [])
    assert "antigravity" not in sys.modules


def test_a_trusted_class_whose_fields_have_changed_becomes_a_saved_node():
    cls = optax.ScaleByAdamState
    node = Node("namedtuple", (Key("attr", "old"),), f"{cls.__module__}.{cls.__qualname__}")
    assert dict(build([node, None], [1])) == {"old": 1}


def test_a_flax_box_keeps_its_names():
    box = nn.Partitioned(1, names=("a", None))
    assert rebuilt({"w": box}) == {"w": box}


def test_an_nnx_state_keeps_its_variables_and_their_metadata():
    state = nnx.State({"w": nnx.Param(jnp.ones(2), tag=("x", 1)), "n": nnx.BatchStat(1)})
    tree = rebuilt(state)
    assert type(tree) is nnx.State
    assert jax.tree.structure(tree) == jax.tree.structure(state)
    assert (type(tree["w"]), type(tree["n"])) == (nnx.Param, nnx.BatchStat)
    assert tree["w"].get_metadata() == state["w"].get_metadata()


def test_a_saved_node_is_a_pytree_that_can_be_saved_again():
    tree = SavedNode("m.C", {"b": 1, "a": None}, ("fn",))
    again = jax.tree.map(lambda x: x, tree)
    assert (dict(again), again.class_name, again.static) == (dict(tree), "m.C", ("fn",))
    assert flatten(tree).names == ("b",)


def test_a_saved_node_shows_its_class():
    assert repr(SavedNode("m.C", {"a": 1})) == "SavedNode(m.C, {'a': 1})"


def test_depth_is_not_limited_by_recursion():
    nodes = [*[Node("list", (Key("seq", 0),))] * 5000, None]
    assert len(build(nodes, [1])) == 1


def test_a_plain_dataclass_of_the_user_needs_registration():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Mine:
        x: int

    assert isinstance(rebuilt(Mine(1)), SavedNode)
    flaxckpt.register_node(Mine)
    assert rebuilt(Mine(1)) == Mine(1)
