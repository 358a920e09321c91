import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt import Apply, Cast, Drop, Rename
from flaxckpt.errors import RuleError, StructureMismatchError, UnsupportedLeafError
from tests.transforms import Costly, refused, state_of, values_of

TREE = {
    "a": {"k": np.full(2, 3.0), "q": np.full(2, 1.0), "v": np.full(2, 2.0)},
    "b": {"k": np.full(2, 6.0), "q": np.full(2, 4.0), "v": np.full(2, 5.0)},
    "jax": jnp.arange(3.0),
    "step": 7,
    "text": "words",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("apply") / "x"
    flaxckpt.save(path, TREE)
    return path


def stacked(path, *arrays):
    return np.stack(arrays)


# One leaf


def test_each_leaf_becomes_what_is_made_of_it(saved):
    seen = []

    def double(path, array):
        seen.append((path, type(array)))
        return array * 2

    restored = flaxckpt.restore(saved, transforms=[Apply("a/.*", double)])
    assert restored["a"]["k"].tolist() == [6, 6]
    assert restored["b"]["k"].tolist() == [6, 6]
    assert sorted(seen) == [(f"a/{name}", np.ndarray) for name in "kqv"]


def test_the_kind_of_array_stays_that_of_the_input(saved):
    rules = [Apply("jax", lambda path, x: x + 1), Apply("a/k", lambda path, x: jnp.asarray(x))]
    restored = flaxckpt.restore(saved, transforms=rules)
    assert isinstance(restored["jax"], jax.Array)
    assert restored["jax"].tolist() == [1, 2, 3]
    assert isinstance(restored["a"]["k"], np.ndarray)


@pytest.mark.parametrize("value", [7, 1.5, "text", np.float32(2), True, b"x"])
def test_anything_that_a_checkpoint_can_hold_may_come_out(saved, value):
    restored = flaxckpt.restore(saved, transforms=[Apply("step", lambda path, x: value)])
    assert restored["step"] == value
    assert type(restored["step"]) is type(value)


def test_a_number_and_a_text_go_in_as_they_are(saved):
    rules = [Apply("step", lambda path, x: x + 1), Apply("text", lambda path, x: x.upper())]
    restored = flaxckpt.restore(saved, transforms=rules)
    assert (restored["step"], restored["text"]) == (8, "WORDS")


def test_a_jax_array_without_axes_goes_in_as_an_array_and_stays_one(tmp_path):
    flaxckpt.save(tmp_path / "x", {"n": jnp.float32(2)})
    restored = flaxckpt.restore(tmp_path / "x", transforms=[Apply("n", lambda path, x: x)])
    assert isinstance(restored["n"], jax.Array)


def test_a_prng_key_comes_out_as_one(tmp_path):
    flaxckpt.save(tmp_path / "x", {"key": jax.random.key(1)})
    rule = Apply("key", lambda path, key: jax.random.split(key, 3))
    restored = flaxckpt.restore(tmp_path / "x", transforms=[rule])["key"]
    expected = jax.random.split(jax.random.key(1), 3)
    assert (jax.random.key_data(restored) == jax.random.key_data(expected)).all()


def test_what_no_checkpoint_can_hold_is_refused(saved):
    with pytest.raises(UnsupportedLeafError, match=r"the leaf step is a builtins\.object"):
        flaxckpt.restore(saved, transforms=[Apply("step", lambda path, x: object())])


def test_the_result_must_fit_the_target(saved):
    rule = Apply("step", lambda path, x: np.zeros(3))
    with pytest.raises(StructureMismatchError) as raised:
        flaxckpt.restore(saved, TREE, transforms=[rule])
    (row,) = raised.value.mismatches
    assert (row.problem, row.checkpoint, row.target) == ("shape", "float64[3]", "int")


def test_a_result_lands_on_the_devices_of_the_target(saved):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    rule = Apply(inputs=["a/k", "b/k"], output="n", fn=lambda path, a, b: (a + b).astype("f4"))
    target = {"n": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=where)}
    restored = flaxckpt.restore(saved, target, transforms=[rule, Drop("[^n].*")])
    assert restored["n"].sharding == where
    assert restored["n"].tolist() == [9, 9]


def test_two_results_are_not_one_array(saved):
    same = np.zeros(2)
    rule = Apply("[ab]/k", lambda path, x: same)
    restored = flaxckpt.restore(saved, transforms=[rule])
    restored["a"]["k"][0] = 5
    assert restored["b"]["k"][0] == same[0] == 0


# Several leaves


def test_several_become_one(saved):
    rule = Apply(inputs=["(.)/q", "(.)/k", "(.)/v"], output=r"\1/qkv", fn=stacked)
    restored = flaxckpt.restore(saved, transforms=[rule])
    assert restored["a"]["qkv"].tolist() == [[1, 1], [3, 3], [2, 2]]
    assert restored["b"]["qkv"].tolist() == [[4, 4], [6, 6], [5, 5]]
    assert sorted(restored["a"]) == ["qkv"]


def test_the_path_is_that_of_the_result():
    costly = Costly()
    state = Apply(inputs=["x", "y"], output="z", fn=costly)(state_of({"x": 1, "y": 2}), {})
    assert values_of(state) == {"z": 3}
    assert costly.calls == ["z"]


