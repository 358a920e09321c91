"""Beginning a run from the checkpoint of another one, and filling what it lacks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import AxisType, PartitionSpec

import flaxckpt
from flaxckpt import errors

ADAM = optax.adam(1e-3)


def old_init():
    params = {"body": {"w": jnp.full((4, 4), 2.0)}, "head": {"w": jnp.ones((4, 2))}}
    return {"params": params, "opt_state": ADAM.init(params), "step": jnp.asarray(120)}


def new_init(seed=0):
    params = {"body": {"w": jnp.zeros((4, 4))}, "big_head": {"w": jnp.full((4, 7), 5.0 + seed)}}
    return {"params": params, "opt_state": ADAM.init(params), "step": jnp.asarray(0)}


HOW = {
    "transforms": [flaxckpt.Drop(".*/head/.*"), flaxckpt.Drop("step")],
    "missing": {".*big_head.*|step": "init"},
}


@pytest.fixture
def other(tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "other") as ckpt:
        ckpt.save(1200, old_init())
    return tmp_path / "other" / "1200"


def test_the_first_start_takes_what_fits_from_another_run(other, tmp_path):
    ckpt = flaxckpt.CheckpointManager(tmp_path / "run")
    state = ckpt.restore_or_init(new_init, init_from=other, **HOW)
    np.testing.assert_array_equal(state["params"]["body"]["w"], np.full((4, 4), 2.0))
    np.testing.assert_array_equal(state["params"]["big_head"]["w"], np.full((4, 7), 5.0))
    assert int(state["step"]) == 0
    assert ckpt.last_step is None
    assert ckpt.next_step == 0
    assert "params/big_head/w" in ckpt.report.initialised
    assert "params/body/w" in ckpt.report.restored
    ckpt.close()


def test_later_starts_go_on_from_the_own_run_and_transform_nothing(other, tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        state = ckpt.restore_or_init(new_init, init_from=other, **HOW)
        ckpt.save(3, state | {"step": state["step"] + 3})
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        state = ckpt.restore_or_init(new_init, init_from=other, **HOW)  # Drop would match nothing
        assert int(state["step"]) == 3
        assert ckpt.restored_step == 3
        assert ckpt.report.initialised == ()


def test_the_own_run_must_fit_as_it_is(other, tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        ckpt.save(3, old_init())
        with pytest.raises(errors.StructureMismatchError, match="big_head"):
            ckpt.restore_or_init(new_init, init_from=other, **HOW)


def test_without_init_from_the_arguments_are_about_the_own_run(tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        ckpt.save(3, old_init())
        state = ckpt.restore_or_init(new_init, **HOW)
        np.testing.assert_array_equal(state["params"]["body"]["w"], np.full((4, 4), 2.0))
        assert ckpt.restored_step == 3


def test_only_what_is_missing_is_computed(other, tmp_path):
    computed = []

    def note(name, value):
        return jax.pure_callback(
            lambda: computed.append(name) or np.asarray(value), jax.ShapeDtypeStruct((), "float32")
        )

    def init():
        tree = new_init()
        tree["params"]["body"]["w"] += note("body", 1.0)
        tree["params"]["big_head"]["w"] += note("head", 1.0)
        return tree

    ckpt = flaxckpt.CheckpointManager(tmp_path / "run")
    state = ckpt.restore_or_init(init, init_from=other, **HOW)
    np.testing.assert_array_equal(state["params"]["big_head"]["w"], np.full((4, 7), 6.0))
    assert computed == ["head"]
    ckpt.close()


def test_fallback_to_the_target_is_made_by_init_fn(other, tmp_path):
    ckpt = flaxckpt.CheckpointManager(tmp_path / "run")
    rules = [*HOW["transforms"], flaxckpt.Fallback(".*big_head.*|step", "target")]
    state = ckpt.restore_or_init(new_init, 2, init_from=other, transforms=rules)
    np.testing.assert_array_equal(state["params"]["big_head"]["w"], np.full((4, 7), 7.0))
    ckpt.close()


def test_what_is_missing_is_made_on_the_mesh(other, tmp_path):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    ckpt = flaxckpt.CheckpointManager(tmp_path / "run")
    specs = {"params/.*/w": PartitionSpec("data")}
    state = ckpt.restore_or_init(new_init, mesh=mesh, specs=specs, init_from=other, **HOW)
    for layer in state["params"].values():
        assert layer["w"].sharding.spec == PartitionSpec("data")
        assert layer["w"].sharding.mesh.shape == mesh.shape
    assert "params/body/w" in ckpt.report.resharded
    ckpt.close()


def test_there_must_be_something_to_begin_from(tmp_path):
    ckpt = flaxckpt.CheckpointManager(tmp_path / "run")
    with pytest.raises(errors.CheckpointNotFoundError, match="nowhere"):
        ckpt.restore_or_init(new_init, init_from=tmp_path / "nowhere")
    ckpt.close()


def test_a_train_state_from_a_part_of_another(tmp_path):
    def init():
        params = {"w": jnp.zeros(3)}
        return train_state.TrainState.create(apply_fn=None, params=params, tx=ADAM)

    flaxckpt.save(tmp_path / "params", {"params": {"w": jnp.arange(3.0)}})
    ckpt = flaxckpt.CheckpointManager(tmp_path / "run")
    state = ckpt.restore_or_init(init, init_from=tmp_path / "params", missing="init")
    assert isinstance(state, train_state.TrainState)
    np.testing.assert_array_equal(state.params["w"], np.arange(3.0))
    assert ckpt.report.restored == ("params/w",)
    ckpt.close()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"missing": "keep"}, "missing='keep' must be error or init"),
        ({"unexpected": {"a": "drop"}}, "must be error or ignore"),
        ({"opt_state": "strict"}, "opt_state='strict' must be match or reset"),
        ({"dtype": "float32"}, "dtype='float32' must be error or widen or cast"),
    ],
)
def test_a_policy_that_there_is_not(how, words, tmp_path):
    ckpt = flaxckpt.CheckpointManager(tmp_path / "run")
    with pytest.raises(ValueError, match=words):
        ckpt.restore_or_init(new_init, **how)
    with pytest.raises(TypeError, match="partial"):
        ckpt.restore(partial=True)
    ckpt.close()


def test_a_pattern_that_matches_nothing(tmp_path):
    flaxckpt.save(tmp_path / "c", {"w": 1})
    with pytest.raises(errors.RuleError) as raised:
        flaxckpt.restore(tmp_path / "c", {"w": 0}, missing={"params/.*": "init"})
    assert str(raised.value) == (
        "missing: 'params/.*' matches no key path as a whole. The closest are w. Fix the pattern."
    )
