"""What a long run and a large tree cost, in calls. Times are never asserted."""

import os
import shutil
import sys

import jax.numpy as jnp
import pytest

import flaxckpt

pytestmark = pytest.mark.slow

OPTIONS = flaxckpt.Options(fsync=False)
FEW, MANY = 3, 300


def calls(function, *, of_files):
    """How many calls `function` makes on this thread: all, or only those of the file system."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        if of_files:
            is_file = getattr(arg, "__module__", None) == os.open.__module__ or arg is open
            count += event == "c_call" and is_file
        else:
            count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def a_run(directory, steps, **arguments):
    """Opens a run that holds so many steps, all alike, and saves the next one."""
    state = {"x": jnp.zeros(4), "n": 1}
    if not directory.exists():
        flaxckpt.CheckpointManager(directory).save(0, state, metrics={"loss": 1.0}, wait=True)
        for step in range(1, steps):
            shutil.copytree(directory / "0", directory / str(step), copy_function=os.link)
    manager = flaxckpt.CheckpointManager(directory, async_=False, options=OPTIONS, **arguments)
    return manager, state


@pytest.fixture
def runs(tmp_path):
    """Opens a run with few steps, and one with many."""

    def open_both(**arguments):
        return [a_run(tmp_path / str(steps), steps, **arguments) for steps in (FEW, MANY)]

    return open_both


def test_opening_a_run_costs_the_same_however_many_steps_it_holds(runs, tmp_path):
    runs()  # which also imports all there is
    few, many = (
        calls(lambda n=n: flaxckpt.CheckpointManager(tmp_path / str(n)), of_files=True)
        for n in (FEW, MANY)
    )
    assert few == many > 0


def test_a_save_costs_the_same_however_many_steps_the_run_holds(runs):
    opened = runs(save_every=flaxckpt.Every(steps=1))
    few, many = (calls(lambda m=m: m[0](1000, m[1]), of_files=True) for m in opened)
    assert few == many > 0


KEEPS = [
    flaxckpt.Keep(last=1000),
    flaxckpt.Keep(last=2, every=1),
    flaxckpt.Keep(best=1000, mode="min"),
]


@pytest.mark.parametrize("keep", KEEPS, ids=str)
def test_after_the_first_save_retention_costs_the_same_however_many_steps_there_are(runs, keep):
    counts = []
    for manager, state in runs(keep=keep):
        manager.save(1000, state, metrics={"loss": 2.0})
        save = lambda: manager.save(1001, state, metrics={"loss": 2.0})  # noqa: B023, E731
        counts.append(calls(save, of_files=True))
    assert counts[0] == counts[1] > 0


def test_finding_the_newest_step_costs_the_same_however_many_there_are(runs):
    few, many = (calls(lambda m=m: m[0].latest_step(), of_files=True) for m in runs())
    assert few == many > 0


def tree(leaves):
    return {f"layer_{n}": jnp.full(4, n) for n in range(leaves)}


@pytest.mark.parametrize("what", ["first save", "later save", "restore"])
def test_the_work_for_a_leaf_is_the_same_however_many_there_are(tmp_path, what):
    def calls_per_leaf(leaves):
        state = tree(leaves)
        run = tmp_path / str(leaves)
        manager = flaxckpt.CheckpointManager(run, async_=False, options=OPTIONS)
        if what != "first save":
            manager.save(0, state)
        function = {
            "first save": lambda: manager.save(0, state),
            "later save": lambda: manager.save(1, state),
            "restore": lambda: manager.restore(state),
        }[what]
        return calls(function, of_files=False) / leaves

    calls_per_leaf(10)  # imports and caches
    few, many = calls_per_leaf(500), calls_per_leaf(5000)
    assert many < 1.1 * few
