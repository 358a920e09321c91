"""Going back to an older step: what came after it is gone for every reader, and for good."""

from __future__ import annotations

import os

import numpy as np
import orbax.checkpoint as ocp
import pytest

import flaxckpt
from flaxckpt import CheckpointManager, Every, Keep, Options, errors
from tests import cluster, stores
from tests.processes import run

RENAMED, MARKED = Options(fsync=False), Options(fsync=False, atomic_rename=False)


def state(branch, step):
    return {"branch": branch, "step": step, "w": np.full(4, float(step))}


def train(path, branch, steps, options=RENAMED, **settings):
    with CheckpointManager(path, options=options, **settings) as ckpt:
        for step in steps:
            assert ckpt(step, state(branch, step))


@pytest.mark.parametrize("options", [RENAMED, MARKED], ids=["rename", "marker"])
def test_a_new_branch_takes_the_place_of_the_old_one(options, tmp_path):
    train(tmp_path, "old", range(6), options)
    with CheckpointManager(tmp_path, options=options) as ckpt:
        ckpt.restore()
        ckpt.rollback(1)
        assert (ckpt.steps(), ckpt.last_step, ckpt.next_step) == ([0, 1], 1, 2)
        assert CheckpointManager(tmp_path, read_only=True).latest_step() == 1
        assert ocp.CheckpointManager(tmp_path).all_steps() in ([0, 1], [1, 0]) or options is MARKED
        assert ckpt.restore()["step"] == 1
        for step in range(ckpt.next_step, 5):
            assert ckpt(step, state("new", step))
    with CheckpointManager(tmp_path, options=options) as ckpt:
        assert ckpt.steps() == [0, 1, 2, 3, 4]
        assert (ckpt.restore()["branch"], ckpt.restore()["step"]) == ("new", 4)
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "3", "4"]
    for step in range(5):
        assert flaxckpt.verify(tmp_path / str(step))


@pytest.mark.parametrize("options", [RENAMED, MARKED], ids=["rename", "marker"])
def test_a_restart_before_the_next_commit_does_not_bring_them_back(options, tmp_path):
    train(tmp_path, "old", range(4), options)
    run(f"""
        import os, flaxckpt
        options = flaxckpt.Options(fsync=False, atomic_rename={options.atomic_rename})
        flaxckpt.CheckpointManager({str(tmp_path)!r}, options=options).rollback(1)
        os._exit(0)
    """)
    names = set(os.listdir(tmp_path))
    with CheckpointManager(tmp_path, options=options) as ckpt:
        assert ckpt.steps() == [0, 1]
        assert set(os.listdir(tmp_path)) == names, "they are kept until the next commit"
        assert len(names) == 4
        ckpt.save(9, state("new", 9), wait=True)
        assert sorted(os.listdir(tmp_path)) == ["0", "1", "9"]


def test_the_hosts_own_disks_go_back_too(tmp_path):
    settings = {"local": tmp_path / "local", "save_every": Every(steps=4)}
    train_local = {"options": RENAMED, **settings}
    with CheckpointManager(tmp_path / "run", **train_local) as ckpt:
        for step in range(7):
            ckpt(step, state("old", step))
        ckpt.rollback(4)
    with CheckpointManager(tmp_path / "run", **train_local) as ckpt:
        assert ckpt.restore()["step"] == 4
        ckpt(5, state("new", 5))
    with CheckpointManager(tmp_path / "run", **train_local) as ckpt:
        assert (ckpt.restore()["branch"], ckpt.last_step) == ("new", 5)
    left = os.listdir(tmp_path / "local" / "process_0")
    assert not [name for name in left if "aside" in name]


