import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import flaxckpt
from flaxckpt import Apply, Cast, Drop, Stack, Unstack
from flaxckpt.errors import RuleError, StructureMismatchError
from tests.reads import Reads
from tests.transforms import state_of, values_of

LAYERS = r"layer_(?P<index>\d+)/(.*)"
TREE = {
    **{f"layer_{i}": {"b": jnp.full(3, i), "w": np.full((2, 3), i * 1.0)} for i in range(11)},
    "step": 7,
}
# Each layer is 40,000 bytes, in chunks of 4,000: smaller ones lie in the index.
LARGE = {f"layer_{i}": {"w": np.arange(10_000, dtype=np.float32) + i} for i in range(4)}
CHUNKS = flaxckpt.Options(chunk_bytes=4000)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("layers") / "x"
    flaxckpt.save(path, TREE)
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large")
    flaxckpt.save(path / "layers", LARGE, options=CHUNKS)
    whole = np.stack([layer["w"] for layer in LARGE.values()])
    flaxckpt.save(path / "whole", {"layers": {"w": whole}}, options=CHUNKS)
    return path


# Stack


def test_layers_are_stacked_in_the_order_of_their_numbers(saved):
    restored = flaxckpt.restore(saved, transforms=[Stack(LAYERS, r"layers/\2")])
    assert sorted(restored) == ["layers", "step"]
    assert restored["layers"]["w"].shape == (11, 2, 3)
    assert restored["layers"]["w"][:, 0, 0].tolist() == list(range(11))
    assert isinstance(restored["layers"]["w"], np.ndarray)
    assert isinstance(restored["layers"]["b"], jax.Array)
    assert restored["layers"]["b"][:, 2].tolist() == list(range(11))


def test_stacked_into_a_target(saved):
    layers = {"b": jnp.zeros((11, 3), int), "w": np.zeros((11, 2, 3))}
    target = {"layers": layers, "step": 0}
    rule = Stack(LAYERS, r"layers/\2")
    restored = flaxckpt.restore(saved, target, transforms=[rule])
    assert restored["layers"]["w"][:, 1, 1].tolist() == list(range(11))
    target["layers"]["w"] = np.zeros((10, 2, 3))
    with pytest.raises(StructureMismatchError) as raised:
        flaxckpt.restore(saved, target, transforms=[rule])
    (row,) = raised.value.mismatches
    assert (row.problem, row.name) == ("shape", "layers/w")
    assert (row.checkpoint, row.target) == ("float64[11,2,3]", "float64[10,2,3]")


@pytest.mark.parametrize("axis", range(-3, 3))
def test_stacked_along_any_axis(saved, axis):
    rule = Stack(r"layer_(?P<index>\d+)/w", "w", axis=axis)
    restored = flaxckpt.restore(saved, transforms=[rule])["w"]
    expected = np.stack([TREE[f"layer_{i}"]["w"] for i in range(11)], axis)
    assert restored.shape == expected.shape
    assert (restored == expected).all()


def test_an_axis_that_is_not_there(saved):
    for axis in (3, -4):
        with pytest.raises(RuleError, match=rf"has no axis {axis} among 3\."):
            flaxckpt.restore(saved, transforms=[Stack(r"layer_(?P<index>\d+)/w", "w", axis=axis)])
        with pytest.raises(RuleError, match=rf"has no axis {axis} among 2\."):
            flaxckpt.restore(saved, transforms=[Unstack("layer_0/w", "{index}", axis=axis)])


def test_a_missing_layer():
    state = state_of({f"layer_{i}/w": np.ones(2) for i in (0, 1, 3)})
    with pytest.raises(RuleError) as raised:
        Stack(LAYERS, r"layers/\2")(state, {})
    assert "finds the layers [0, 1, 3] for layers/w: some are missing." in str(raised.value)
    with pytest.raises(RuleError, match=r"finds the layers \[1\] for layers/w"):
        Stack(LAYERS, r"layers/\2")(state_of({"layer_1/w": np.ones(2)}), {})


def test_layers_of_different_types():
    state = state_of({"layer_0/w": np.ones(2), "layer_1/w": np.ones(3), "layer_2/w": np.ones(2)})
    with pytest.raises(RuleError) as raised:
        Stack(LAYERS, r"layers/\2")(state, {})["layers/w"].read()
    assert "finds layers of different types for layers/w:" in str(raised.value)
    assert "layer_1/w  float64[3]" in str(raised.value)
    state = state_of({"layer_0/w": np.ones(2), "layer_1/w": np.ones(2, "f4")})
    with pytest.raises(RuleError, match=r"layer_0/w  float64\[2\]\n  layer_1/w  float32\[2\]"):
        Stack(LAYERS, r"layers/\2")(state, {})["layers/w"].read()


