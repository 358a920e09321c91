"""What a loop asks its manager beside saving: whether a save is due, and to be told of commits."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from etils import epath

from flaxckpt import CheckpointManager, Every, Keep, Options, errors, on_preemption

FAST = Options(fsync=False)
STATE = {"w": np.ones(2)}


def manager(path, **settings):
    return CheckpointManager(path / "run", options=FAST, **settings)


@pytest.mark.filterwarnings("ignore:the loop went from step")
@pytest.mark.parametrize(
    "every", [Every(steps=3), Every(at=[2, 7]), Every(secs=2.5), Every(steps=4, at=[1])]
)
@pytest.mark.parametrize("steps", [range(12), range(1, 30, 2), [5, 5, 9, 10]])
def test_should_save_says_what_a_call_does(every, steps, tmp_path):
    now = [0.0]
    with manager(tmp_path, save_every=every, clock=lambda: now[0]) as ckpt:
        said, done = [], []
        for step in steps:
            now[0] += 1.0
            said.append((ckpt.should_save(step), ckpt.should_save(step)))
            done.append(ckpt(step, STATE))
    assert said == [(saved, saved) for saved in done]
    assert any(done)


def test_a_loop_that_only_calls_when_asked_saves_the_same_steps(tmp_path):
    now = [0.0]
    for every, expected in ((Every(steps=100), [105, 203, 301]), (Every(secs=9.5), [77, 147, 217])):
        clock = {"clock": lambda: now[0]}
        with manager(tmp_path / str(every.steps), save_every=every, **clock) as ckpt:
            for step in range(7, 308, 7):
                now[0] += 1.0
                if ckpt.should_save(step):
                    assert ckpt(step, STATE)
        assert ckpt.steps()[:3] == expected


def test_to_ask_about_a_later_step_first_changes_nothing(tmp_path):
    with manager(tmp_path, save_every=Every(steps=3)) as ckpt:
        assert not ckpt.should_save(1000)
        assert [step for step in range(8) if ckpt(step, STATE)] == [0, 3, 6]


def test_a_step_that_exists_should_not_be_saved(tmp_path):
    with manager(tmp_path) as ckpt:
        ckpt.save(3, STATE)
        assert not ckpt.should_save(3)
    with manager(tmp_path) as ckpt:
        assert [ckpt.should_save(step) for step in (2, 3, 4)] == [True, False, True]


def test_a_step_should_be_saved_when_the_job_is_to_end(tmp_path):
    with manager(tmp_path, save_every=Every(steps=100)) as ckpt, on_preemption(ckpt):
        ckpt(0, STATE)
        assert not ckpt.should_save(1)
        ckpt.ask_to_end()
        assert ckpt.should_save(1)
        assert not ckpt.preempted
        assert ckpt(1, STATE)
        assert ckpt.preempted


@pytest.mark.parametrize("async_", [True, False])
def test_on_commit_is_called_once_for_each_committed_step(async_, tmp_path):
    seen = []

    def on_commit(step, path):
        assert isinstance(path, epath.Path)
        seen.append((step, path, (path / "_CHECKPOINT_METADATA").exists()))

    with manager(tmp_path, on_commit=on_commit, async_=async_, keep=Keep(last=1)) as ckpt:
        for step in (1, 2):
            ckpt.save(step, STATE)
        with pytest.raises(errors.StepExistsError):
            ckpt.save(2, STATE)
    assert seen == [(step, ckpt.path(step), True) for step in (1, 2)]
    assert ckpt.path(2) == epath.Path(tmp_path) / "run" / "2"


def test_an_error_of_on_commit_is_raised_and_the_step_is_there(tmp_path):
    def on_commit(step, path):
        if step == 2:
            raise KeyError("tracker")

    with manager(tmp_path, on_commit=on_commit, keep=Keep(last=1)) as ckpt:
        ckpt.save(1, STATE)
        ckpt.save(2, STATE)
        with pytest.raises(
            errors.BackgroundSaveError, match="step 2 is saved, but on_commit raised"
        ):
            ckpt.wait()
        assert ckpt.steps() == [2]
        ckpt.save(3, STATE, wait=True)
        assert ckpt.steps() == [3]


def test_on_commit_does_not_hold_up_the_loop(tmp_path):
    go, seen = threading.Event(), []

    def on_commit(step, path):
        assert go.wait(60)
        seen.append(step)

    with manager(tmp_path, on_commit=on_commit) as ckpt:
        ckpt.save(1, STATE)
        assert seen == []
        go.set()
    assert seen == [1]


def test_the_run_knows_what_is_best(tmp_path):
    keep = Keep(best=1, metric="accuracy", mode="max")
    with manager(tmp_path, keep=keep) as ckpt:
        for step, accuracy in enumerate([0.1, 0.9, 0.5]):
            ckpt(step, STATE, metrics={"accuracy": accuracy, "loss": 1.0})
    assert manager(tmp_path, read_only=True).best_step() == 1
    with manager(tmp_path) as ckpt:  # another manager, without a word of it, goes on
        ckpt(3, STATE, metrics={"accuracy": 0.95, "loss": 1.0})
        ckpt.wait()
        ckpt.delete(2)
    assert manager(tmp_path, read_only=True).best_step() == 3
    assert manager(tmp_path, keep=Keep(metric="accuracy", mode="min")).best_step() == 1


def test_what_is_best_is_asked_where_nobody_has_said_it(tmp_path):
    with manager(tmp_path) as ckpt:
        assert ckpt.best_step() is None
        ckpt.save(1, STATE, metrics={"accuracy": 0.1, "loss": 2.0}, wait=True)
        with pytest.raises(errors.InvalidMetricError, match=r"Keep\(metric='accuracy', mode=...\)"):
            ckpt.best_step()


def test_a_manager_describes_its_steps(tmp_path):
    with manager(tmp_path) as ckpt:
        with pytest.raises(errors.CheckpointNotFoundError):
            ckpt.inspect()
        for step in (1, 2):
            ckpt.save(step, STATE, metrics={"loss": step}, items={"config": {"lr": 1}})
        ckpt.wait()
        assert (ckpt.inspect().step, ckpt.inspect(1).metrics) == (2, {"loss": 1.0})
        assert list(ckpt.inspect(1).items) == ["config"]
        with pytest.raises(errors.CheckpointNotFoundError, match="no step 3"):
            ckpt.inspect(3)