def test_in_a_bucket(tmp_path):
    with stores.opened("s3", tmp_path) as store:
        url, options = store.url("run"), store.options()
        train(url, "old", range(4), options)
        with CheckpointManager(url, options=options) as ckpt:
            ckpt.rollback(1)
            assert ckpt.steps() == [0, 1]
        with CheckpointManager(url, options=options) as ckpt:
            assert ckpt.next_step == 2
            for step in (2, 4):
                assert ckpt(step, state("new", step))
            ckpt.wait()
            assert ckpt.steps() == [0, 1, 2, 4]
            assert ckpt.restore(step=2)["branch"] == "new"
        assert store.strays("run") == []


def test_what_cannot_be_done_changes_nothing(tmp_path):
    train(tmp_path, "old", range(4))
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.pin(3)
        with pytest.raises(errors.StepPinnedError, match="step 3"):
            ckpt.rollback(1)
        with pytest.raises(errors.CheckpointNotFoundError, match="no step 7"):
            ckpt.rollback(7)
        assert ckpt.steps() == [0, 1, 2, 3]
    with pytest.raises(errors.ManagerError, match="read-only"):
        CheckpointManager(tmp_path, read_only=True).rollback(1)


def test_a_later_step_that_is_damaged_goes_too(tmp_path):
    train(tmp_path, "old", range(3))
    (tmp_path / "2" / "_CHECKPOINT_METADATA").write_bytes(b'{"flaxckpt":')
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.rollback(1)
        assert ckpt.steps() == [0, 1]


def test_without_it_training_on_from_an_earlier_step_is_refused(tmp_path):
    train(tmp_path, "old", (0, 1, 2, 5))
    with CheckpointManager(tmp_path, options=RENAMED) as ckpt:
        ckpt.restore(step=1)
        for step in (2, 3, 5):  # there, between those that are there, the last
            with pytest.raises(errors.ManagerError, match=r"up to 5.*Call rollback\(1\)"):
                ckpt(step, state("new", step))
        assert (ckpt.steps(), ckpt.restore(step=2)["branch"]) == ([0, 1, 2, 5], "old")
        ckpt.restore(step=1)
        ckpt.rollback(1)
        assert ckpt(2, state("new", 2))
        assert ckpt.steps() in ([0, 1], [0, 1, 2])
    with CheckpointManager(tmp_path, options=RENAMED) as ckpt:
        assert ckpt.restore()["branch"] == "new"


def test_a_look_at_an_earlier_step_does_not_stop_a_loop_that_is_ahead(tmp_path):
    train(tmp_path, "old", range(3))
    with CheckpointManager(tmp_path, options=RENAMED) as ckpt:
        ckpt.restore(step=0)
        assert ckpt(3, state("old", 3))


def test_retention_and_followers_go_on(tmp_path):
    reader = CheckpointManager(tmp_path, read_only=True)
    with CheckpointManager(tmp_path, keep=Keep(last=2), options=RENAMED) as ckpt:
        for step in range(5):
            ckpt(step, state("old", step))
        ckpt.wait()
        following = reader.follow(timeout_secs=30, poll_secs=0.01)
        assert [next(following), next(following)] == [3, 4]
        ckpt.rollback(3)
        hook = flaxckpt.PeriodicCheckpoint(ckpt, every_steps=2)
        assert list(reader.follow(timeout_secs=0)) == [3]
        assert [hook(step, state=state("new", step)) for step in (4, 5, 6)] == [True, False, True]
        ckpt.wait()
        assert ckpt.steps() == [4, 6]
        assert next(following) == 6


def go_back(context, path):
    with CheckpointManager(path, local=path / f"host{context.index}", options=RENAMED) as ckpt:
        for step in range(4):
            ckpt(step, {"step": step})
        ckpt.rollback(1)
        assert (ckpt.steps(), ckpt.next_step) == ([0, 1], 2)
        found = ckpt.restore()
        ckpt(2, {"step": -2})
        return found


def test_several_processes_agree(tmp_path):
    results = cluster.run(go_back, 2, tmp_path)
    assert [result.value for result in results] == [{"step": 1}] * 2
    with CheckpointManager(tmp_path) as ckpt:
        assert (ckpt.steps(), ckpt.restore()) == ([0, 1, 2], {"step": -2})
