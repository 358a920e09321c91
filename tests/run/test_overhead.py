"""`Every(max_overhead=...)` in a manager, with a clock in the test's hand."""

from __future__ import annotations

import flaxckpt


class Clock:
    """Seconds."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Costly:
    """A leaf that takes `seconds` to save."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds


def _encode(leaf):
    leaf.clock.now += leaf.seconds
    return 0


def saved_steps(run, clock, leaf, count, **every):
    """The steps that a loop with a step a second saves."""
    flaxckpt.register_leaf_handler("costly", Costly, _encode, lambda _: None)
    schedule = flaxckpt.Every(max_overhead=0.1, **every)
    with flaxckpt.CheckpointManager(run, save_every=schedule, clock=clock, async_=False) as ckpt:
        for step in range(count):
            ckpt(step, {"leaf": leaf})
            clock.now += 1
        return ckpt.steps()


def test_saves_are_spaced_so_that_the_loop_loses_no_more_than_it_may(tmp_path):
    clock = Clock()
    steps = saved_steps(tmp_path / "run", clock, Costly(clock, 2.0), 100)
    assert steps[0] == 0
    assert 2 * len(steps) <= 0.1 * clock.now + 2
    assert 4 <= len(steps) <= 6


def test_saves_that_cost_little_are_not_held_back(tmp_path):
    clock = Clock()
    assert saved_steps(tmp_path / "run", clock, Costly(clock, 0.01), 21, steps=5) == [
        0,
        5,
        10,
        15,
        20,
    ]


def test_a_save_that_becomes_dear_puts_the_next_ones_off(tmp_path):
    clock = Clock()
    leaf = Costly(clock, 0.001)
    first = saved_steps(tmp_path / "a", clock, leaf, 20, steps=5)
    leaf.seconds = 5.0
    second = saved_steps(tmp_path / "b", clock, leaf, 60, steps=5)
    assert len(first) == 4
    assert len(second) == 1


def test_waiting_for_the_save_before_counts(tmp_path):
    clock = Clock()
    every = flaxckpt.Every(max_overhead=0.5)
    with flaxckpt.CheckpointManager(tmp_path / "run", save_every=every, clock=clock) as ckpt:
        real = ckpt.wait

        def slow():
            clock.now += 10
            real()

        ckpt(0, {"x": 1})
        clock.now += 1
        ckpt.wait = slow
        assert ckpt(1, {"x": 1})
        del ckpt.wait
        clock.now += 5
        assert not ckpt(2, {"x": 1})
        clock.now += 10
        assert ckpt(3, {"x": 1})
