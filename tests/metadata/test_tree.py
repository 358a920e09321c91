from __future__ import annotations

import contextlib
import copy
import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orjson
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from flaxckpt.errors import CorruptCheckpointError, FlaxckptError, UnsupportedFormatError
from flaxckpt.leaves.spec import LeafRecord, LeafSpec, StoredArray
from flaxckpt.metadata.sealed_json import SavedFile
from flaxckpt.metadata.tree_metadata import SavedTree, decode_tree, encode_tree, spec_of
from flaxckpt.saving.save_plan import plan_tree
from flaxckpt.store.layout import FORMAT_VERSION
from flaxckpt.tree.structure import flatten
from tests.tree.strategies import Point, trees


def through_json(tree: SavedTree) -> SavedTree:
    """`tree` encoded, written as JSON, read and decoded."""
    return decode_tree(orjson.loads(orjson.dumps(encode_tree(tree))), "file")


def saved(state) -> SavedTree:
    """`state` as a snapshot would save it."""
    plan = plan_tree(state, 1 << 20).plan
    return SavedTree(plan.flat.nodes, plan.records, "0123456789ab", {"d/x": SavedFile(7, None)})


OUTER = {
    "params": [jnp.ones((2, 3)), Point(np.float32(1), 2**70)],
    "key": jax.random.key(0),
    "text": "a",
    "box": nn.Partitioned(jnp.ones(2), names=("x",)),
    "param": nnx.Param(jnp.zeros(2), tag=("a", 1)),
    "empty": (None, {}),
}
STATE = {"outer": OUTER, "other": {(1, "a"): 1.5}}


@given(trees)
def test_a_structure_comes_back_from_json(tree):
    whole = SavedTree(flatten(tree).nodes, (), "0123456789ab", {})
    assert repr(through_json(whole)) == repr(whole)


_meshes = st.sampled_from([{"axis_names": ["x"], "shape": [8]}, {"axis_names": [], "shape": []}])
_shapes = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=3)


@st.composite
def _records(draw) -> LeafRecord:
    """A record of any leaf."""
    name, impl = draw(st.text()), draw(st.sampled_from(("", "rbg", "PCG64")))
    if draw(st.booleans()):
        value = draw(st.none() | st.text() | st.lists(st.integers(0, 9)))
        return LeafRecord(
            name, LeafSpec(draw(st.sampled_from(("str", "mine"))), impl=impl), value=value
        )
    axes = draw(_shapes)
    spec = draw(st.lists(st.none() | st.just("x") | st.just(["x", "y"]), max_size=2))
    sharding = draw(st.none() | st.builds(lambda mesh: {"mesh": mesh, "spec": spec}, _meshes))
    array = StoredArray(
        draw(st.text()), draw(st.sampled_from(("float32", "uint4", ">i2", "<U3"))),
        tuple(n for n, _ in axes), tuple(c for _, c in axes), sharding,
    )  # fmt: skip
    kind = draw(st.sampled_from(("jax", "numpy", "int", "prng_key", "mine")))
    return LeafRecord(name, spec_of(kind, array, draw(st.booleans()), impl), array)


@given(st.lists(_records(), max_size=4))
def test_records_come_back_from_json(records):
    whole = SavedTree((), tuple(records), "0123456789ab", {"_sharding": SavedFile(9, 1 << 31)})
    assert through_json(whole) == whole


def test_a_mesh_is_written_once():
    array = StoredArray("a", "int8", (8,), (1,), {"mesh": {"shape": [8]}, "spec": ["x"]})
    record = LeafRecord("a", LeafSpec("jax", "int8", (8,)), array)
    assert len(encode_tree(SavedTree((), (record,) * 3, "a", {}))["meshes"]) == 1


def test_boxes_and_all_kinds_of_leaves_come_back_from_json():
    tree = saved(STATE)
    assert through_json(tree) == tree


def test_a_dataclass_that_is_registered_without_keys_comes_back_from_json():
    @dataclasses.dataclass
    class Unkeyed:
        x: int

    jax.tree_util.register_pytree_node(Unkeyed, lambda u: ((u.x,), None), lambda _, c: Unkeyed(*c))
    whole = SavedTree(flatten(Unkeyed(1)).nodes, (), "a", {})
    assert through_json(whole) == whole


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 10**6])
def test_a_newer_format_is_refused_as_such(version):
    with pytest.raises(UnsupportedFormatError) as caught:
        decode_tree({"format": version, "unknown": []}, "run/1/_METADATA")
    assert str(caught.value) == (
        f"run/1/_METADATA is of format {version}; this flaxckpt reads formats up to "
        f"{FORMAT_VERSION}. Update flaxckpt."
    )


@pytest.mark.parametrize("data", [None, [], 1, "x", {}, {"format": "1"}, {"format": 0},
                                  {"format": True}, {"format": None}, {"format": 1.0}])  # fmt: skip
def test_what_has_no_format_version_is_corrupt(data):
    with pytest.raises(CorruptCheckpointError, match="file names no format version"):
        decode_tree(data, "file")


_VALID = orjson.loads(orjson.dumps(encode_tree(saved(STATE))))
_junk = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 99) | st.floats() | st.text(max_size=4)
    | st.sampled_from(("dict", "list", "float32", "<U3", "0x1p99999", "O", "jax", "none", "seq")),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(("kind", "keys", "size", "float", "int", "tuple", "bytes", "store")), inner
    ),
    max_leaves=4,
)  # fmt: skip


def _places(data, path=()):
    """The path of every value within JSON."""
    yield path
    if not isinstance(data, dict | list):
        return
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield from _places(value, (*path, key))


@settings(max_examples=600)
@given(st.lists(st.tuples(st.sampled_from([*_places(_VALID)][1:]), st.none() | _junk), max_size=2))
def test_any_change_gives_a_tree_or_an_error_of_ours(changes):
    data = copy.deepcopy(_VALID)
    for (*outer, last), junk in changes:
        place = data
        try:
            for key in outer:
                place = place[key]
            place[last]
        except (KeyError, IndexError, TypeError):
            continue
        if isinstance(place, str):
            continue
        if junk is None:
            del place[last]
        else:
            place[last] = junk
    with contextlib.suppress(FlaxckptError):
        decode_tree(data, "file")


@pytest.mark.parametrize("key", [{"float": "0x1p99999"}, {"float": "-0x1p99999"}, {"int": "x"},
                                 {"bytes": "é"}, {"tuple": [{"none": 1}]}])  # fmt: skip
def test_a_key_that_was_never_written_is_corrupt(key):
    data = _VALID | {"structure": [{"kind": "dict", "keys": [key]}]}
    with pytest.raises(CorruptCheckpointError, match="does not describe a tree"):
        decode_tree(data, "file")


@pytest.mark.parametrize(
    "change",
    [{"dtype": "O"}, {"dtype": "V8"}, {"dtype": None}, {"shape": [2]}, {"shape": [-2, 3]},
     {"shape": [2.0, 3]}, {"shape": [True, 3]}, {"chunks": [0, 3]}, {"chunks": []}, {"name": 1},
     {"mesh": 7, "spec": []}],
)  # fmt: skip
def test_a_record_that_contradicts_itself_is_corrupt(change):
    leaf = {"name": "a", "kind": "jax", "store": "a", "dtype": "int8", "shape": [2, 3],
            "chunks": [2, 3]}  # fmt: skip
    with pytest.raises(CorruptCheckpointError):
        decode_tree(_VALID | {"leaves": [leaf | change]}, "file")
