"""Calls that cannot be meant are refused before anything is done, with the right spelling."""

from __future__ import annotations

import inspect

import numpy as np
import orbax.checkpoint as ocp
import pytest

import flaxckpt
from flaxckpt import CheckpointManager, Every, Keep, Options
from flaxckpt.errors import ArgumentError, FlaxckptError

STATE = {"w": np.ones(3)}


@pytest.fixture
def ckpt(tmp_path):
    with CheckpointManager(tmp_path / "run", options=Options(fsync=False)) as manager:
        yield manager
    assert manager.steps() == [], "a refused call has saved something"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"force": True}, "ckpt.save(step, state, overwrite=True)"),
        ({"overwrite": True}, "ckpt.save(step, state, overwrite=True)"),
        ({"wait": True}, "ckpt.save(step, state, wait=True)"),
        ({"blocking": True}, "ckpt.save(step, state, wait=True)"),
        ({"metric": {"loss": 1}}, "Use metrics=."),
        ({"custom_metadata": {}}, "Use metadata=."),
        ({"args": {"x": 1}}, "Use the state itself: save(step, state), and items= for"),
        ({"metrcs": {}}, "Did you mean metrics=?"),
        ({"data": iter(())}, "An object beside the state goes into items={'data': ...}."),
    ],
)
def test_an_unknown_keyword_of_a_call_is_no_item(ckpt, given, said):
    with pytest.raises(TypeError) as caught:
        ckpt(0, STATE, **given)
    assert said in str(caught.value)
    assert isinstance(caught.value, FlaxckptError)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"force": True}, "Use overwrite=."),
        ({"blocking": True}, "Use wait=."),
        ({"metric": {"loss": 1}}, "Use metrics=."),
        ({"overwite": True}, "Did you mean overwrite=?"),
    ],
)
def test_an_unknown_keyword_of_a_save_is_no_item(ckpt, given, said):
    with pytest.raises(ArgumentError, match="no argument") as caught:
        ckpt.save(0, STATE, **given)
    assert said in str(caught.value)


def every_call(tmp_path, ckpt):
    """All public functions, with what they need."""
    path, hook = tmp_path / "x", flaxckpt.PeriodicCheckpoint(ckpt, every_steps=1)
    return {
        "CheckpointManager": lambda **how: CheckpointManager(path, **how),
        "call": lambda **how: ckpt(0, STATE, **how),
        "save": lambda **how: ckpt.save(0, STATE, **how),
        "delete": lambda **how: ckpt.delete(0, **how),
        "pin": lambda **how: ckpt.pin(0, **how),
        "PeriodicCheckpoint": lambda **how: flaxckpt.PeriodicCheckpoint(ckpt, **how),
        "hook": lambda **how: hook(0, state=STATE, **how),
        "flaxckpt.save": lambda **how: flaxckpt.save(path, STATE, **how),
        "PartialSave": lambda **how: flaxckpt.PartialSave(path, **how),
        "restore_items": lambda **how: flaxckpt.restore_items(path, {}, **how),
        "inspect": lambda **how: flaxckpt.inspect(path, **how),
        "verify": lambda **how: flaxckpt.verify(path, **how),
        "lazy": lambda **how: flaxckpt.lazy(path, **how),
        "export": lambda **how: flaxckpt.export(path, path, **how),
    }


CALLS = (
    "CheckpointManager call save delete pin PeriodicCheckpoint hook flaxckpt.save PartialSave "
    "restore_items inspect verify lazy export"
).split()


