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
_modes = st.sampled_from(("min", "max"))
_keeps = st.builds(
    Keep,
    last=_counts,
    best=_counts,
    mode=_modes,
    every=st.none() | st.integers(1, 10),
    hours=_counts,
)


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
@given(_keeps, _infos)
def test_what_is_kept_is_the_union_of_what_each_rule_keeps(keep, infos):
    steps = sorted(info.step for info in infos)
    expected = set(steps[-1:]) | {info.step for info in infos if info.pinned}
    if not (keep.last or keep.best or keep.every or keep.hours):
        expected = set(steps)
    if keep.last:
        expected |= set(steps[-keep.last :])
    if keep.best:
        expected |= best_steps(infos, keep.best, keep.mode)
        if not (keep.last or keep.every or keep.hours):
            expected |= {info.step for info in infos if info.metric is None}
    if keep.every:
        after = [[s for s in steps if s >= m] for m in range(0, 31, keep.every)]
        expected |= {found[0] for found in after if found}
    if keep.hours:
        expected |= hourly_steps(infos, keep.hours)
    assert keep.select(infos) == expected


@given(_keeps, _infos)
def test_the_newest_and_the_pinned_are_always_kept(keep, infos):
    kept = keep.select(infos)
    assert {info.step for info in infos if info.pinned} <= kept
    assert {max((info.step for info in infos), default=-1)} <= kept | {-1}


@given(_keeps, _infos)
def test_to_select_twice_keeps_the_same(keep, infos):
    kept = keep.select(infos)
    left = [info for info in infos if info.step in kept]
    assert keep.select(left) == kept


@given(_keeps, _infos, st.randoms())
def test_the_order_of_the_steps_does_not_matter(keep, infos, random):
    shuffled = list(infos)
    random.shuffle(shuffled)
    assert keep.select(shuffled) == keep.select(infos)


@given(_infos)
def test_without_rules_everything_is_kept(infos):
    assert Keep().select(infos) == {info.step for info in infos}


@given(_infos, _modes)
def test_nan_is_never_best(infos, mode):
    assert all(not math.isnan(info.metric) for info in best_first(infos, mode))


def test_a_rising_loss_does_not_delete_the_newest_step():
    infos = by_losses(0.1, 0.2, 0.3, 0.4, 0.5)
    assert Keep(last=1, best=3, mode="min").select(infos) == {0, 1, 2, 4}


def test_best_alone_keeps_the_newest_too():
    assert Keep(best=1, mode="min").select(by_losses(0.1, 0.2, 0.3)) == {0, 2}


def test_of_equals_the_newer_is_best():
    assert Keep(best=1, mode="min").select(by_losses(1.0, 1.0, 2.0)) == {1, 2}


@pytest.mark.parametrize(("mode", "best"), [("min", 1), ("max", 2)])
def test_the_mode_decides_what_is_best(mode, best):
    infos = by_losses(2.0, 1.0, 3.0, None)
    assert best_first(infos, mode)[0].step == best


def test_nan_does_not_take_the_place_of_a_number():
    infos = by_losses(math.nan, 5.0, math.nan, 6.0, math.nan)
    assert Keep(best=2, mode="min").select(infos) == {1, 3, 4}


def test_step_zero_is_a_multiple():
    assert Keep(every=10).select([StepInfo(s) for s in (0, 5, 10, 15)]) == {0, 10, 15}


def test_the_first_step_at_or_after_each_multiple_is_kept():
    infos = [StepInfo(step) for step in range(3, 50, 7)]  # 3 10 17 24 31 38 45
    assert Keep(every=10).select(infos) == {3, 10, 24, 31, 45}


def test_a_step_without_the_metric_falls_under_the_other_rules():
    infos = by_losses(1.0, None, 2.0, None, 3.0)
    assert Keep(best=1, last=1, mode="min").select(infos) == {0, 4}


def test_a_step_without_the_metric_stays_where_best_is_the_only_rule():
    infos = by_losses(1.0, None, math.nan, None, 3.0)
    assert Keep(best=1, mode="min").select(infos) == {0, 1, 3, 4}


@pytest.mark.parametrize("given", [{"best": 1}, {"metric": "loss"}, {"best": 2, "metric": "loss"}])
def test_what_is_best_needs_a_mode(given):
    with pytest.raises(ValueError, match='needs mode="min" or mode="max"'):
        Keep(**given)
    with pytest.raises(ValueError, match='mode must be "min" or "max"'):
        Keep(mode="least", **given)


def test_hours_count_from_the_step_that_was_kept_before():
    infos = [StepInfo(i, time=3600.0 * hour) for i, hour in enumerate((0, 0.9, 1.1, 1.9, 2.2))]
    assert Keep(hours=1).select(infos) == {0, 2, 4}


def test_no_steps_are_no_steps():
    assert Keep(last=1).select([]) == frozenset()


@pytest.mark.parametrize("field", ["last", "best", "every", "hours"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_number_that_is_not_positive_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"Keep\.{field} must be positive"):
        Keep(mode="min", **{field: value})


def test_nan_hours_are_refused():
    with pytest.raises(ValueError, match=r"Keep\.hours must be positive"):
        Keep(hours=math.nan)
