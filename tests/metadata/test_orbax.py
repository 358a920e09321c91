from __future__ import annotations

import base64

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from flaxckpt.metadata import orbax_metadata
from flaxckpt.saving.save_plan import plan_tree
from flaxckpt.tree.keypaths import Key
from flaxckpt.tree.structure import flatten
from tests.tree.strategies import HOSTILE_STRINGS, keys, trees

_names = st.sampled_from(("a", "b", "a.b", "a.b%2", "a%2", "b%2%2", "a%3", "", ".", 0, "0", True))
_paths = st.lists(st.builds(Key, st.just("dict"), _names | keys), max_size=3).map(tuple)


def visible_names(state) -> set[str]:
    """The names of the leaves of `state` that Orbax can read."""
    plan = plan_tree(state, 1 << 20).plan
    strings = orbax_metadata.strings_file(plan.flat.paths, plan.records)
    pairs = zip(plan.flat.paths, plan.records, strict=True)
    return {record.name for path, record in pairs if orbax_metadata.visible(path, record, strings)}


def metadata(state) -> dict:
    """The members of `_METADATA` for Orbax."""
    plan = plan_tree(state, 1 << 20).plan
    strings = orbax_metadata.strings_file(plan.flat.paths, plan.records)
    return orbax_metadata.tree_metadata(plan.flat.paths, plan.records, plan.flat.empties, strings)


@given(st.lists(_paths, max_size=12, unique_by=repr))
def test_names_in_the_store_are_unique(paths):
    assert len(set(orbax_metadata.store_names(paths))) == len(paths)


@given(st.lists(_paths, max_size=6, unique_by=repr))
def test_the_first_leaf_of_a_name_has_orbaxs_own(paths):
    names, stores = (
        [orbax_metadata.param_name(path) for path in paths],
        orbax_metadata.store_names(paths),
    )
    assert all(stores[names.index(name)] == name for name in names)


def test_a_made_up_name_never_takes_that_of_another_leaf():
    a, b, ab, other = (Key("dict", key) for key in ("a", "b", "a.b", "a.b%2"))
    assert orbax_metadata.store_names([(ab,), (a, b), (other,)]) == ["a.b", "a.b%3", "a.b%2"]


@given(trees)
def test_the_leaves_of_any_tree_have_unique_names_in_the_store(tree):
    stores = orbax_metadata.store_names(flatten(tree).paths)
    assert len(set(stores)) == len(stores)


def test_two_leaves_of_one_name_are_both_stored_and_one_is_visible():
    assert visible_names({"a.b": np.ones(1), "a": {"b": np.ones(1)}}) == {"a/b"}


@pytest.mark.parametrize(
    ("leaf", "is_visible"),
    [
        (jnp.ones(2), True),
        (np.ones(2), True),
        (np.float32(1), True),
        (1, True),
        (True, True),
        (1.5, True),
        ("text", True),
        (jax.random.key(0), True),
        (np.zeros(2, "uint8"), True),
        (1j, False),
        (2**70, False),
        (b"a", False),
        (np.array(["a"]), False),
        (jnp.zeros(2, jnp.uint4), False),
        (np.random.default_rng(0), False),
    ],
    ids=str,
)
def test_what_orbax_can_hold_is_visible(leaf, is_visible):
    assert bool(visible_names({"x": leaf})) is is_visible


def test_a_leaf_that_orbax_cannot_hold_has_no_entry():
    entries = metadata({"a": np.ones(1), "b": b"bytes"})["tree_metadata"]
    assert list(entries) == ["('a',)"]


def test_a_key_has_its_type():
    (entry,) = metadata([{"k": 1}])["tree_metadata"].values()
    assert entry["key_metadata"] == [{"key": "0", "key_type": 1}, {"key": "k", "key_type": 2}]


@pytest.mark.parametrize(
    ("empty", "value_type"),
    [({}, "Dict"), ([], "List"), ((), "Tuple"), (None, "None"), (optax.EmptyState(), "None")],
)
def test_an_empty_node_has_an_entry(empty, value_type):
    (entry,) = metadata({"e": empty})["tree_metadata"].values()
    assert entry["value_metadata"] == {"value_type": value_type, "skip_deserialize": True}


def test_strings_lie_where_a_json_pointer_finds_them():
    plan = plan_tree({"a/b": "x", "a": {"c": "y"}, "n": 1}, 1 << 20).plan
    strings = orbax_metadata.strings_file(plan.flat.paths, plan.records)
    assert strings == {"a.c": "y", "a": {"b": "x"}}


@given(st.dictionaries(st.sampled_from(HOSTILE_STRINGS), st.text(max_size=2)))
def test_a_visible_string_is_the_right_one(state):
    plan = plan_tree(state, 1 << 20).plan
    strings = orbax_metadata.strings_file(plan.flat.paths, plan.records)
    for path, record in zip(plan.flat.paths, plan.records, strict=True):
        if orbax_metadata.visible(path, record, strings):
            found = strings
            for part in orbax_metadata.param_name(path).split("/"):
                found = found[part]
            assert found == record.value


def test_a_named_sharding_is_written_by_its_axes():
    mesh = jax.make_mesh((1, 1), ("x", "y"), (jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(("x", "y"), None))
    ((name, text),) = orbax_metadata.sharding_file({"params.w": sharding}).items()
    data = orjson.loads(text)
    assert base64.urlsafe_b64decode(name) == b"params.w"
    assert (data["sharding_type"], data["partition_spec"]) == ("NamedSharding", [["x", "y"], None])
    assert data["device_mesh"] == {"mesh": [[{"id": 0}]]}


def test_a_single_device_is_written_by_its_name():
    array = jnp.ones(2)
    (text,) = orbax_metadata.sharding_file({"w": array.sharding}).values()
    data = orjson.loads(text)
    assert data["sharding_type"] == "SingleDeviceSharding"


def test_the_implementation_of_a_key_is_written():
    plan = plan_tree({"k": jax.random.key(0, impl="rbg"), "w": np.ones(2)}, 1 << 20).plan
    (entry,) = orbax_metadata.array_metadatas_file(plan.records)["array_metadatas"]
    assert entry["array_metadata"]["param_name"] == "k"
    assert entry["array_metadata"]["ext_metadata"] == {"random_key_impl": "rbg"}