def test_inputs_that_are_kept():
    rule = Apply(inputs=["x", "y"], output="z", fn=Costly(), keep=True)
    assert values_of(rule(state_of({"x": 1, "y": 2}), {})) == {"x": 1, "y": 2, "z": 3}


def test_kept_inputs_may_not_have_the_name_of_the_result():
    rule = Apply(inputs=["x", "y"], output="x", fn=refused, keep=True)
    with pytest.raises(RuleError, match="makes two leaves of the key path x"):
        rule(state_of({"x": 1, "y": 2}), {})
    rule = Apply(inputs=["x", "y"], output="x", fn=Costly())
    assert values_of(rule(state_of({"x": 1, "y": 2}), {})) == {"x": 3}


def test_one_leaf_may_be_an_input_twice():
    rule = Apply(inputs=["x", "x"], output="z", fn=Costly())
    assert values_of(rule(state_of({"x": 2}), {})) == {"z": 4}


@pytest.mark.parametrize(
    ("inputs", "output", "told"),
    [
        (["(.)/q", "(.)/k"], r"\1", "a of a/q, a/k; b of b/q"),
        (["(.)/k", "(.)/q"], r"\1", "b of b/q"),
        (["./q", "a/k"], "z", "z of a/q, b/q"),
        (["a/q", "./q"], "z", "z of a/q, a/q, b/q"),
    ],
)
def test_inputs_that_do_not_come_in_equal_groups(inputs, output, told):
    state = state_of({"a/q": 1, "a/k": 2, "b/q": 3})
    with pytest.raises(RuleError, match="must find one leaf for each of its inputs") as raised:
        Apply(inputs=inputs, output=output, fn=refused)(state, {})
    assert told in str(raised.value)


def test_an_input_that_is_not_there():
    rule = {"inputs": ["x", "no"], "output": "z", "fn": refused}
    with pytest.raises(RuleError, match="'no' matches no key path as a whole"):
        Apply(**rule)(state_of({"x": 1}), {})
    with pytest.raises(RuleError, match="must find one leaf for each of its inputs"):
        Apply(**rule, optional=True)(state_of({"x": 1}), {})
    assert values_of(Apply(**rule, optional=True)(state_of({"a": 1}), {})) == {"a": 1}


def test_bad_patterns_and_outputs():
    with pytest.raises(RuleError, match="is not a valid regular expression"):
        Apply("(", refused)(state_of({"x": 1}), {})
    with pytest.raises(RuleError, match="does not fit its pattern"):
        Apply(inputs=["x"], output=r"\1", fn=refused)(state_of({"x": 1}), {})


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"pattern": "x"},
        {"fn": refused},
        {"pattern": "x", "fn": refused, "keep": True},
        {"pattern": "x", "fn": refused, "output": "y"},
        {"pattern": "x", "fn": refused, "inputs": ["y"]},
        {"inputs": ["x"], "fn": refused},
        {"inputs": ["x"], "output": "y"},
        {"output": "y", "fn": refused},
        {"pattern": "x", "inputs": ["x"], "output": "y", "fn": refused},
    ],
)
def test_what_is_neither_of_the_two_forms(arguments):
    with pytest.raises(ValueError, match="Apply takes pattern and fn, or inputs, output and fn"):
        Apply(**arguments)


# When it is computed


def test_nothing_is_computed_that_is_not_needed(saved):
    rules = [Apply("a/.*", refused), Apply(inputs=["b/k", "b/q"], output="b/n", fn=refused)]
    restored = flaxckpt.restore(saved, transforms=[*rules, Drop("a/.*|b/n")])
    assert sorted(restored) == ["b", "jax", "step", "text"]
    target = {"step": 0}
    assert flaxckpt.restore(saved, target, transforms=rules, unexpected="ignore") == {"step": 7}


def test_what_a_later_cast_is_for_is_not_computed_when_it_is_dropped(saved):
    rules = [Apply("a/k", refused), Cast("a/k", "float32"), Drop("a/k")]
    assert sorted(flaxckpt.restore(saved, transforms=rules)["a"]) == ["q", "v"]


@pytest.mark.parametrize("target", [None, {"a": {"k": np.zeros(2)}}])
def test_what_is_needed_is_computed_once(saved, target):
    costly = Costly()
    transforms = [Apply("a/k", costly), Rename("a/k", "z"), Rename("z", "a/k")]
    restored = flaxckpt.restore(saved, target, transforms=transforms, unexpected="ignore")
    assert restored["a"]["k"].tolist() == [3, 3]
    assert costly.calls == ["a/k"]


def test_a_leaf_under_two_names_is_computed_once(saved):
    costly = Costly()
    rules = [Apply("step", costly), lambda state, target: state | {"again": state["step"]}]
    restored = flaxckpt.restore(saved, transforms=rules)
    assert restored["step"] == restored["again"] == 7
    assert costly.calls == ["step"]


def test_an_error_of_the_function_is_raised_as_it_is(saved):
    with pytest.raises(ZeroDivisionError):
        flaxckpt.restore(saved, transforms=[Apply("step", lambda path, x: x / 0)])