def test_one_layer_twice():
    state = state_of({"layer_1/w": 1, "layer_01/w": 2})
    with pytest.raises(RuleError, match="finds layer 1 twice, in layer_1/w and layer_01/w"):
        Stack(LAYERS, r"layers/\2")(state, {})


@pytest.mark.parametrize("value", ["text", 1j, jax.random.key(0)])
def test_what_has_no_array_is_not_stacked(value):
    with pytest.raises(RuleError, match="cannot be used for layer_0/w, which is"):
        Stack(LAYERS, r"layers/\2")(state_of({"layer_0/w": value}), {})["layers/w"].read()


def test_numbers_are_stacked_into_an_array():
    state = Stack(LAYERS, r"\2")(state_of({"layer_0/n": 1, "layer_1/n": 2}), {})
    assert values_of(state) == {"n": [1, 2]}
    assert str(state["n"].spec) == "int64[2]"


def test_a_pattern_without_the_number():
    with pytest.raises(
        RuleError, match=r"has no group \(\?P<index>\.\.\.\) for the layer's number"
    ):
        Stack(r"layer_(\d+)", "w")(state_of({"layer_0": 1}), {})


@pytest.mark.parametrize("pattern", [r"layer_(?P<index>\w+)", r"layer_(?P<index>\d+)?\w*"])
def test_what_the_group_matches_must_be_a_number(pattern):
    with pytest.raises(RuleError, match="layer_a"):
        Stack(pattern, "w")(state_of({"layer_a": 1}), {})


def test_a_stack_of_the_name_of_another_leaf():
    state = state_of({"layer_0/w": 1, "w": 2})
    with pytest.raises(RuleError, match="makes two leaves of the key path w: w and w"):
        Stack(LAYERS, r"\2")(state, {})


@pytest.mark.parametrize("rule", [Stack(LAYERS, "x"), Unstack("no", "{index}")])
def test_rules_that_match_nothing(rule, saved):
    with pytest.raises(RuleError, match="matches no key path as a whole"):
        rule(state_of({"a": 1}), {})


def test_optional_rules():
    state = state_of({"a": 1})
    assert values_of(Stack(LAYERS, "x", optional=True)(state, {})) == {"a": 1}
    assert values_of(Unstack("no", "{index}", optional=True)(state, {})) == {"a": 1}


# Unstack


@pytest.mark.parametrize("axis", range(-3, 3))
def test_unstacked_along_any_axis(large, tmp_path, axis):
    array = np.arange(24.0).reshape(2, 3, 4)
    flaxckpt.save(tmp_path / "x", {"layers": {"w": array}})
    rule = Unstack("layers/(.*)", r"layer_{index}/\1", axis=axis)
    restored = flaxckpt.restore(tmp_path / "x", transforms=[rule])
    assert len(restored) == array.shape[axis]
    for index in range(array.shape[axis]):
        assert (restored[f"layer_{index}"]["w"] == array.take(index, axis)).all()


def test_the_number_may_follow_a_group():
    state = Unstack("(w)", r"\1{index}")(state_of({"w": np.arange(2)}), {})
    assert values_of(state) == {"w0": 0, "w1": 1}


def test_an_output_without_the_number():
    with pytest.raises(RuleError, match=r"has no \{index\} in its output"):
        Unstack("w", "x")(state_of({"w": np.ones(2)}), {})


def test_layers_of_the_names_of_other_leaves():
    state = state_of({"w": np.ones(2), "w_1": 1})
    with pytest.raises(RuleError, match="makes two leaves of the key path w_1"):
        Unstack("w", "w_{index}")(state, {})


@pytest.mark.parametrize("value", ["text", jax.random.split(jax.random.key(0))])
def test_what_has_no_array_is_not_unstacked(value):
    with pytest.raises(RuleError, match="cannot be used for w, which is"):
        Unstack("w", "{index}")(state_of({"w": value}), {})


def test_what_has_no_axes_is_not_unstacked():
    with pytest.raises(RuleError, match="has no axis 0 among 0"):
        Unstack("w", "{index}")(state_of({"w": np.float32(1)}), {})


# Both


arrays = hnp.arrays(
    st.sampled_from(["f4", "i1", "bool", "c8", "<U2"]),
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=3),
)


