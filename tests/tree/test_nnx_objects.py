from __future__ import annotations

import subprocess
import sys

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from flaxckpt.errors import UnsupportedKeyError
from flaxckpt.tree import nnx_objects
from flaxckpt.tree.structure import flatten


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(2, 2, rngs=rngs)
        self.second = nnx.Linear(2, 2, rngs=rngs)
        self.second.kernel = self.first.kernel


def test_a_tree_without_nnx_objects_is_as_it_was():
    tree = {"a": [1, None, ()], "b": jnp.ones(2)}
    stateful, graphs = nnx_objects.split(tree)
    assert graphs == []
    assert stateful["b"] is tree["b"]
    assert nnx_objects.merge(stateful, graphs) is stateful


def test_a_shared_weight_is_one_leaf():
    stateful, _ = nnx_objects.split(Tied(nnx.Rngs(0)))
    assert flatten(stateful).names == ("first/bias", "first/kernel", "second/bias")


def test_a_shared_weight_is_shared_again_after_merge():
    model = nnx_objects.merge(*nnx_objects.split(Tied(nnx.Rngs(0))))
    assert model.first.kernel is model.second.kernel


def test_objects_of_one_tree_go_back_to_their_places():
    tree = {"b": nnx.Linear(1, 2, rngs=nnx.Rngs(0)), "a": [nnx.Linear(3, 4, rngs=nnx.Rngs(1)), 5]}
    merged = nnx_objects.merge(*nnx_objects.split(tree))
    assert (merged["b"].out_features, merged["a"][0].out_features, merged["a"][1]) == (2, 4, 5)


def test_a_state_of_the_callers_stays_a_state():
    state = nnx.state(nnx.Linear(1, 2, rngs=nnx.Rngs(0)))
    tree = {"a": state, "b": nnx.Linear(1, 2, rngs=nnx.Rngs(0))}
    stateful, graphs = nnx_objects.split(tree)
    merged = nnx_objects.merge(stateful, graphs)
    assert type(merged["a"]) is nnx.State
    assert type(merged["b"]) is nnx.Linear


def test_the_state_shares_its_variables_with_the_object():
    model = nnx.Linear(1, 2, rngs=nnx.Rngs(0))
    stateful, _ = nnx_objects.split(model)
    stateful["bias"].set_value(jnp.full(2, 7.0))
    assert model.bias[0] == 7.0


def test_update_writes_into_the_same_object():
    model, other = (nnx.Linear(1, 2, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    kernel = model.kernel
    nnx_objects.update([model], [nnx_objects.split(other)[0]])
    assert model.kernel is kernel
    assert (model.kernel[...] == other.kernel[...]).all()


def test_an_optimizer_and_rngs_are_objects():
    model = nnx.Linear(1, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    assert all(map(nnx_objects.is_object, (model, optimizer, nnx.Rngs(0))))


@pytest.mark.parametrize("value", [1, {}, None, jnp.ones(1), nnx.State({})])
def test_other_values_are_no_objects(value):
    assert not nnx_objects.is_object(value)


def test_keys_that_cannot_be_sorted_are_refused_whether_nnx_is_loaded_or_not():
    with pytest.raises(UnsupportedKeyError, match="cannot be sorted"):
        flatten(nnx_objects.split({1: 1, "a": 2})[0])


def test_nnx_is_not_imported_for_those_who_do_not_use_it():
    script = (
        "import sys; from flaxckpt.tree import nnx_objects as n; "
        "assert n.split({'a': 1}) == ({'a': 1}, []); assert not n.is_object(1); "
        "assert 'flax.nnx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
