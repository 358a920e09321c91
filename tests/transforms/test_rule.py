import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt import Drop, Leaf, Rename
from flaxckpt.errors import RuleError, StructureMismatchError, UnsupportedLeafError
from flaxckpt.source import checkpoint
from flaxckpt.transforms import transformed
from tests.transforms import state_of, values_of

TREE = {"a": np.arange(3.0), "b": {"c": jnp.ones(2)}, "n": 7}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("rule") / "x"
    flaxckpt.save(path, TREE)
    return path


def test_a_function_is_given_the_leaves_and_those_of_the_target(saved):
    seen = {}

    def rule(state, target):
        seen.update(state=state, target=dict(target))
        return state

    target = {"a": np.zeros(3), "b": {"c": jnp.zeros(2)}, "n": 0}
    flaxckpt.restore(saved, target, transforms=[rule])
    assert list(seen["state"]) == ["a", "b/c", "n"]
    assert all(isinstance(leaf, Leaf) for leaf in seen["state"].values())
    assert seen["target"].keys() == {"a", "b/c", "n"}
    assert seen["target"]["a"] is target["a"]
    flaxckpt.restore(saved, transforms=[rule])
    assert seen["target"] == {}


def test_a_function_may_return_leaves_arrays_and_numbers(saved):
    def rule(state, target):
        return {
            "same": state["a"],
            "double": state["a"].read() * 2,
            "jax": jnp.zeros(2),
            "number": state["n"].read() + 1,
            "deep/text": "x",
        }

    restored = flaxckpt.restore(saved, transforms=[rule])
    assert restored["same"].tolist() == [0, 1, 2]
    assert restored["double"].tolist() == [0, 2, 4]
    assert isinstance(restored["jax"], type(jnp.zeros(2)))
    assert restored["number"] == 8
    assert restored["deep"] == {"text": "x"}


def test_a_function_with_a_target(saved):
    target = {"x": np.zeros(3), "y": 0}
    restored = flaxckpt.restore(
        saved, target, transforms=[lambda state, target: {"x": state["a"], "y": len(target)}]
    )
    assert restored["x"].tolist() == [0, 1, 2]
    assert restored["y"] == 2


def test_the_state_that_a_function_is_given_is_its_own():
    state = state_of({"a": 1})

    def rule(state, target):
        state["b"] = 2
        return {"c": 3}

    assert values_of(transformed(state, {}, [rule])) == {"c": 3}
    assert list(state) == ["a"]


def test_a_function_cannot_change_the_target(saved):
    def rule(state, target):
        target.pop("n")
        return {"a": state["a"]}

    with pytest.raises(StructureMismatchError, match="missing  n"):
        flaxckpt.restore(saved, {"a": np.zeros(3), "n": 0}, transforms=[rule])


@pytest.mark.parametrize(("result", "told"), [(None, "NoneType"), ([1], "list"), (1, "int")])
def test_what_is_no_dict_is_refused(result, told):
    def rule(state, target):
        return result

    with pytest.raises(RuleError) as raised:
        transformed(state_of({"a": 1}), {}, [rule])
    assert str(raised.value) == (
        f"the transform {rule!r} returned a {told}. It must return a dict from key paths to leaves "
        "or values."
    )


def test_keys_that_are_no_key_paths_are_refused():
    with pytest.raises(RuleError):
        transformed({}, {}, [lambda state, target: {1: 2}])


def test_values_that_no_checkpoint_can_hold_are_refused():
    with pytest.raises(UnsupportedLeafError, match="the leaf a is a builtins.dict"):
        transformed({}, {}, [lambda state, target: {"a": {"b": 1}}])


def test_rules_and_functions_follow_one_another_in_order():
    rules = [
        Rename("a", "b"),
        lambda state, target: state | {"a": state["b"].read() + 1},
        Drop("b"),
        lambda state, target: state | {"names": ",".join(state)},
    ]
    assert values_of(transformed(state_of({"a": 1}), {}, rules)) == {"a": 2, "names": "a"}


def test_no_rules_change_nothing():
    state = state_of({"a": 1})
    assert transformed(state, {}, []) == state


def test_a_leaf_knows_its_new_name():
    state = transformed(state_of({"a": 1}), {}, [lambda state, target: {"z": state["a"]}])
    assert state["z"].name == "z"
    assert repr(state["z"]) == "Leaf(z: int)"


def test_the_error_of_a_damaged_leaf_names_it(tmp_path):
    flaxckpt.save(tmp_path / "x", {"w": np.arange(10_000.0)})
    (data,) = [p for p in (tmp_path / "x/state/d").iterdir() if p.stat().st_size > 50_000]
    content = bytearray(data.read_bytes())
    content[40_000] ^= 1
    data.write_bytes(content)
    with pytest.raises(flaxckpt.errors.CorruptCheckpointError, match="the leaf .* is damaged"):
        flaxckpt.restore(tmp_path / "x", transforms=[Rename("w", "v")])


def test_with_a_rule_too_the_checkpoint_is_looked_at_once(tmp_path, monkeypatch):
    """Whether it is still the same one: not once a leaf."""
    flaxckpt.save(tmp_path / "x", {f"w{i}": np.ones(64) for i in range(50)})
    looks = []
    real = checkpoint._check_there
    monkeypatch.setattr(checkpoint, "_check_there", lambda *args: looks.append(args) or real(*args))
    flaxckpt.restore(tmp_path / "x", transforms=[Rename("w0", "v0")])
    assert len(looks) < 5
