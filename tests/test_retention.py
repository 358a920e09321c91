from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flaxckpt import Keep
from flaxckpt.run.retention import StepInfo, best_first

_counts = st.none() | st.integers(1, 4)
_metrics = st.none() | st.sampled_from((0.0, 1.0, 2.0, -1.0, math.nan, math.inf, -math.inf))
_infos = st.lists(
    st.builds(
        StepInfo,
        st.integers(0, 30),
        st.integers(0, 20).map(lambda hours: 3600.0 * hours),
        _metrics,
        st.booleans(),
    ),
    max_size=9,
    unique_by=lambda info: info.step,
)
_keeps = st.builds(Keep, _counts, _counts, st.none() | st.integers(1, 10), _counts)
_modes = st.sampled_from(("min", "max"))


def by_losses(*losses: float | None) -> list[StepInfo]:
    """Steps 0, 1, ... with these losses."""
    return [StepInfo(step, metric=loss) for step, loss in enumerate(losses)]


def best_steps(infos, count, mode):
    """The `count` best steps, found by taking the best one again and again."""
    left = [i for i in infos if i.metric is not None and i.metric == i.metric]
    found = set()
    while left and len(found) < count:
        value = (min if mode == "min" else max)(i.metric for i in left)
        best = max((i for i in left if i.metric == value), key=lambda i: i.step)
        left.remove(best)
        found.add(best.step)
    return found


def hourly_steps(infos, hours):
    """The first step, and each that is `hours` newer than the one before it."""
    found, last = set(), None
    for info in sorted(infos, key=lambda i: i.step):
        if last is None or info.time >= last + hours * 3600:
            found.add(info.step)
            last = info.time
    return found


@settings(max_examples=500)
@given(_keeps, _infos, _modes)
def test_what_is_kept_is_the_union_of_what_each_rule_keeps(keep, infos, mode):
    steps = sorted(info.step for info in infos)
    expected = set(steps[-1:]) | {info.step for info in infos if info.pinned}
    if keep == Keep():
        expected = set(steps)
    if keep.last:
        expected |= set(steps[-keep.last :])
    if keep.best:
        expected |= best_steps(infos, keep.best, mode)
    if keep.every:
        expected |= {s for s in steps if s % keep.every == 0}
    if keep.hours:
        expected |= hourly_steps(infos, keep.hours)
    assert keep.select(infos, mode=mode) == expected


@given(_keeps, _infos, _modes)
def test_the_newest_and_the_pinned_are_always_kept(keep, infos, mode):
    kept = keep.select(infos, mode=mode)
    assert {info.step for info in infos if info.pinned} <= kept
    assert {max((info.step for info in infos), default=-1)} <= kept | {-1}


@given(_keeps, _infos, _modes)
def test_to_select_twice_keeps_the_same(keep, infos, mode):
    kept = keep.select(infos, mode=mode)
    left = [info for info in infos if info.step in kept]
    assert keep.select(left, mode=mode) == kept


@given(_keeps, _infos, _modes, st.randoms())
def test_the_order_of_the_steps_does_not_matter(keep, infos, mode, random):
    shuffled = list(infos)
    random.shuffle(shuffled)
    assert keep.select(shuffled, mode=mode) == keep.select(infos, mode=mode)


@given(_infos, _modes)
def test_without_rules_everything_is_kept(infos, mode):
    assert Keep().select(infos, mode=mode) == {info.step for info in infos}


@given(_infos, _modes)
def test_nan_is_never_best(infos, mode):
    assert all(not math.isnan(info.metric) for info in best_first(infos, mode))


def test_a_rising_loss_does_not_delete_the_newest_step():
    infos = by_losses(0.1, 0.2, 0.3, 0.4, 0.5)
    assert Keep(last=1, best=3).select(infos, mode="min") == {0, 1, 2, 4}


def test_best_alone_keeps_the_newest_too():
    assert Keep(best=1).select(by_losses(0.1, 0.2, 0.3), mode="min") == {0, 2}


def test_of_equals_the_newer_is_best():
    assert Keep(best=1).select(by_losses(1.0, 1.0, 2.0), mode="min") == {1, 2}


@pytest.mark.parametrize(("mode", "best"), [("min", 1), ("max", 2)])
def test_the_mode_decides_what_is_best(mode, best):
    infos = by_losses(2.0, 1.0, 3.0, None)
    assert best_first(infos, mode)[0].step == best


def test_nan_does_not_take_the_place_of_a_number():
    infos = by_losses(math.nan, 5.0, math.nan, 6.0, math.nan)
    assert Keep(best=2).select(infos, mode="min") == {1, 3, 4}


def test_step_zero_is_a_multiple():
    assert Keep(every=10).select([StepInfo(s) for s in (0, 5, 10, 15)], mode="min") == {0, 10, 15}


def test_hours_count_from_the_step_that_was_kept_before():
    infos = [StepInfo(i, time=3600.0 * hour) for i, hour in enumerate((0, 0.9, 1.1, 1.9, 2.2))]
    assert Keep(hours=1).select(infos, mode="min") == {0, 2, 4}


def test_no_steps_are_no_steps():
    assert Keep(last=1).select([], mode="min") == frozenset()


@pytest.mark.parametrize("field", ["last", "best", "every", "hours"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_number_that_is_not_positive_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"Keep\.{field} must be positive"):
        Keep(**{field: value})
