from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flaxckpt import Every
from flaxckpt.run.schedule import Pacer

_at = st.lists(st.integers(0, 60), max_size=4)


@settings(max_examples=500)
@given(st.integers(1, 12), _at, st.lists(st.integers(0, 60), max_size=12))
def test_a_step_is_due_when_a_wanted_one_lies_after_the_last_decision(steps, at, sequence):
    every, last = Every(steps=steps, at=at), -1
    for step in sequence:
        wanted = any(s % steps == 0 or s in at for s in range(last + 1, step + 1))
        assert every.due(step, last=last, elapsed=0.0) is wanted
        last = max(last, step)


@given(st.integers(1, 9), st.lists(st.integers(0, 99), max_size=20))
def test_a_pacer_never_saves_one_multiple_twice(steps, sequence):
    pacer, saved = Pacer(Every(steps=steps)), []
    saved = [step // steps for step in sequence if pacer.decide(step, 0.0)]
    assert saved == sorted(set(saved))


@settings(max_examples=300)
@given(
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 9),
    _at,
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6), st.booleans()), max_size=15),
)
def test_a_pacer_agrees_with_a_list_of_all_steps(steps, secs, at, calls):
    assume(steps or secs or at)
    pacer, decided, since, now = Pacer(Every(steps=steps, secs=secs, at=at)), None, None, 0
    for step, passed, done in calls:
        now += passed
        since = now if since is None else since
        first = step if decided is None else decided + 1
        wanted = [s for s in range(first, step + 1) if (steps and s % steps == 0) or s in at]
        late = secs is not None and now - since > secs and step >= first
        assert pacer.decide(step, now) is (bool(wanted) or late)
        decided = step if decided is None else max(decided, step)
        if done:
            pacer.saved(step, now)
            decided, since = step, now


@pytest.mark.parametrize(("step", "due"), [(0, True), (1, False), (100, True), (250, False)])
def test_the_first_call_decides_on_its_own_step_only(step, due):
    assert Pacer(Every(steps=100)).decide(step, 0.0) is due


def test_step_zero_is_a_multiple():
    assert Every(steps=5).due(0, last=-1, elapsed=0.0)


@pytest.mark.parametrize("step", [4, 5])
def test_a_step_that_repeats_or_goes_back_is_not_due(step):
    assert not Every(steps=1, secs=1, at=[4, 5]).due(step, last=5, elapsed=99.0)


@pytest.mark.parametrize(
    ("every", "elapsed", "due"),
    [
        (Every(secs=10), 10.0, False),
        (Every(secs=10), 10.001, True),
        (Every(minutes=2), 120.0, False),
        (Every(minutes=2), 120.001, True),
        (Every(minutes=0.5), 31.0, True),
    ],
)
def test_time_is_due_when_strictly_more_has_passed(every, elapsed, due):
    assert every.due(1, last=0, elapsed=elapsed) is due


def test_time_counts_from_the_first_decision():
    pacer = Pacer(Every(secs=10))
    assert [pacer.decide(i, 1000.0 + 6 * i) for i in range(4)] == [False, False, True, True]


def test_time_counts_from_the_last_save():
    pacer = Pacer(Every(secs=10))
    pacer.decide(0, 0.0)
    pacer.saved(1, 8.0)
    assert not pacer.decide(2, 18.0)
    assert pacer.decide(3, 18.5)


def test_a_step_that_was_restored_is_not_saved_again():
    pacer = Pacer(Every(steps=10))
    pacer.saved(20, 0.0)
    assert [pacer.decide(step, 0.0) for step in (20, 21, 29, 30)] == [False, False, False, True]


def test_conditions_are_alternatives():
    every = Every(steps=10, secs=5, at=[3])
    assert every.due(3, last=2, elapsed=0.0)
    assert every.due(10, last=9, elapsed=0.0)
    assert every.due(4, last=3, elapsed=6.0)
    assert not every.due(4, last=3, elapsed=1.0)


def test_a_schedule_without_conditions_would_never_save_and_is_refused():
    with pytest.raises(ValueError, match="needs a condition"):
        Every()


@given(_at, st.integers(0, 60), st.integers(-1, 60))
def test_jumped_over_are_the_steps_between(at, step, last):
    between = tuple(s for s in sorted(set(at)) if s in range(last + 1, step))
    assert Every(steps=1, at=at).jumped_over(step, last=last) == between


@pytest.mark.parametrize("field", ["steps", "secs", "minutes", "max_overhead"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_number_that_is_not_positive_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"Every\.{field} must be positive"):
        Every(**{field: value})


@pytest.mark.parametrize("field", ["secs", "minutes", "max_overhead"])
def test_nan_is_refused(field):
    with pytest.raises(ValueError, match=rf"Every\.{field} must be positive"):
        Every(**{field: float("nan")})


def test_secs_and_minutes_together_are_refused():
    with pytest.raises(ValueError, match="secs or minutes, not both"):
        Every(secs=1, minutes=1)


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match=r"Every\.at must not be negative, got -3"):
        Every(at=[5, -3])


def test_at_is_sorted_and_may_be_any_iterable():
    assert Every(at=iter([5, 1, 5])).at == (1, 5)


def test_a_schedule_is_immutable_and_hashable():
    every = Every(steps=1)
    assert hash(every) == hash(Every(steps=1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        every.steps = 2


@settings(max_examples=200)
@given(
    st.sampled_from((0.01, 0.1, 0.5)),
    st.floats(0.01, 9),
    st.lists(st.floats(0.001, 5), min_size=1, max_size=60),
    st.none() | st.integers(1, 7),
)
def test_the_loop_never_loses_more_than_its_share_to_saves(share, cost, train, steps):
    pacer, now, lost = Pacer(Every(steps=steps, max_overhead=share)), 0.0, 0.0
    for step, seconds in enumerate(train):
        first = pacer.cost == 0
        if pacer.decide(step, now):
            # What the first save costs is not known before.
            assert first or lost + cost <= share * now * (1 + 1e-9)
            now, lost = now + cost, lost + cost
            pacer.saved(step, now)
            pacer.paid(cost)
        now += seconds


def test_without_other_conditions_a_save_is_made_as_soon_as_it_can_be_paid_for():
    pacer, saved = Pacer(Every(max_overhead=0.1)), []
    for step in range(60):
        if pacer.decide(step, float(step)):
            saved.append(step)
            pacer.saved(step, float(step))
            pacer.paid(1.0)
    assert saved == [0, 20, 30, 40, 50]


def test_a_save_that_was_put_off_is_made_up_for():
    pacer = Pacer(Every(steps=10, max_overhead=0.1))
    assert pacer.decide(0, 0.0)
    pacer.saved(0, 0.0)
    pacer.paid(1.0)
    due = [step for step in range(1, 30) if pacer.decide(step, step * 1.5)]
    assert due[0] == 14  # 21 seconds: the first that pays for two saves


def test_a_step_of_at_is_saved_whatever_it_costs():
    pacer = Pacer(Every(at=[3], max_overhead=0.01))
    pacer.paid(100.0)
    assert [pacer.decide(step, float(step)) for step in range(5)] == [
        False,
        False,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("share", [1, 1.5])
def test_a_share_must_be_below_one(share):
    with pytest.raises(ValueError, match=r"Every\.max_overhead must be below 1"):
        Every(max_overhead=share)