@given(arrays, st.data())
@settings(max_examples=60)
def test_stack_is_the_inverse_of_unstack(array, data):
    axis = data.draw(st.integers(-array.ndim, array.ndim - 1))
    state = Unstack("w", "w/{index}", axis=axis)(state_of({"w": array}), {})
    assert sorted(state) == sorted(f"w/{i}" for i in range(array.shape[axis]))
    (leaf,) = Stack(r"w/(?P<index>\d+)", "w", axis=axis)(state, {}).values()
    index = data.draw(hnp.basic_indices(array.shape, allow_newaxis=False))
    assert (leaf.shape, leaf.dtype) == (array.shape, array.dtype)
    for part in (..., index):
        np.testing.assert_array_equal(leaf.read(part), array[part])


@given(arrays, st.integers(1, 3), st.data())
@settings(max_examples=60)
def test_unstack_is_the_inverse_of_stack(array, count, data):
    axis = data.draw(st.integers(-array.ndim - 1, array.ndim))
    layers = {f"w/{i}": np.roll(array, i) for i in range(count)}
    state = Stack(r"w/(?P<index>\d+)", "w", axis=axis)(state_of(layers), {})
    index = data.draw(hnp.basic_indices(array.shape, allow_newaxis=False))
    back = Unstack("w", "w/{index}", axis=axis)(state, {})
    for name, layer in layers.items():
        np.testing.assert_array_equal(back[name].read(index), layer[index])
        assert back[name].spec == state_of({"w": layer})["w"].spec


def test_there_and_back_from_a_checkpoint(saved):
    rules = [Stack(LAYERS, r"layers/\2", axis=-1), Unstack("layers/(.*)", r"layer_{index}/\1", -1)]
    restored = flaxckpt.restore(saved, TREE, transforms=rules)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), restored, TREE))
    assert restored["layer_3"]["w"].flags.c_contiguous


def test_after_other_rules():
    state = state_of({"layer_0/w": np.ones(2), "layer_1/w": np.ones(2)})
    for rule in (
        Apply("layer_1/w", lambda path, x: x * 2),
        Cast("layer_0/w", "float32"),
        Cast("layer_1/w", "float32"),
        Stack(LAYERS, r"\2"),
    ):
        state = rule(state, {})
    assert values_of(state) == {"w": [[1, 1], [2, 2]]}
    assert str(state["w"].spec) == "float32[2,2]"


# What is read


def test_of_a_stack_only_the_layers_that_are_asked_for_are_read(large, monkeypatch):
    state = {
        name: flaxckpt.lazy(large / "layers")[name] for name in flaxckpt.lazy(large / "layers")
    }
    (leaf,) = Stack(LAYERS, r"\2")(state, {}).values()
    reads = Reads(monkeypatch)
    whole = np.stack([layer["w"] for layer in LARGE.values()])
    assert (leaf.read(2) == whole[2]).all()
    assert 40_000 <= reads.nbytes < 45_000
    assert reads.of(lambda: leaf.read(np.s_[1:3])) < 90_000
    assert reads.of(lambda: leaf.read(np.s_[:, :10])) < 4 * 6_000
    assert reads.of(lambda: leaf.read(np.s_[2:2])) == 0
    assert reads.of(leaf.read) >= 160_000


def test_of_a_whole_only_the_layer_that_is_asked_for_is_read(large, monkeypatch):
    reads = Reads(monkeypatch)
    rules = [Unstack("layers/(.*)", r"layer_{index}/\1"), Drop("layer_[023]/.*")]
    restored = flaxckpt.restore(large / "whole", transforms=rules)
    assert (restored["layer_1"]["w"] == LARGE["layer_1"]["w"]).all()
    assert 40_000 <= reads.nbytes < 50_000


def test_of_a_stack_the_devices_read_their_own_parts(tmp_path, monkeypatch):
    """Eight devices hold one layer each of eight; nothing is read eight times."""
    tree = {f"layer_{i}": np.full((300, 300), i, np.float32) for i in range(8)}
    flaxckpt.save(tmp_path / "x", tree)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    target = {"w": jax.ShapeDtypeStruct((8, 300, 300), jnp.float32, sharding=where)}
    reads = Reads(monkeypatch)
    rule = Stack(r"layer_(?P<index>\d+)", "w")
    restored = flaxckpt.restore(tmp_path / "x", target, transforms=[rule])["w"]
    assert restored.sharding == where
    assert (np.asarray(restored) == np.arange(8)[:, None, None]).all()
    assert reads.nbytes < 1.05 * 8 * 360_000
