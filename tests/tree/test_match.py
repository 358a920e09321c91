from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from flaxckpt.errors import Mismatch
from flaxckpt.tree.match import MAX_GUESSES, Gaps, Pairs, Sides, match

sides = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(("f4[2]", "f4[3]", "i4[2]")))


class Typed(NamedTuple):
    spec: str


def compare(saved, target, *, pairs=None, gaps=Gaps(), **empties):
    """Matches specs by name."""
    sides = Sides({name: Typed(spec) for name, spec in saved.items()}, target, **empties)
    return match(sides, pairs or Pairs({n: n for n in target if n in saved}, {}), differ, gaps)


def rows_of(saved, target, **options):
    return compare(saved, target, **options).mismatches


def differ(saved: str, target: str) -> str:
    """A problem of two specs, as text."""
    if saved[:2] != target[:2]:
        return "dtype"
    return "" if saved == target else "shape"


@given(sides, sides)
def test_exactly_the_leaves_that_differ_are_listed(saved, target):
    model = set()
    for name in "abcdef":
        a, b = saved.get(name), target.get(name)
        if a == b:
            continue
        problem = "missing" if a is None else "unexpected" if b is None else differ(a, b)
        model.add((problem, name, a or "-", b or "-"))
    rows = rows_of(saved, target)
    assert {(m.problem, m.name, m.checkpoint, m.target) for m in rows} == model
    assert len(rows) == len(model)


@given(sides, sides)
def test_rows_are_in_the_order_of_the_target_then_of_the_checkpoint(saved, target):
    order = [*target, *(name for name in saved if name not in target)]
    positions = [order.index(m.name) for m in rows_of(saved, target)]
    assert positions == sorted(positions)


@given(sides, sides)
def test_only_a_missing_leaf_has_a_guess_and_it_is_an_unexpected_one(saved, target):
    rows = rows_of(saved, target)
    guesses = {f"(did you mean {m.name}?)" for m in rows if m.problem == "unexpected"}
    assert all(m.note in guesses | {""} for m in rows)
    assert all(m.problem == "missing" for m in rows if m.note)


def test_the_same_leaves_match():
    assert rows_of({"a": "int"}, {"a": "int"}) == []


def test_a_renamed_leaf_is_guessed():
    saved, target = {"params/classifier/kernel": "x"}, {"params/head/kernel": "x"}
    assert rows_of(saved, target)[0].note == "(did you mean params/classifier/kernel?)"


def test_a_leaf_of_the_same_type_is_guessed_before_one_of_a_closer_name():
    saved = {"layer_10/kernel": "f4[2]", "layer_1/kernels": "f4[3]"}
    (row, *_) = rows_of(saved, {"layer_1/kernel": "f4[2]"})
    assert row.note == "(did you mean layer_10/kernel?)"


def test_nothing_is_guessed_when_nothing_is_alike():
    assert rows_of({"zzz": "int"}, {"params/kernel": "int"})[0].note == ""


def test_the_number_of_guesses_is_bounded():
    saved = {f"old/kernel_{i}": "x" for i in range(MAX_GUESSES + 5)}
    target = {f"new/kernel_{i}": "x" for i in range(MAX_GUESSES + 5)}
    assert sum(bool(m.note) for m in rows_of(saved, target)) == MAX_GUESSES


def test_an_empty_node_in_the_place_of_a_leaf_is_a_mismatch_whatever_is_allowed():
    allowed = Gaps(lambda name: True, lambda name: True)
    rows = rows_of({}, {"a": "int"}, gaps=allowed, saved_empties={"a": "None (empty)"})
    assert rows == [Mismatch("empty", "a", "None (empty)", "int")]
    rows = rows_of({"a": "int"}, {}, gaps=allowed, target_empties={"a": "EmptyState (empty)"})
    assert rows == [Mismatch("empty", "a", "int", "EmptyState (empty)")]


def test_a_masked_parameter_is_called_that():
    (row,) = rows_of({}, {"a": "int"}, saved_empties={"a": "MaskedNode (empty)"})
    assert row.note == "(masked in the checkpoint)"
    (row,) = rows_of({"a": "int"}, {}, target_empties={"a": "MaskedNode (empty)"})
    assert row.note == "(masked in the target)"


@given(sides, sides, st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef")))
def test_what_is_allowed_is_no_mismatch_and_is_told(saved, target, may_miss, may_ignore):
    gaps = Gaps(may_miss.__contains__, may_ignore.__contains__)
    found = compare(saved, target, gaps=gaps)
    assert set(found.initialised) == (target.keys() - saved.keys()) & may_miss
    assert set(found.ignored) == (saved.keys() - target.keys()) & may_ignore
    strict = {m.name for m in rows_of(saved, target)}
    named = {m.name for m in found.mismatches}
    assert named | set(found.initialised) | set(found.ignored) == strict
    assert not named & {*found.initialised, *found.ignored}


def test_a_pair_of_two_names_is_compared_and_shows_both():
    pairs = Pairs({"new": "old"}, {})
    assert rows_of({"old": "f4[2]"}, {"new": "f4[2]"}, pairs=pairs) == []
    (row,) = rows_of({"old": "f4[2]"}, {"new": "f4[3]"}, pairs=pairs)
    assert row == Mismatch("shape", "new", "f4[2]", "f4[3]", "(saved as old)")


def test_candidates_are_listed_and_not_unexpected_themselves():
    pairs = Pairs({}, {"mu": ["0/mu", "1/mu"]})
    rows = rows_of({"0/mu": "f4[2]", "1/mu": "f4[2]"}, {"mu": "f4[2]"}, pairs=pairs)
    assert rows == [Mismatch("ambiguous", "mu", "-", "f4[2]", "(may be 0/mu or 1/mu)")]


def test_a_type_that_is_not_needed_is_not_computed():
    class Costly:
        @property
        def spec(self):
            raise AssertionError("computed")

    gaps = Gaps(ignores=lambda name: True)
    found = match(Sides({"a": Costly()}, {}), Pairs({}, {}), differ, gaps)
    assert found.ignored == ["a"]