@pytest.mark.parametrize("name", CALLS)
def test_no_public_function_swallows_a_keyword(name, tmp_path, ckpt):
    with pytest.raises(ArgumentError, match="has no argument 'nonsense'"):
        every_call(tmp_path, ckpt)[name](nonsense=1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"save_every": 100}, "takes an Every, got 100. Pass Every(steps=100)."),
        ({"save_every": lambda step: True}, "call ckpt.save(step, state)"),
        ({"keep": 3}, "takes a Keep, got 3. Pass Keep(last=3)."),
        ({"keep": lambda steps: steps}, "takes a Keep, got a function. Pass Keep("),
        ({"keep": None}, "takes a Keep, got None."),
        ({"local_every": 5}, "Pass Every(steps=5)."),
        ({"options": {"fsync": False}}, "Pass Options(fsync=False)."),
        ({"options": ocp.CheckpointManagerOptions(max_to_keep=3)}, "keep=Keep(last=...)"),
        ({"metric": "loss"}, 'Use keep=Keep(metric="loss", mode="min").'),
        ({"mode": "max"}, 'Use keep=Keep(metric="loss", mode="min").'),
        ({"max_to_keep": 3}, "Use keep=Keep(last=...)."),
        ({"save_interval_steps": 3}, "Use save_every=Every(steps=...)."),
    ],
)
def test_a_manager_refuses_the_wrong_settings_at_once(given, said, tmp_path):
    with pytest.raises(ArgumentError) as caught:
        CheckpointManager(tmp_path / "run", **given)
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Every(steps=2.5), "Every.steps must be an integer, got 2.5"),
        (lambda: Every(steps="3"), "Every.steps must be an integer, got '3'"),
        (lambda: Every(steps=True), "Every.steps must be an integer, got True"),
        (lambda: Every(secs="3"), "Every.secs must be a number, got '3'"),
        (lambda: Every(at=5), "Every.at takes a list of steps, got 5. Pass [5]."),
        (lambda: Every(at=[1.5]), "a step of Every.at must be an integer, got 1.5"),
        (lambda: Keep(last="3"), "Keep.last must be an integer, got '3'"),
        (lambda: Keep(best=1.5, mode="min"), "Keep.best must be an integer, got 1.5"),
        (lambda: Keep(hours="1"), "Keep.hours must be a number, got '1'"),
        (lambda: Keep(best=1, metric=lambda m: m["loss"], mode="min"), 'Keep(metric="loss", ...)'),
        (lambda: Keep(metric=3, mode="min"), "takes the name of a metric, got 3"),
        (lambda: Options(chunk_bytes="8"), "Options.chunk_bytes must be an integer, got '8'"),
        (lambda: Options(storage={"region": "x"}), "Pass ObjectStore(region='x')"),
    ],
)
def test_a_setting_refuses_the_wrong_type_at_once(make, said):
    with pytest.raises(ArgumentError) as caught:
        make()
    assert said in str(caught.value)


def test_numpy_integers_are_counts():
    assert Every(steps=np.int64(3), at=np.arange(2)).due(3, last=2, elapsed=0.0)
    assert Keep(last=np.int32(2)).last == 2


def test_a_state_in_the_wrappers_of_orbax_is_refused(ckpt):
    for wrapped in (ocp.args.StandardSave(STATE), ocp.args.Composite(a=ocp.args.JsonSave({}))):
        for save in (ckpt, ckpt.save):
            with pytest.raises(ArgumentError, match="Pass the state itself"):
                save(0, wrapped)


def test_a_step_in_the_place_of_a_target_is_refused(ckpt):
    with pytest.raises(ArgumentError, match=r"use restore\(step=2\)"):
        ckpt.restore(2)


def test_a_restore_says_where_items_and_what_was_inspected_go(tmp_path):
    flaxckpt.save(tmp_path / "x", STATE, items={"config": 1})
    with pytest.raises(ArgumentError, match="Pass its attribute tree"):
        flaxckpt.restore(tmp_path / "x", flaxckpt.inspect(tmp_path / "x"))
    with pytest.raises(ArgumentError, match=r"Use flaxckpt.restore_items\(path, "):
        flaxckpt.restore(tmp_path / "x", items={"config": None})


def test_path_and_tree_in_the_wrong_order_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="takes a path, got a dict. Pass the path first"):
        flaxckpt.save(STATE, tmp_path / "x")
    with pytest.raises(ArgumentError, match="takes a path"):
        CheckpointManager(STATE)


def test_one_transform_is_no_list_of_them(tmp_path):
    flaxckpt.save(tmp_path / "x", STATE)
    with pytest.raises(ArgumentError, match=r"Pass transforms=\[Rename\(\.\.\.\)\]"):
        flaxckpt.restore(tmp_path / "x", transforms=flaxckpt.Rename("w", "v"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"metrics": 0.5}, 'Pass metrics={"loss": 0.5}.'),
        ({"items": [1]}, 'Pass items={"data": train_iterator}.'),
        ({"metadata": "abc"}, 'Pass metadata={"git": "abc123"}.'),
    ],
)
def test_what_goes_by_name_must_have_names(ckpt, given, said):
    with pytest.raises(ArgumentError) as caught:
        ckpt(0, STATE, **given)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("all_steps", "steps()"), ("wait_until_finished", "wait()"), ("reload", "steps()")],
)
def test_a_name_of_orbax_gives_ours(ckpt, name, ours):
    with pytest.raises(AttributeError) as caught:
        getattr(ckpt, name)
    assert f"Use {ours}" in str(caught.value)
    assert not hasattr(ckpt, "nonsense")


def test_a_function_of_flax_gives_ours():
    with pytest.raises(AttributeError, match=r"Use flaxckpt\.save\(path, tree\), or"):
        flaxckpt.save_checkpoint("runs", STATE, 1)
    assert not hasattr(flaxckpt, "nonsense")


def test_the_signatures_stay_those_of_the_functions():
    assert list(inspect.signature(flaxckpt.save).parameters)[:3] == ["path", "tree", "overwrite"]
    assert flaxckpt.save.__doc__.startswith("Saves `tree`")
    assert next(iter(inspect.signature(CheckpointManager).parameters)) == "directory"
